"""Figures as a screen: panels beside each other where there is room, below each other where there is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_patches.observe.figures import PHASES, Figures
from sglang_patches.observe.panels import POOR_LENGTH

# Columns from which on two panels stand beside each other.
WIDE = 96
NONE = "-"


def screen(found: Figures | None, url: str, width: int, note: str = "") -> RenderableType:
    """The whole view.

    Args:
        found: None before there are two readings.
        width: of the terminal, in columns.
        note: what the person should know now, such as that the server does not answer.
    """
    if found is None:
        return Group(_head(None, url, note), Text("waiting for the first two readings", style="dim"))
    pairs = [(_load(found), _acceptance(found)), (_phases(found), _graphs(found))]
    rows: list[RenderableType] = []
    for left, right in pairs:
        if width < WIDE:
            rows += [left, right]
            continue
        row = Table.grid(expand=True, padding=(0, 1, 0, 0))
        row.add_column(ratio=1)
        row.add_column(ratio=1)
        row.add_row(left, right)
        rows.append(row)
    rows += [_allreduce(found)]
    if found.oea:
        rows.append(_oea(found))
    rows.append(_missing(found))
    return Group(_head(found, url, note), *rows)


def overview(seen: Sequence[tuple[str, Figures | None, str]], width: int) -> RenderableType:
    """Several servers, a line each.

    Args:
        seen: by server, its URL, its figures (None before there are two readings) and its note, as for `screen`.
        width: of the terminal, in columns.
    """
    columns = ("server", "tokens/s", "running", "queued", "KV", "accept length", "verify ms", "graphs")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", width=width)
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left", overflow="fold")
    below: list[Text] = []
    for url, found, note in seen:
        if found is None:
            table.add_row(url, *[NONE] * (len(columns) - 1))
            below.append(
                Text(f"{url}: {note or 'waiting for the first two readings'}", style="yellow" if note else "dim")
            )
            continue
        verify = found.phases["verify"]
        table.add_row(
            url,
            number(found.output_tokens_per_s),
            number(found.running, 0),
            number(found.queued, 0),
            share(found.kv_share),
            Text(number(found.accept_length, 2), style=_style(found)),
            number(verify.mean_ms, 2),
            share(verify.graph_share),
        )
        notes = [note, "the server was restarted" if found.restarted else ""]
        notes.append("ALARM: drafting gains nothing" if found.accept_alarm else "")
        below += [Text(f"{url}: {line}", style="yellow") for line in notes if line]
    sets = {found.patch_set_id for _, found, _ in seen if found is not None}
    if len(sets) > 1:
        told = ", ".join(f"{url} {found.patch_set_id or NONE}" for url, found, _ in seen if found is not None)
        below.append(Text(f"patch sets differ: {told}", style="yellow"))
    return Group(Text.assemble(("sglang-patches top", "bold"), f"  {len(seen)} servers"), table, *below)


def _style(found: Figures) -> str:
    """Of the accept length. A server that adapts may plan to draft nothing: 1.00 is what it should be then."""
    if found.accept_length is None:
        return ""
    poor = found.accept_length < POOR_LENGTH and bool(found.accepted)
    return "red" if found.accept_alarm or poor else "green"


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table cell, `-` where it is not known."""
    return NONE if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A share of 1 in percent, `-` where it is not known."""
    return NONE if value is None else f"{value:.0%}"


def size(count: int) -> str:
    """A power of two of bytes, such as 16 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} GiB"


def bar(value: float | None, width: int = 12) -> Text:
    """A share of 1 as a bar."""
    filled = round(min(max(value or 0.0, 0.0), 1.0) * width)
    return Text("█" * filled, style="cyan") + Text("░" * (width - filled), style="dim")


