"""`sglang-patches bench`: measurements that carry their code state. Each command is a module with its `register`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from sglang_patches.errors import told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Measure on real servers what patches, variables and arguments do, with the code state in every result.

    Example, three minutes on a laptop with the bundled model, from the repository:

    [bold]sglang-patches bench ab --a default --b arg:--speculative-num-steps=2 --rounds 2 --prompts 4
    --output-tokens 32 --allow argument[/bold]

    A selection is a list of words: [bold]none[/bold], [bold]all[/bold], [bold]default[/bold], [bold]-patch[/bold],
    [bold]+patch[/bold], [bold]env:NAME=VALUE[/bold], [bold]arg:--option=value[/bold], [bold]python:PATH[/bold].
    """,
)


@app.callback()
def _commands() -> None:
    """Keeps the name of a command needed also where there is one only."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a subcommand; errors that are the user's to mend end it with a message and exit code 2."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with told():
                function(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("interrupted: the turns that were whole are kept; the same command again goes on", err=True)
            raise typer.Exit(130) from None

    app.command(name=function.__name__.rstrip("_").replace("_", "-"))(run)
    return function


# One line a command; importing the module registers it.
from sglang_patches.bench import ab as _ab  # noqa: E402, F401
from sglang_patches.bench import bisect as _bisect  # noqa: E402, F401
from sglang_patches.bench import compare_upstream as _compare_upstream  # noqa: E402, F401
from sglang_patches.bench import factorial as _factorial  # noqa: E402, F401
from sglang_patches.bench.report import command as _report  # noqa: E402, F401
from sglang_patches.bench.verify_step.command import verify_step as _verify_step  # noqa: E402

command(_verify_step)
