"""``python -m sglang_patches.bench.verify_step``: the command by itself, which needs nothing that the others need."""

from __future__ import annotations

import typer

from sglang_patches.bench.verify_step.command import verify_step
from sglang_patches.errors import PatchError

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command()(verify_step)
    try:
        app()
    except PatchError as error:
        typer.echo(f"verify-step: {error}", err=True)
        raise SystemExit(2) from None
