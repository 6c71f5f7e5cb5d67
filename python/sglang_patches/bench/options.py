"""What the commands that start servers have in common on their command line.

A command takes the options it needs under these types and gives them to `setup`:

    def ab(a: ..., model: Model = MODEL, draft: Draft = None, ..., server_args: ServerArgs = None) -> None:
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sglang_patches import named_model, series, upstream
from sglang_patches.bench import workload
from sglang_patches.bench.turns import Setup
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError

MODEL = "test/models/tiny-kimi"
_DRAFT = "test/models/tiny-kimi-eagle3"
RESULTS = Path("benchmark/results")

Model = Annotated[str, typer.Option(help="Folder or hub name of the target model.", rich_help_panel="Server")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub name of the EAGLE-3 draft; '' for no speculation. The bundled model has a default.",
        rich_help_panel="Server",
    ),
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor parallel size: GPUs to use.", rich_help_panel="Server")]
ReadyTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds for a server to become ready.", rich_help_panel="Server")
]
TurnTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds for all requests of a turn.", rich_help_panel="Server")
]
ServerArgs = Annotated[
    list[str] | None,
    typer.Argument(help="After --: arguments of sglang.launch_server for every server.", metavar="[-- SERVER ARGS]"),
]
Prompts = Annotated[
    int, typer.Option(min=0, help="How many prompts; 0: all of the file, or 16 drawn.", rich_help_panel="Work")
]
PromptTokens = Annotated[
    int,
    typer.Option(min=0, help="Draw prompts of this many tokens; 0: the bundled texts.", rich_help_panel="Work"),
]
Vocabulary = Annotated[
    int, typer.Option(min=0, help="Token ids to draw from; 0: as the model's config.json says.", rich_help_panel="Work")
]
WorkloadFile = Annotated[
    Path | None, typer.Option("--workload", help="A file of token-id prompts.", rich_help_panel="Work")
]
OutputTokens = Annotated[int, typer.Option(min=2, help="Tokens of each answer, exactly.", rich_help_panel="Work")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.", rich_help_panel="Work")]
WarmUp = Annotated[
    int,
    typer.Option(
        min=0,
        help="Requests before those that count, in each turn; 0: none, else as many as are in flight at least.",
        rich_help_panel="Work",
    ),
]
Out = Annotated[
    str, typer.Option(help=f"Result folder: a name below {RESULTS}, or a path. Made again, a run goes on there.")
]
Seed = Annotated[int, typer.Option(help="Of drawn prompts and of the statistics.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Compare though this differs: outputs, a topic (argument, ...) or a name. Recorded. Repeatable."),
]


def setup(
    out: str,
    *,
    model: str,
    draft: str | None,
    tp: int,
    server_args: Sequence[str] | None,
    prompts: int,
    prompt_tokens: int,
    vocabulary: int,
    workload_file: Path | None,
    output_tokens: int,
    concurrency: int,
    warm_up: int,
    seed: int,
    ready_timeout: float,
    turn_timeout: float,
) -> Setup:
    """The setup that these options describe.

    Raises:
        PatchError: a folder holds no model, no prompts fit the model, or an argument belongs elsewhere.
        OSError: the workload file cannot be read.
    """
    of_target, of_draft = named_model.revisions(server_args or ())
    served = {f"--model {model}": checkpoint("--model", model, of_target)}
    for word in server_args or ():
        if word.partition("=")[0] in ("--port", "--host"):
            raise PatchError(
                f"{word} after --: each server gets a free port of this machine\n  remedy     leave it out"
            )
    if draft is None:
        draft = _DRAFT if Path(model).resolve() == Path(MODEL).resolve() else ""
    chosen = workload.choose(
        model, file=workload_file, prompts=prompts, prompt_tokens=prompt_tokens, vocabulary=vocabulary, seed=seed
    )
    if draft:
        served[f"--draft {draft}"] = checkpoint("--draft", draft, of_draft)
    environ, told = named_model.settled({name: place for name, place in served.items() if place}, os.environ)
    if told:
        typer.echo(told, err=True)
    return Setup(
        model=model,
        draft=draft,
        tp=tp,
        server_args=tuple(server_args or ()),
        prompts=chosen,
        # Fewer would leave the batch sizes of the measured part, and what is compiled for them, to that part.
        workload=chosen.workload(output_tokens, concurrency, warm_up and max(warm_up, concurrency)),
        folder=folder(out),
        ready_timeout=ready_timeout,
        turn_timeout=turn_timeout,
        environ=environ,
    )


def checkpoint(option: str, model: str, revision: str | None) -> Path | None:
    """Refuse a model that no server can load now, rather than when one cannot start from it.

    Returns: its folder in the hub's cache, where it is one of the hub that is there.

    Raises:
        PatchError: as `named_model.servable`.
    """
    if model in (MODEL, _DRAFT) and not Path(model).exists():
        raise PatchError(
            f"{option} {model}: there is no such folder\n"
            f"  remedy     run this in the repository, which has the bundled models, or name another: {option}"
        )
    missing = named_model.servable(option, model, os.environ, revision)
    named_model.refuse_unreachable({f"{option} {model}": missing} if missing else {}, os.environ)
    return named_model.cached(model, os.environ, revision)


def folder(out: str) -> Path:
    """A name below `RESULTS`, or a path as it is."""
    return Path(out) if os.sep in out or out.startswith(".") else RESULTS / out


def name(kind: str, *specs: str) -> str:
    """A folder name made of the selections, the same for the same command, so that it goes on by itself."""
    words = [re.sub(r"[^A-Za-z0-9.=+-]+", "_", spec.replace("/", "_")).strip("_") or "default" for spec in specs]
    return "-vs-".join([f"{kind}-{words[0]}", *words[1:]])[:120]


def installed_series() -> series.Series:
    """The series for the installed upstream.

    Raises:
        PatchError: SGLang is missing, or there is no series for its release.
    """
    found = upstream.locate()
    if found is None:
        raise PatchError("SGLang is not installed here\n  remedy     pip install sglang-patches, which pins it")
    return series.load(found.release)


# Upstream, which the load generator imports, sets variables that nobody typed.
_AT_START = dict(os.environ)


def typed() -> list[str]:
    """The command that was typed, as a list of words, with the variables that steer it; secrets masked."""
    program = os.path.basename(sys.argv[0])
    words = ["sglang-patches", *sys.argv[1:]] if program in ("sglang-patches", "cli.py") else list(sys.orig_argv)
    return secrets.again(words, _AT_START)


def shown(command: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(command)
