"""What commands may name: our own command line, upstream's server arguments and routes, make's targets, modules."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from sglang_patches import cli, elsewhere, selection, series, upstream
from sglang_patches.errors import PatchError

from .commands import ROOT, Command, Stage, split

# Other programs that a page may use; what they do is not checked.
_PLAIN = (
    ".",
    "source",
    "cd",
    "export",
    "umask",
    "jq",
    "grep",
    "sed",
    "git",
    "pip",
    "uv",
    "docker",
    "kubectl",
    "nvidia-smi",
    "hf",
    "watch",
    "sudo",
    "docker/build.sh",
    "docker/lock.sh",
)
# Options of other programs that pages speak of.
_OF_OTHERS = ("--allowed-local-media-path", "--shm-size", "--ipc", "--ulimit", "--gpus")
# `launch` takes these itself, and all other arguments are the server's.
_OF_LAUNCH = {"--model", "--draft", "--tp", "--port"}
_PLACEHOLDER = re.compile(r"\.\.\.|[A-Z][A-Z_]*")


@functools.cache
def server_options() -> frozenset[str]:
    """The options of `python -m sglang.launch_server`, from upstream's source: importing it takes many seconds.

    Its parser makes an option of each declared field (`arg_groups/fields`), unless `Arg` says `no_cli`, by the field's
    name or `cli_name`, with `aliases`; `server_args.py` adds a few by hand.
    """
    installed = upstream.locate()
    assert installed is not None
    folder = Path(installed.root, "sglang/srt")
    found = {"--help", "-h"}
    for file in (folder / "arg_groups/fields").glob("[!_]*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found |= _field_options(node.target.id, node.annotation)
    by_hand = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (folder / "server_args.py").read_text(encoding="utf-8"))
    return frozenset(found | set(by_hand))


def _field_options(name: str, annotation: ast.expr) -> set[str]:
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return set()
    about = annotation.slice.elts[1]
    said = {word.arg: word.value for word in about.keywords} if isinstance(about, ast.Call) else {}
    if "no_cli" in said:
        return set()
    names = [f"--{name.replace('_', '-')}"]
    if "cli_name" in said:
        names = [ast.literal_eval(said["cli_name"])]
    if "aliases" in said:
        names += ast.literal_eval(said["aliases"])
    if "action" in said and ast.unparse(said["action"]).endswith("BooleanOptionalAction"):
        names += [f"--no-{word.removeprefix('--')}" for word in names]
    return set(names)


@functools.cache
def routes() -> frozenset[str]:
    """The paths that upstream's HTTP server answers."""
    installed = upstream.locate()
    assert installed is not None
    text = (installed.read("sglang/srt/entrypoints/http_server.py") or b"").decode()
    return frozenset(re.findall(r'@app\.\w+\(\s*"(/[^"]*)"', text)) | {"/metrics"}


