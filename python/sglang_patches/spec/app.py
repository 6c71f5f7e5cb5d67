"""`sglang-patches spec`: decide how much to speculate, from measured times.

Also ``python -m sglang_patches.spec.app``.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_patches import named_model
from sglang_patches.errors import PatchError, told
from sglang_patches.spec import acceptance, costs, plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How many tokens to draft, and when not to (plan).",
)


@app.callback()
def _group() -> None:
    """Keeps `plan` a subcommand while it is the only one."""


@app.command(name="plan")
def plan_(
    measured: Annotated[Path, typer.Option("--costs", help="Result folder of bench verify-step.")],
    accept_by_position: Annotated[
        str, typer.Option(help="Share of cycles that accept at least 1, 2, ... drafted tokens: 0.78,0.55,0.36.")
    ] = "",
    accept_length: Annotated[
        float | None, typer.Option(help="Instead: tokens of a cycle on average, the target's own included.")
    ] = None,
    accept_steps: Annotated[int, typer.Option(min=1, help="Draft steps that gave --accept-length.")] = 3,
    context: Annotated[
        list[float] | None, typer.Option(help="Cached tokens of a request; may be repeated [default: all measured].")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Plan for 1 to this [default: the largest measured].")
    ] = None,
    margin: Annotated[float, typer.Option(min=0, max=1, help="Share by which drafting must win to be chosen.")] = 0.02,
    target: Annotated[
        str | None, typer.Option(help="The served model, a folder or in the hub's cache: reckon for all its layers.")
    ] = None,
    layers_measured: Annotated[
        int | None, typer.Option(min=1, help="Layers of the measured target, where the result does not tell.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write upstream's --speculative-adaptive-config; needs one --context.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say for every batch size which number of draft steps is fastest, and where not to speculate.

    A cycle of k draft steps gives 1 + (accepted by position, summed) tokens and takes what verify-step measured; no
    speculation gives one token a decode step. Nothing is started.

    Example: sglang-patches spec plan --costs benchmark/results/h200-verify-step --accept-length 2.69

    Exit code: 0 a plan was made (also one that says not to speculate); 1 it says so, and --write wrote nothing;
    2 it cannot be made.
    """
    with told():
        times = costs.read(measured, _layers(target), layers_measured)
        rates = _rates(accept_by_position, accept_length, accept_steps)
        batches = range(1, (max_batch_size or times.batch_sizes[-1]) + 1)
        contexts = context or [float(at) for at in times.contexts]
        if write is not None and len(contexts) != 1:
            listed = ", ".join(f"{at:g}" for at in contexts)
            raise PatchError(
                f"--write needs one context, and there are {listed}\n  remedy     --context {contexts[0]:g}"
            )
        made = [plan.make(times, rates, batches, at, margin) for at in contexts]
        if write is not None and made[0].pays():
            config = made[0].adaptive_config(shlex.join(["sglang-patches", *sys.argv[1:]]))
            write.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"costs": times.told, "acceptance": rates.told, "plans": [p.as_json() for p in made]}))
        raise typer.Exit(1 if write is not None and not made[0].pays() else 0)
    # Wide enough for the table when it is no terminal.
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=160, soft_wrap=True)
    console.print(f"times       {escape(times.told)}")
    console.print(f"acceptance  {escape(rates.told)}")
    for one in made:
        _print(console, one)
    if len(rates.by_position) < max(times.steps):
        known = len(rates.by_position)
        console.print(f"note        rates are known for {known} positions, so more than {known} steps are not planned")
    if times.zero_is_estimated:
        console.print(
            "note        drafting nothing (0 steps) was not measured; it is reckoned as a decode step and a draft "
            "extend (bench verify-step --draft-tokens 1 measures it)"
        )
    for line in times.noisy()[:5]:
        console.print(f"note        noisy: {escape(line)}")
    if write is not None and not made[0].pays():
        console.print(f"not written {escape(str(write))}: there is nothing to switch")
        raise typer.Exit(1)
    if write is not None:
        _print_use(console, made[0], write)


def _layers(target: str | None) -> int | None:
    if target is None:
        return None
    file = named_model.folder("--target", target) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (ValueError, KeyError, AttributeError, TypeError):
        raise PatchError(
            f"--target {target}: its config.json tells no num_hidden_layers\n"
            "  remedy     name another model, or download it again"
        ) from None


def _rates(by_position: str, length: float | None, steps: int) -> acceptance.Acceptance:
    if bool(by_position) == (length is not None):
        raise PatchError(
            "acceptance is needed, once\n  remedy     --accept-by-position 0.78,0.55,0.36, or --accept-length 2.69"
        )
    return acceptance.by_position(by_position) if length is None else acceptance.from_length(length, steps)


def _print(console: Console, made: plan.Plan) -> None:
    steps = sorted({at for choice in made.choices for at in choice.gain if at})
    table = Table(
        "batch", "draft steps", "gain", *(f"{at} steps" for at in steps), "decode ms", "breaks even at",
        title=f"context {made.context:g}", title_justify="left",
    )  # fmt: skip
    for first, last, chosen in made.ranges(lambda one: one.steps):
        inside = [one for one in made.choices if first <= one.batch_size <= last]
        table.add_row(
            f"{first}" if first == last else f"{first}-{last}",
            f"[green]{chosen}[/green]" if chosen else "[yellow]off[/yellow]",
            _span([one.gain[chosen] if chosen else 1.0 for one in inside]),
            *(_span([one.gain[at] for one in inside if at in one.gain]) for at in steps),
            _span([one.plain_ms for one in inside]),
            _span([one.break_even for one in inside]),
        )
    console.print(table)
    if not made.pays():
        console.print(
            f"            speculation gains no {made.margin:.0%} at any of these batch sizes: serve without it"
        )
    else:
        fixed = f"--speculative-num-steps {made.fixed}" if made.fixed else "no speculation"
        console.print(f"            one setting for all of them: {fixed}")


def _span(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low}-{high}"


def _print_use(console: Console, made: plan.Plan, file: Path) -> None:
    first, worst = made.choices[0].adaptive, made.worst()
    console.print(f"written     {escape(str(file))}; serve with")
    console.print(
        f"            --speculative-algorithm EAGLE3 --speculative-eagle-topk 1 --speculative-num-steps {first} "
        f"--speculative-num-draft-tokens {first + 1} --speculative-adaptive --speculative-adaptive-config "
        f"{escape(shlex.quote(str(file)))}"
    )
    console.print(
        "            the log then says 'Switch adaptive runtime state'; where upstream cannot do it, it warns at start"
    )
    gain = worst.gain[worst.adaptive]
    if gain < 1 - made.margin:
        doing = f"{worst.adaptive} draft steps are" if worst.adaptive else "drafting nothing is"
        slower = f"{1 - gain:.0%} slower than a server without speculation"
        console.print(f"warning     at batch {worst.batch_size} {doing} {slower}")
    console.print(
        f"note        above batch {made.choices[-1].batch_size}, which was not planned for, the last entry holds"
    )


if __name__ == "__main__":
    app()
