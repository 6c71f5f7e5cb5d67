"""Starts upstream's server with arguments that suit this machine and says when it is ready.

Behind ``make serve``. The process becomes ``python -m sglang.launch_server`` (by ``exec``, so signals reach it);
a small detached watcher waits for readiness and prints a request to try (`ready`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_patches import api_key, import_path, lane, named_model, ports, ready, selection
from sglang_patches.document import secrets
from sglang_patches.draft import refusal, roles
from sglang_patches.draft.checkpoint import local_config
from sglang_patches.errors import PatchError
from sglang_patches.series import load
from sglang_patches.upstream import locate

# EAGLE-3 chain: the settings at which accept lengths of Kimi-K2.5 drafts are published.
_EAGLE3_ARGS = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
_CPU_ARGS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--dtype", "float32", "--max-total-tokens", "16384",
]  # fmt: skip
_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread: a small model's matrices are too small to split, and scheduler, detokenizer and HTTP need the rest.
    "OMP_NUM_THREADS": "1",
    # Compiling small elementwise helpers on CPU costs seconds in the first requests and gains nothing.
    "TORCHDYNAMO_DISABLE": "1",
}


def cpu_environment() -> dict[str, str]:
    """Variables a server without a GPU is started with, where the environment does not set them."""
    return {**_CPU_ENV, **lane.here().cpu_environment}


_SMALL_MODEL_BYTES = 1 << 30


@dataclass
class Launch:
    """What is to be executed: command line, environment, and remarks for the person who started it.

    ``name`` is the served model's; ``bind`` the address or name at which the server listens; ``absent`` are the models
    that it has to fetch first, by role and name; ``cached`` the folders of those in the hub's cache here, likewise.
    """

    argv: list[str]
    env: dict[str, str]
    name: str
    bind: str = ports.DEFAULT_HOST
    notes: list[str] = field(default_factory=list)
    absent: dict[str, named_model.Absence] = field(default_factory=dict)
    cached: dict[str, Path] = field(default_factory=dict)


def _model_config(model: str) -> dict[str, object] | None:
    """The ``config.json`` of a checkpoint's folder, or beside a GGUF file, where one may be and brings code.

    None for a hub name, of which the server may take another revision. Raises PatchError.
    """
    alone = Path(model).is_file()
    file = (Path(model).parent if alone else Path(model)) / "config.json"
    if not file.is_file():
        return {} if alone else None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PatchError(f"{file}: not JSON: {error}\n  remedy     download the model again") from None
    if not isinstance(config, dict):
        raise PatchError(f"{file}: a JSON {type(config).__name__} and no object\n  remedy     download the model again")
    return config


def _refuse_misplaced(model: str, draft: str, environ: Mapping[str, str]) -> None:
    """Refuse, as the server would, a target that is a draft, or a draft that is none. Raises PatchError."""
    target_config = local_config(model, None, None)
    draft_config = local_config(draft, None, None) if draft else None
    reasons = roles.misplaced(target_config, draft_config)
    if not reasons:
        return
    try:
        if refusal.only_warns(environ):
            return
    except refusal.DraftContractError as error:
        raise PatchError(str(error)) from None
    remedy = roles.remedy(target_config, draft_config, model, draft)
    raise PatchError(refusal.message(draft, model, reasons, remedy))


def _weight_bytes(model: str) -> int:
    """Bytes of a checkpoint's weight files."""
    files = [Path(model)] if Path(model).is_file() else Path(model).glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def plan(
    model: str,
    draft: str,
    tp: int,
    port: int,
    extra: Sequence[str],
    *,
    cuda: bool,
    environ: Mapping[str, str],
) -> Launch:
    """Choose the server's arguments and environment.

    ``model`` and ``draft`` are folders or hub names (``draft`` may be empty: no speculation); ``extra`` goes last, so
    it overrides what is chosen here. Variables that ``environ`` already sets are kept.
    Raises PatchError when a model is none, is not here and cannot be fetched, or stands in the other's place.
    """
    if any(arg == "--port" or arg.startswith("--port=") for arg in extra):
        raise PatchError("--port in ARGS would contradict PORT; give PORT= instead")
    of_target, of_draft = named_model.revisions(extra)
    wanted = [("model", model, of_target), *([("draft", draft, of_draft)] if draft else [])]
    found = {f"{role} {one}": named_model.servable(role, one, environ, revision) for role, one, revision in wanted}
    absent = {one: missing for one, missing in found.items() if missing is not None}
    _refuse_misplaced(model, draft, environ)
    config = _model_config(model)
    name = Path(model).name
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", name]
    argv += ["--port", str(port), "--tp-size", str(tp), "--enable-metrics", "--sleep-on-idle"]
    env = {key: value for key, value in environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    # The server's modules are the installed ones, wherever it is started from.
    notes = import_path.settle(env)
    if config is None or "auto_map" in config:
        argv.append("--trust-remote-code")
        notes.append(f"--trust-remote-code is passed: {model} brings (or may bring) Python code of its own")
    if (config and config.get("model_type") == "kimi_k25" and "auto_map" in config) or re.search(r"(?i)kimi-k2", name):
        argv += ["--tool-call-parser", "kimi_k2", "--reasoning-parser", "kimi_k2"]
    notes += [
        f"{one} is not on this machine: the server asks {missing.fetched} for it, and ends where that cannot be reached"
        for one, missing in absent.items()
    ]
    if draft:
        argv += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft, *_EAGLE3_ARGS]
    else:
        notes.append("no draft model: serving without speculative decoding")
    if cuda:
        notes.append("serving with CUDA")
        if config is not None and _weight_bytes(model) < _SMALL_MODEL_BYTES:
            # Upstream sizes the target's KV pool by free memory and gives the draft's as many slots without counting
            # them; next to a model this small the two do not fit.
            argv += ["--max-total-tokens", "65536"]
            notes.append("small model: KV cache limited to 65536 tokens (--max-total-tokens N changes it)")
    else:
        argv += [*_CPU_ARGS, *lane.here().cpu_arguments]
        env = {**cpu_environment(), **env}
        notes.append("no GPU: serving on the CPU in float32, which suits small models only")
        if not _cpu_eagle3_is_on(environ):
            notes.append(
                f"SGLANG_PATCHES={environ.get('SGLANG_PATCHES')} leaves out cpu-eagle3: upstream alone needs its own "
                "CPU build of sgl_kernel here (its wheel's needs CUDA) and then serves without speculation only"
            )
    argv += extra
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--served-model-name", default=name)
    given = named.parse_known_args(list(extra))[0]
    copies = {f"{role} {one}": named_model.cached(one, environ, revision) for role, one, revision in wanted}
    cached = {one: place for one, place in copies.items() if place is not None}
    return Launch(argv, env, given.served_model_name, ports.bound_host(extra), notes, absent, cached)


