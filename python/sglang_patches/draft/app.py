"""`sglang-patches draft`: what a draft checkpoint is, and whether it fits a target, without server and upstream.

Also ``python -m sglang_patches.draft.app``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sglang_patches.draft.check import inspect
from sglang_patches.errors import told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="EAGLE-3 draft checkpoints (check).",
)


@app.callback()
def _group() -> None:
    """Keeps `check` a subcommand while it is the only one."""


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A folder, or a model in the hub's cache.", metavar="TARGET")],
    draft: Annotated[str, typer.Argument(help="A folder, or a model in the hub's cache.", metavar="DRAFT")],
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Positions the target will be served with [default: all it allows].")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The server's --dtype.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say in which convention DRAFT is stored, and whether it fits TARGET. Reads headers and vocabulary maps only.

    Exit code: 0 it fits, 1 it would be refused, 2 one of them is not here or cannot be read.
    """
    with told():
        report = inspect(target, draft, context_length, dtype)
    if as_json:
        typer.echo(json.dumps({"fits": report.fits, **asdict(report)}, indent=2))
        raise typer.Exit(0 if report.fits else 1)
    console = Console(soft_wrap=True)
    verdict = "[green]fits[/green]" if report.fits else "[red]does not fit[/red]"
    console.print(f"{escape(draft)} {verdict} {escape(target)}")
    for name, fact in report.facts.items():
        console.print(f"  {name:<16} {escape(fact)}")
    for title, lines in (("read as", report.told), ("warning", report.warnings), ("refused", report.refused)):
        for line in lines:
            console.print(f"  {title:<16} {escape(line)}")
    if report.remedy:
        console.print(f"  {'remedy':<16} {escape(report.remedy)}")
    raise typer.Exit(0 if report.fits else 1)


if __name__ == "__main__":
    app()
