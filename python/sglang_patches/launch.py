"""`sglang-patches launch`: a server by the name of a recipe, after `doctor` has looked.

A recipe is a YAML file in `recipes/`: what to serve and how. What is given on the command line wins over it, and what
a recipe leaves open is chosen by `serve.plan`, as for ``make serve``.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sglang_patches import api_key, baked, ports, ready, selection, serve
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError, told

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# What must be known before the server starts, in upstream's spellings and in ours; recipes have keys for these.
_OWN = {
    "model": ("--model", "--model-path"),
    "draft": ("--draft", "--speculative-draft-model-path", "--speculative-draft-model"),
    "tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "port": ("--port",),
}


# Checks of doctor that reckon without these options, so that their failures are none.
_NOT_RECKONED = {
    ("--pp-size", "--pipeline-parallel-size"): ("memory",),
    ("--nnodes",): ("GPUs", "memory"),
    ("--quantization",): ("memory",),
    ("--cpu-offload-gb",): ("memory",),
    ("--load-format",): ("memory",),
    ("--revision",): ("model", "draft", "memory"),
    ("--speculative-draft-model-revision",): ("draft", "memory"),
}
# Checks that examine GPUs where a server on the CPU uses none.
_OF_GPUS = ("driver", "GPUs", "sgl_kernel", "shared memory", "memory")


_Value = str | int | float | bool


class Recipe(BaseModel):
    """One way to serve.

    Attributes:
        description: one clause.
        model, draft: folder or hub name; a relative folder may also be one of this checkout. No draft: no speculation.
        tp: tensor parallel size.
        port: HTTP port.
        device: ``cuda`` or ``cpu``; by default what this machine has.
        patches: ``SGLANG_PATCHES`` where the environment does not set it.
        requires_api_key: without a key, or a line that says that there is none, nothing is started.
        arguments: of ``sglang.launch_server``, by name; true for a bare switch, a list for several values.
        environment: variables, where the environment does not set them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    model: str
    draft: str = ""
    tp: int = Field(default=1, ge=1)
    port: int = Field(default=30000, ge=1, le=65535)
    device: Literal["cuda", "cpu"] | None = None
    patches: str | None = None
    requires_api_key: bool = False
    arguments: dict[str, _Value | list[_Value]] = {}
    environment: dict[str, str] = {}

    @field_validator("arguments")
    @classmethod
    def _are_options(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, value in arguments.items():
            if isinstance(value, list):
                if not value:
                    raise ValueError(f"{name!r} has an empty list: leave it out, or give it a value")
                if wrong := [one for one in value if isinstance(one, bool) or str(one).startswith("-")]:
                    raise ValueError(f"{name!r} has {wrong[0]!r} in its list, which upstream would not read as a value")
            if not name.startswith("--"):
                raise ValueError(f"{name!r} is no option of sglang.launch_server: write '--{name.lstrip('-')}'")
            option = name.partition("=")[0]
            if option in api_key.VARIABLES:
                raise ValueError(f"{option!r} is a secret and no part of a recipe: set {api_key.VARIABLES[option]}")
            if key := next((key for key, spellings in _OWN.items() if name in spellings), None):
                raise ValueError(f"{name!r} has a key of its own in a recipe: {key}")
        return arguments

    @field_validator("environment")
    @classmethod
    def _has_no_keys(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in api_key.VARIABLES.values():
            if name in environment:
                raise ValueError(f"{name!r} is a secret and no part of a recipe: name a file with it by {name}_FILE")
        return environment


@dataclass(frozen=True)
class Wanted:
    """A recipe with what the command line said: see `Recipe`. `extra` are arguments for ``sglang.launch_server``.

    `keys` are the API keys by upstream's option, each with where it comes from; `unprotected`: the line says that there
    is none.
    """

    device: Literal["cuda", "cpu"] | None

    model: str
    draft: str
    tp: int
    port: int
    extra: tuple[str, ...]
    environ: Mapping[str, str]
    memory_fraction: float = 0.9
    context_length: int | None = None
    base_gpu: int = 0
    gpu_step: int = 1
    keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unprotected: bool = False


def folder() -> Path:
    """Of the recipes: in the installed package, else the checkout's."""
    package = Path(__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def names() -> list[str]:
    """The recipes that are there."""
    return sorted(file.stem for file in folder().glob("*.yaml"))


def load(name: str) -> Recipe:
    """A recipe by its name, or by the path of a file.

    Raises:
        PatchError: there is none, or it is not one.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else folder() / f"{name}.yaml"
    try:
        return Recipe.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise PatchError(
            f"no recipe {name!r}\n  known      {', '.join(names()) or 'none'}\n"
            f"  remedy     name one of these, or the path of a YAML file"
        ) from None
    except OSError as error:
        raise PatchError(f"{file} cannot be read: {error.strerror}\n  remedy     name a YAML file") from None
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        said = secrets.mask_text(str(error))  # it shows what was given
        raise PatchError(f"{file} is no recipe: {said}\n  expected   {', '.join(Recipe.model_fields)}") from None


def combine(recipe: Recipe, line: Sequence[str], environ: Mapping[str, str]) -> Wanted:
    """What to serve: the recipe, less what `line` says otherwise.

    Args:
        line: arguments of ``sglang.launch_server``; also ``--model``, ``--draft`` and ``--tp``.
        environ: of the server, before the recipe's.

    Raises:
        PatchError: an argument that is read here has no usable value.
    """
    given, rest = _parser().parse_known_args(list(line))
    named = {word.partition("=")[0] for word in rest if word.startswith("--")}
    arguments: list[str] = []
    told = {
        "--mem-fraction-static": given.memory_fraction, "--context-length": given.context_length,
        "--base-gpu-id": given.base_gpu, "--gpu-id-step": given.gpu_step,
    }  # fmt: skip
    for name, value in recipe.arguments.items():
        if name in named or told.get(name) is not None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        arguments += [name, *map(str, values)]
    for name, own in told.items():
        if own is not None:
            arguments += [name, str(own)]

    keys = {"--api-key": given.api_key, "--admin-api-key": given.admin_api_key}
    defaults = {**recipe.environment, **({} if recipe.patches is None else {"SGLANG_PATCHES": recipe.patches})}
    api_key.refuse_abbreviations([*arguments, *rest])
    # A key of the environment wins over the file that a recipe names.
    beaten = {f"{variable}_FILE" for variable in api_key.VARIABLES.values() if environ.get(variable)}
    sources = {**{name: value for name, value in defaults.items() if name not in beaten}, **environ}
    # The recipe's are read as strictly as the line's.
    effective = _parser().parse_known_args(arguments)[0]
    fraction = effective.memory_fraction
    return Wanted(
        device=recipe.device,
        model=given.model if given.model is not None else place(recipe.model),
        draft=given.draft if given.draft is not None else place(recipe.draft),
        tp=given.tp or recipe.tp,
        port=given.port or recipe.port,
        extra=(*arguments, *rest),
        # The server gets its keys another way, and its children none.
        environ={key: value for key, value in {**defaults, **environ}.items() if key not in api_key.VARIABLES.values()},
        memory_fraction=0.9 if fraction is None else fraction,
        context_length=effective.context_length,
        base_gpu=effective.base_gpu or 0,
        gpu_step=effective.gpu_step or 1,
        keys=api_key.collect(keys, sources),
        unprotected=given.api_key == "",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise PatchError(f"launch: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*_OWN["model"], dest="model")
    parser.add_argument(*_OWN["draft"], dest="draft")
    parser.add_argument(*_OWN["tp"], dest="tp", type=_at_least_one)
    parser.add_argument(*_OWN["port"], dest="port", type=_port)
    parser.add_argument("--mem-fraction-static", dest="memory_fraction", type=_fraction)
    parser.add_argument("--context-length", type=_at_least_one)
    parser.add_argument("--base-gpu-id", dest="base_gpu", type=_position)
    parser.add_argument("--gpu-id-step", dest="gpu_step", type=_at_least_one)
    for option in api_key.VARIABLES:
        parser.add_argument(option)
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _position(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the position of a GPU: a number from 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 1 to 65535")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of GPU memory: above 0, at most 1, such as 0.9")
    return value


def place(model: str) -> str:
    """A model as it is named, or its folder in this checkout where it is one of ours."""
    here = folder().parent / model
    return str(here) if model and not Path(model).exists() and here.is_dir() else model


def plan(wanted: Wanted, cuda: bool) -> serve.Launch:
    """The command line and environment of the server. Raises PatchError where the models are none."""
    return serve.plan(
        wanted.model, wanted.draft, wanted.tp, wanted.port, wanted.extra, cuda=cuda, environ=wanted.environ
    )


def not_reckoned(argv: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Options of a server's command line that doctor does not reckon with, and the checks whose failures then tell
    nothing."""
    words = {word.partition("=")[0] for word in argv}
    found = {
        spelling: checks for spellings, checks in _NOT_RECKONED.items() for spelling in spellings if spelling in words
    }
    device = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    device.add_argument("--device")
    if device.parse_known_args(list(argv))[0].device == "cpu" and selection.has_gpu():
        found["--device cpu"] = _OF_GPUS
    return found


def run(
    name: str,
    line: Sequence[str],
    dry_run: bool,
    with_doctor: bool,
    execute: Callable[[str, list[str], dict[str, str]], None] | None = None,
) -> bool:
    """Examine, print the exact line, and become that server; returns only with `dry_run`, or after a failure of doctor.

    Returns:
        Whether doctor found no failure.

    Raises:
        PatchError: no such recipe, or what it names cannot be served.
    """
    from sglang_patches.doctor import app as doctor

    recipe = load(name)
    wanted = combine(recipe, line, os.environ)
    said = _keys(name, recipe, wanted, dry_run)
    launch = plan(wanted, selection.has_gpu() if wanted.device is None else wanted.device == "cuda")
    launch.notes += baked.settle(launch.env)
    blind = not_reckoned(launch.argv)
    healthy = not with_doctor or doctor.run(
        wanted.model, wanted.draft, wanted.tp, wanted.port, wanted.memory_fraction, wanted.context_length,
        environ=launch.env, forgiven={check for checks in blind.values() for check in checks},
        base_gpu=wanted.base_gpu, gpu_step=wanted.gpu_step, bind=launch.bind,
    )  # fmt: skip
    if with_doctor:
        for option, checks in blind.items():
            print(f"launch: doctor does not reckon with {option}: a failure of {', '.join(checks)} does not count")
        if wanted.device == "cuda" and not selection.has_gpu():
            print(f"launch: {name} is for CUDA (device: cuda), and this machine has no GPU")
            healthy = False
    starts = healthy and not dry_run
    if starts:
        serve.settle_hub(launch)
    for note in (*launch.notes, *said):
        print(f"launch: {note}")
    if starts and wanted.keys:
        launch.argv += api_key.hand_over({option: key for option, (key, _) in wanted.keys.items()})
    print("launch:", secrets.line(launch.argv, launch.env, os.environ), flush=True)
    if not starts:
        if not healthy and not dry_run:
            print("launch: not started, because of the failures above; --no-doctor starts all the same", flush=True)
        return healthy
    if refused := ports.refused(launch.bind, wanted.port):
        raise PatchError(f"{refused.seen}\n  remedy     {refused.remedy}")
    if execute is None:
        _announce(launch, wanted)
        execute = os.execvpe
    execute(launch.argv[0], launch.argv, launch.env)
    return True


def _announce(launch: serve.Launch, wanted: Wanted) -> None:
    """Let it be said when the server is ready, and what to try then; only the first of several nodes answers."""
    node = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    node.add_argument("--node-rank", default="0")
    if node.parse_known_args(list(wanted.extra))[0].node_rank != "0":
        return
    words = [*wanted.extra, *(word for option, (key, _) in wanted.keys.items() for word in (option, key))]
    url = f"http://{ports.reachable(launch.bind)}:{wanted.port}"
    # The shell's own variables, and files that the recipe names.
    ready.announce("launch", url, launch.name, api_key.header(words, {**wanted.environ, **os.environ}))


def _keys(name: str, recipe: Recipe, wanted: Wanted, dry_run: bool) -> list[str]:
    """What to tell of the API keys. Raises PatchError where the recipe asks for one and the server would have none."""
    file, has_key = api_key.in_config(wanted.extra)
    if file and wanted.keys:
        sources = ", ".join(source for _, source in wanted.keys.values())
        raise PatchError(
            f"--config {file} and an API key ({sources}) are given; the key is handed over in a --config, and upstream "
            f"takes one --config only\n  remedy     write the key into {file}: 'api-key: ...', and unset the other"
        )
    if "--api-key" in wanted.keys or has_key:
        sources = ", ".join(f"{option.removeprefix('--')} from {source}" for option, (_, source) in wanted.keys.items())
        return [f"{sources}: in a file in memory (--config), not on the line" if sources else f"API key from {file}"]
    if not recipe.requires_api_key:
        return []
    if wanted.unprotected:
        return ["--api-key is empty: everybody who reaches the port can use this server and change its weights"]
    if not dry_run:
        raise api_key.required(name)
    return [f"would not start: recipe {name} serves with an API key, and there is none (set SGLANG_API_KEY)"]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A file of recipes/ by name, or the path of one.", metavar="RECIPE")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only examine and print the line.")] = False,
    with_doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Examine this machine first.")] = True,
) -> None:
    """Serve by recipe: run `doctor`, print the exact `python -m sglang.launch_server` line, and execute it.

    All further arguments are the server's (--tp-size 4 --context-length 32768 ...; also --model, --draft, --tp) and win
    over the recipe. Exit code: 1 doctor found a failure and nothing was started, 2 usage; else the server's.
    """
    with told():
        ok = run(recipe, context.args, dry_run, with_doctor)
    raise typer.Exit(0 if ok else 1)
