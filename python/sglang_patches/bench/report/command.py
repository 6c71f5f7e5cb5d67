"""`bench report`: all results on one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sglang_patches.bench import folder
from sglang_patches.bench.app import command
from sglang_patches.bench.report import page
from sglang_patches.errors import PatchError


@command
def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Result folders, or folders that hold some; a single JSON file too.", metavar="[FOLDER]..."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Show results on one HTML page: verdicts, intervals, plots, code state, differences between arms, sample counts.

    Without FOLDER: all below benchmark/results, benchmark/allreduce/results and benchmark/tiny_kimi/results. The page
    needs no network and no other file. Results of earlier tools are shown too.

    Example: [bold]sglang-patches bench report benchmark/results/ab-default-none --out ab.html[/bold]

    Exit code: 0 all were read, 1 some could not be (the page says which), 2 there is no page.
    """
    roots = folders or [root for root in map(Path, page.ROOTS) if root.is_dir()]
    if not roots:
        raise PatchError(
            f"no results: {Path.cwd()} has none of {', '.join(page.ROOTS)}\n"
            f"  remedy     run it in the repository, or name folders"
        )
    found = page.find(roots)
    folder.replace(out, page.render(found))
    for trouble in found.unread:
        typer.echo(trouble, file=sys.stderr)
    for place in found.unfinished:
        typer.echo(f"{place}: not finished, not shown", file=sys.stderr)
    typer.echo(f"{out}: {len(found.sections)} results")
    if found.unread:
        raise typer.Exit(1)
