"""`sglang-patches metrics`: the table of metrics and the dashboard, printed or written into the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from sglang_patches.errors import PatchError, told
from sglang_patches.observe import dashboard
from sglang_patches.runtime import _metrics

BEGIN = "<!-- metrics: sglang-patches metrics --write docs -->\n"
END = "<!-- end of metrics -->"
TABLE = "metrics.md"
DASHBOARD = "grafana/sglang-patches.json"
ALARMS = "grafana/alarms.yaml"

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def table() -> str:
    """The metrics of all patches as a Markdown table, one line each."""
    lines = ["| metric | type | labels | unit | meaning | patch |", "|---|---|---|---|---|---|"]
    for metric in _metrics.ALL:
        labels = [
            f"`{label}`" + (f" ({', '.join(metric.values[label])})" if label in metric.values else "")
            for label in metric.labels
        ]
        cells = (
            f"`{metric.name}`",
            metric.kind,
            ", ".join(labels) or "-",
            metric.unit or "-",
            metric.meaning,
            f"[{metric.patch}](patches/{metric.patch}.md)" + (f", with {metric.only}" if metric.only else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def documents() -> dict[str, str]:
    """Text of each file that is made from the metrics, by its path in the documentation; the table without its page."""
    rules = yaml.safe_dump(dashboard.alarms(), sort_keys=False, width=120)
    return {
        TABLE: table(),
        DASHBOARD: json.dumps(dashboard.document(), indent=2) + "\n",
        ALARMS: f"# Prometheus alerting rules (rule_files), made by: sglang-patches metrics --write docs\n{rules}",
    }


def with_table(page: str, made: str) -> str:
    """A page with the table between its marks.

    Raises:
        PatchError: the page has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise PatchError(
            f"{TABLE} has no place for the table\n"
            f"  expected   a line {BEGIN!r} and behind it a line {END!r}\n"
            f"  remedy     put the two lines where the table belongs"
        )
    return before + begin + made + end + behind


@app.command()
def metrics(
    as_dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print a Grafana dashboard, to import, instead of the table.")
    ] = False,
    as_alarms: Annotated[bool, typer.Option("--alarms", help="Print Prometheus alerting rules instead.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Bring the files of this documentation folder up to date.", metavar="DOCS")
    ] = None,
) -> None:
    """Print the Prometheus metrics of all patches as a table, or a Grafana dashboard of them (docs/metrics.md)."""
    made = documents()
    with told():
        if write is None:
            typer.echo(made[DASHBOARD if as_dashboard else ALARMS if as_alarms else TABLE], nl=False)
            return
        for name, text in made.items():
            file = write / name
            whole = with_table(file.read_text(encoding="utf-8"), text) if name == TABLE else text
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(whole, encoding="utf-8")