def settle_hub(launch: Launch) -> None:
    """Where the hub cannot be reached, serve what its cache has without asking it.

    Raises PatchError where a model, or a part of one, is to come from it.
    """
    named_model.refuse_unreachable(launch.absent, launch.env)
    if launch.absent:
        return
    environ, told = named_model.settled(launch.cached, launch.env)
    launch.env.update(environ)
    if told:
        launch.notes.append(told)


def _cpu_eagle3_is_on(environ: Mapping[str, str]) -> bool:
    """Whether the selection in ``environ`` brings the CPU kernels; PatchError if it is not usable."""
    upstream = locate()
    if upstream is None:
        return False
    on = selection.select(load(upstream.release), environ.get("SGLANG_PATCHES", ""), lambda: False)
    return any(patch.name == "cpu-eagle3" for patch in on)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs: give TP=1 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give PORT= a number from 1 to 65535")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of ``python -m sglang_patches.serve``; on success it does not return."""
    parser = argparse.ArgumentParser(prog="sglang_patches.serve", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub name of the target model")
    parser.add_argument("--draft", default="", help="folder or hub name of the EAGLE-3 draft; empty: no speculation")
    parser.add_argument("--tp", type=_at_least_one, default=1, help="tensor parallel size: GPUs to use")
    parser.add_argument("--port", type=_port, default=30000, help="HTTP port")
    parser.add_argument("extra", nargs="*", help="after --: more arguments for sglang.launch_server")
    given = parser.parse_args(arguments)
    try:
        api_key.refuse_abbreviations(given.extra)
        launch = plan(
            given.model, given.draft, given.tp, given.port, given.extra, cuda=selection.has_gpu(), environ=os.environ
        )
        settle_hub(launch)
    except PatchError as error:
        raise SystemExit(f"serve: {error}") from None
    if refused := ports.refused(launch.bind, given.port):
        remedy = refused.remedy.replace("--port", "PORT=").replace("sglang-patches stop PORT= ", "make stop PORT=")
        raise SystemExit(f"serve: {refused.seen}\n  remedy     {remedy}")
    for note in launch.notes:
        print(f"serve: {note}")
    print("serve:", secrets.line(launch.argv, launch.env, os.environ))
    print("serve: starting; a small model takes about a minute, a large one as long as its weights take to load")
    sys.stdout.flush()
    url = f"http://{ports.reachable(launch.bind)}:{given.port}"
    ready.announce("serve", url, launch.name, api_key.header(given.extra, os.environ))
    os.execvpe(launch.argv[0], launch.argv, launch.env)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # As the server itself ends on Ctrl-C: what a person asked for is no failure.
        print("\nserve: stopped before the server was started", file=sys.stderr)
