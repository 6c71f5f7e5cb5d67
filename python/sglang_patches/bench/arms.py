"""Reads a selection of what a server is started with, such as `-pcie-nccl-allreduce,env:NCCL_PROTO=LL`, into an `Arm`.

Words, joined with commas (a comma inside one: ``\\,``):

    none | all | default     where the patches start from
    NAME | +NAME | -NAME     patches, as in SGLANG_PATCHES
    env:NAME=VALUE           a variable of the server's environment; an empty VALUE unsets it
    arg:--option=value       a server argument, after those that all arms share; `arg:--option value` does too
    python:PATH              the interpreter that serves, which may lack sglang-patches
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
from collections.abc import Callable, Collection

from sglang_patches import selection
from sglang_patches.bench.model import Arm
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

SYNTAX = "none, all, default, NAME, +NAME, -NAME, env:NAME=VALUE, arg:--option=value or python:PATH"
# Each turn sets these itself.
_OWN_ARGUMENTS = ("--port", "--served-model-name", "--host")


def parse(
    name: str, spec: str, series: Series, taken: Collection[str] = (), gpu: Callable[[], bool] = selection.has_gpu
) -> Arm:
    """The arm that `spec` describes.

    Args:
        name: of the arm.
        spec: as the module says; empty is `default`.
        series: of the installed release, which knows the patches.
        taken: names of other arms of the run.
        gpu: as for `selection.select`.

    Raises:
        PatchError: a word is none of the above or says what another contradicts, a patch is unknown or cannot be on in
            this selection, or the interpreter does not exist.
    """
    if name in taken:
        raise PatchError(f"arm {name!r}: the name is taken\n  remedy     give each arm a name of its own")
    words: list[str] = []
    environment: dict[str, str] = {}
    arguments: list[str] = []
    python = ""
    for word in _split(spec):
        kind, colon, value = word.partition(":")
        if not colon:
            words.append(word)
        elif kind == "env":
            variable, text = _variable(spec, value)
            if environment.setdefault(variable, text) != text:
                raise _wrong(spec, word, f"one value for {variable}, which has {environment[variable]!r} too")
        elif kind == "arg":
            arguments += _argument(spec, value)
        elif kind == "python":
            if python:
                raise _wrong(spec, word, f"one interpreter; python:{python} is there too")
            python = _interpreter(spec, value)
        else:
            raise _wrong(spec, word, SYNTAX)
    patches = ",".join(words)
    if patches.lower() == "default":
        patches = ""
    selection.select(series, patches, gpu)
    return Arm(
        name=name, spec=spec, patches=patches, environment=environment, arguments=arguments, python=python
    )  # fmt: skip


def same(one: Arm, other: Arm) -> bool:
    """Whether two arms serve alike, whatever their names and spelling."""
    apart = {"name", "spec"}
    return one.model_dump(exclude=apart) == other.model_dump(exclude=apart)


def on(arm: Arm, series: Series, gpu: Callable[[], bool] = selection.has_gpu) -> set[str]:
    """Names of the patches that are on in an arm's server, if its interpreter has them at all."""
    return {patch.name for patch in selection.select(series, arm.patches, gpu)}


def arguments(arm: Arm) -> dict[str, list[str]]:
    """Words that follow each option among an arm's own arguments, by upstream's name of the argument: `tp_size`.

    Several options may mean one argument (`--tp`, `--tp-size`, `--tensor-parallel-size`), and some have other names
    than it (`--fp8-gemm-backend` is `fp8_gemm_runner_backend`), so upstream's own parser is asked.
    """
    found: dict[str, list[str]] = {}
    taking: list[str] = []
    for word in arm.arguments:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            taking = found.setdefault(_argument_of(option), [])
            # An option alone says something too: --enable-x, --no-enable-x.
            taking += [value] if equals else [option] if option.startswith("--no-") else []
        else:
            taking.append(word)
    return found


def _argument_of(option: str) -> str:
    known = _known_options()
    # As argparse has it: an option may be shortened as long as it is clear.
    meant = {known[option]} if option in known else {name for full, name in known.items() if full.startswith(option)}
    return meant.pop() if len(meant) == 1 else option.lstrip("-").replace("-", "_")


@functools.cache
def _known_options() -> dict[str, str]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {option: action.dest for action in parser._actions for option in action.option_strings}


def _split(spec: str) -> list[str]:
    parts = re.split(r"(?<!\\),", spec)
    return [part.replace("\\,", ",").strip() for part in parts if part.strip()]


def _variable(spec: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise _wrong(spec, f"env:{text}", "env:NAME=VALUE")
    if name == selection.VARIABLE:
        raise _wrong(spec, f"env:{text}", "patches as words of their own: -NAME, +NAME, none, ...")
    _no_secret(spec, f"env:{name}", name, value)
    return name, value


def _no_secret(spec: str, word: str, name: str, value: str) -> None:
    # By its name, or by what it looks like under a harmless one.
    looks = secrets.MASK in secrets.mask_text(value) and secrets.MASK not in value
    if value and (secrets.is_secret(name, value) or looks):
        shown = secrets.mask_text(spec.replace(value, secrets.MASK))
        expected = "nothing secret, because a selection is kept in the result"
        raise _wrong(shown, word, expected, "set it in the shell, for the servers of all arms")


def _argument(spec: str, text: str) -> list[str]:
    head = text.split(maxsplit=1)[0] if text.strip() else ""
    # A value behind = is taken as it is, so that JSON needs no quoting twice.
    found = [text] if "=" in head else shlex.split(text)
    if not head.startswith("--"):
        raise _wrong(spec, f"arg:{text}", "arg:--option=value")
    option = head.partition("=")[0]
    _no_secret(spec, f"arg:{option}", option, text.partition("=")[2] if "=" in head else " ".join(found[1:]))
    if option in _OWN_ARGUMENTS:
        expected = f"another option: {option} is chosen anew for each server"
        raise _wrong(spec, f"arg:{text}", expected, "leave it out")
    return found


def _interpreter(spec: str, text: str) -> str:
    # Not resolved: an environment's interpreter is a link, and the place of the link is what makes it one.
    path = os.path.abspath(os.path.expanduser(text))
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        expected = "an executable file, such as python:/opt/pristine/bin/python"
        raise _wrong(spec, f"python:{text}", expected, f"see what is there: ls -l {shlex.quote(path)}")
    return path


_JOINED = "words are joined with commas; a comma inside one is written \\,"


def _wrong(spec: str, word: str, expected: str, remedy: str = _JOINED) -> PatchError:
    return PatchError(f"{word!r} in selection {spec!r} is not usable\n  expected   {expected}\n  remedy     {remedy}")