def _head(found: Figures | None, url: str, note: str) -> RenderableType:
    line = Text.assemble(("sglang-patches top", "bold"), f"  {url}")
    if found is not None:
        line.append(f"  {found.model or NONE}", style="bold")
        line.append(f"  sglang {found.release or NONE}, patch set {found.patch_set_id or NONE}")
        line.append(f"  over {found.seconds:.1f} s", style="dim")
        if found.restarted:
            line.append("  the server was restarted", style="yellow")
    if note:
        line.append(f"\n{note}", style="yellow")
    return line


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _grid(rows: Iterable[tuple[str | Text, ...]], right: tuple[int, ...] = (1,)) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    made = list(rows)
    for column in range(max(map(len, made), default=0)):
        table.add_column(justify="right" if column in right else "left", no_wrap=column < 2)
    for row in made:
        table.add_row(*row)
    return table


def _load(found: Figures) -> Panel:
    return _panel(
        "load",
        _grid(
            [
                ("output tokens/s", number(found.output_tokens_per_s), ""),
                ("prompt tokens/s", number(found.prompt_tokens_per_s), ""),
                ("  from cache", number(found.cached_tokens_per_s), ""),
                ("running", number(found.running, 0), "requests"),
                ("queued", number(found.queued, 0), "requests"),
                ("KV cache", share(found.kv_share), bar(found.kv_share)),
                ("", number(found.kv_tokens, 0), f"of {number(found.kv_max, 0)} tokens"),
            ]
        ),
    )


def _acceptance(found: Figures) -> Panel:
    length = found.accept_length
    rows: list[tuple[str | Text, ...]] = [
        ("accept length", Text(number(length, 2), style=_style(found)), "this interval"),
        ("", number(found.accept_length_window, 2), "last passes"),
        ("", number(found.accept_length_since_start, 2), "since start"),
    ]
    rows += [
        (f"  draft token {position}", share(value), bar(value))
        for position, value in enumerate(found.accepted, start=1)
    ]
    if found.accept_alarm:
        rows.append((Text("ALARM: drafting gains nothing", style="bold red"), "", "see the server's log"))
    return _panel("acceptance", _grid(rows))


def _phases(found: Figures) -> Panel:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("phase", "left"), ("ms", "right"), ("per s", "right"), ("clock", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    total: float | None = 0.0
    for name in PHASES:
        phase = found.phases[name]
        total = None if total is None or phase.mean_ms is None else total + phase.mean_ms
        table.add_row(name, number(phase.mean_ms, 2), number(phase.forwards_per_s), phase.clock or NONE)
    table.add_row(Text("together", style="dim"), number(total, 2), "", "")
    return _panel("time of a cycle", table)


def _graphs(found: Figures) -> Panel:
    rows: list[tuple[str | Text, ...]] = []
    for name in PHASES:
        phase = found.phases[name]
        rows.append((name, share(phase.graph_share), bar(phase.graph_share)))
        rows += [(f"  {reason}", f"{rate:,.1f}/s", "without a graph") for reason, rate in phase.reasons.items()]
    return _panel("forwards from CUDA graphs", _grid(rows))


def _allreduce(found: Figures) -> RenderableType:
    if not found.allreduce:
        return _panel("all-reduce", Text(f"{NONE} {found.missing.get('allreduce', '')}", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "up to", "path", "eager/s", "captured"):
        table.add_column(name, justify="left" if name in ("group", "path") else "right")
    for entry in found.allreduce:
        table.add_row(
            entry.group, size(entry.up_to_bytes), entry.path, number(entry.eager_per_s), number(entry.captured, 0)
        )
    return _panel("all-reduce by size", table)


def _oea(found: Figures) -> Panel:
    rows: list[tuple[str | Text, ...]] = [(result, f"{rate:,.1f}/s", "passes") for result, rate in found.oea.items()]
    if found.oea_experts is not None:
        rows.append(("experts a layer", number(found.oea_experts), f"of {number(found.oea_upstream)} without the rule"))
    return _panel("oea-topk", _grid(rows))


def _missing(found: Figures) -> Text:
    why: dict[str, list[str]] = {}
    for name, reason in found.missing.items():
        if name == "allreduce":
            continue  # said in its panel
        why.setdefault(reason, []).append(name)
    lines = [f"{NONE} {', '.join(names)}: {reason}" for reason, names in why.items()]
    return Text("\n".join(lines), style="dim")