@functools.cache
def our_sources() -> str:
    """All our Python code, to look for names of variables and options in it."""
    files = [
        file for folder in ("python", "benchmark", "test/runtime") for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _is_read(variable: str) -> bool:
    """Whether our code has this name, as one string or as the beginning that several share and the rest."""
    if f'"{variable}"' in our_sources():
        return True
    beginnings = re.findall(r'"(SGLANG_PATCHES_\w+_)"', our_sources())
    return any(variable.startswith(b) and f'"{variable.removeprefix(b)}"' in our_sources() for b in beginnings)


@functools.cache
def our_options() -> frozenset[str]:
    """All options of all subcommands of `sglang-patches`, and those that our modules' parsers name."""
    return frozenset(_options(_root())) | set(re.findall(r'"(--[\w-]+)', our_sources()))


def _root() -> Any:
    return typer.main.get_command(cli.app)


def _inner(command: Any) -> dict[str, Any]:
    """The subcommands of a group by name; of `sglang-patches` those too that it hands on unread (`elsewhere.py`)."""
    found = dict(getattr(command, "commands", {}))
    for name, inner in found.items():
        if inner.context_settings.get("allow_interspersed_args") is False:
            found[name] = _handed_on(name)
    return found


@functools.cache
def _handed_on(name: str) -> Any:
    module, _says = elsewhere.ELSEWHERE[name]
    return typer.main.get_command(importlib.import_module(module).app)


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from parameter.opts
        yield from parameter.secondary_opts
    for inner in _inner(command).values():
        yield from _options(inner)


def problems(command: Command) -> list[str]:
    """What is wrong with a command of a code block, whether or not it can be run here."""
    try:
        stages = command.stages
    except ValueError as error:
        return [f"no shell reads it: {error}"]
    if any(marker.kind == "exits" and marker.what != "0" for marker in command.markers):
        return []  # it is run, and shows what an error looks like
    return [problem for stage in stages for problem in _stage_problems(stage, whole=True)]


def span_problems(text: str) -> list[str]:
    """What is wrong with a code span, which may be the beginning of a command, or an option."""
    first = text.split()[0] if text.split() else ""
    if re.fullmatch(r"--[a-z][\w-]*(=.*)?", first):
        name = first.partition("=")[0]
        if name in our_options() | server_options() or name in _OF_OTHERS:
            return []
        return [f"{name}: no option of ours or of upstream's server"]
    unread = [name for name in re.findall(r"SGLANG_PATCHES\w*", text) if not _is_read(name)]
    if unread:
        return [f"{unread[0]}: no variable that our code reads"]
    if first in ("sglang-patches", "make") or text.startswith("python -m "):
        try:
            stages = split(text)
        except ValueError as error:
            return [f"no shell reads it: {error}"]
        return [problem for stage in stages for problem in _stage_problems(stage, whole=False)]
    return []


def _stage_problems(stage: Stage, whole: bool) -> Iterator[str]:
    for name, value in stage.variables.items():
        if name == selection.VARIABLE:
            yield from _selection_problems(value)
        elif name.startswith("SGLANG_PATCHES") and not _is_read(name):
            yield f"{name}: no variable that our code reads"
    if stage.program == "sglang-patches":
        yield from _ours(stage.arguments, whole)
    elif stage.program == "make":
        yield from _make(stage.arguments)
    elif stage.program in ("python", "python3"):
        yield from _python(stage.arguments)
    elif stage.program == "curl":
        yield from _curl(stage.arguments)
    elif stage.program and stage.program not in _PLAIN:
        yield (
            f"{stage.program} is no program that the documentation uses: if the block holds no commands, fence it as "
            "```text; else add the program to test/documentation/known.py"
        )


def _selection_problems(value: str) -> Iterator[str]:
    installed = upstream.locate()
    assert installed is not None
    try:
        selection.select(series.load(installed.release), value)
    except PatchError as error:
        yield str(error).splitlines()[0]


def _ours(arguments: list[str], whole: bool) -> Iterator[str]:
    """Parse with the real command line, without running it; of a code span only the names."""
    command = _root()
    path, rest = "sglang-patches", list(arguments)
    while (inner := _inner(command)) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if not whole and _PLACEHOLDER.fullmatch(name):
            return
        if name not in inner:
            yield f"{path} has no command {name!r}; it has {', '.join(sorted(inner))}"
            return
        command, path = inner[name], f"{path} {name}"
    if inner or rest == ["--help"]:
        return
    ours = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    takes_more = command.context_settings.get("ignore_unknown_options", False)
    before = rest[: rest.index("--")] if "--" in rest else rest
    for word in before:
        name = word.partition("=")[0]
        if (
            name.startswith("--")
            and name not in ours | {"--help"}
            and not (takes_more and name in server_options() | _OF_LAUNCH)
        ):
            yield f"{path} has no option {name}"
            return
    if "--" in rest:
        yield from _server(rest[rest.index("--") + 1 :])
    if whole:
        try:
            with command.make_context(path, list(rest)):
                pass
        except Exception as error:  # click's own, whichever copy of it typer brings
            yield f"{path}: {getattr(error, 'message', None) or error}"


def _server(arguments: list[str]) -> Iterator[str]:
    for word in arguments:
        if word.startswith("--") and word.partition("=")[0] not in server_options():
            yield f"sglang.launch_server has no option {word.partition('=')[0]}"


def _make(arguments: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) | {"PYTHON"}
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if is_variable and name not in known:
            yield f"make knows no variable {name}"
        elif is_variable and name == "ARGS":
            yield from _server(word.partition("=")[2].split())
        elif not is_variable and not re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE):
            yield f"make has no target {word}"


def _python(arguments: list[str]) -> Iterator[str]:
    if arguments[:1] == ["-c"]:
        try:
            compile(arguments[1], "-c", "exec")
        except SyntaxError as error:
            yield f"python does not read it: {error}"
    elif arguments[:1] == ["-m"] and arguments[1] == "sglang.launch_server":
        yield from _server(arguments[2:])
    elif arguments[:1] == ["-m"] and arguments[1] != "json.tool":
        yield from _module(arguments[1], arguments[2:])


def _module(name: str, arguments: list[str]) -> Iterator[str]:
    parts = name.split(".")
    for base in (ROOT, ROOT / "python"):
        for file in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__main__.py")):
            if file.is_file():
                text = "\n".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.py"))
                for word in arguments:
                    option = word.partition("=")[0]
                    if option.startswith("--") and option != "--" and f'"{option}"' not in text:
                        yield f"{name} has no option {option}"
                return
    yield f"there is no module {name}"


def _curl(arguments: list[str]) -> Iterator[str]:
    for at, word in enumerate(arguments):
        if word in ("-d", "--data") and arguments[at + 1].startswith("{"):
            try:
                json.loads(arguments[at + 1])
            except ValueError as error:
                yield f"the body is no JSON: {error}"
        found = re.fullmatch(r"(?:http://)?(?:127\.0\.0\.1|localhost):\d+(/[^?]*)?(?:\?.*)?", word)
        if found and (found[1] or "/") not in routes():
            yield f"the server has no {found[1]}"
