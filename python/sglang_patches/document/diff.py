"""What differs between two documents, in plain words and most telling first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_patches.document import unnamed
from sglang_patches.document.schema import Document, Machine, PatchState
from sglang_patches.document.secrets import MASK

# Where a server listens, how much it logs, and what it draws anew at each start.
_MINOR_ARGUMENTS = frozenset((
    "host", "port", "nccl_port", "grpc_port", "dist_init_addr", "api_key", "admin_api_key", "log_level",
    "log_level_http", "log_requests", "served_model_name", "random_seed", "show_time_cost", "model_path",
    "tokenizer_path", "revision", "speculative_draft_model_path", "speculative_draft_model_revision",
))  # fmt: skip
# SGLANG_PATCHES is told by the patches, CUDA_VISIBLE_DEVICES by the GPUs, LD_LIBRARY_PATH by the libraries; the others
# say where files are kept, or how much is logged.
_MINOR_VARIABLE = re.compile(
    r"SGLANG_PATCHES(_CACHE|_DIR)?|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH|NCCL_DEBUG\w*|CUDA_PATH|"
    r"(HF_HUB|TRANSFORMERS|TOKENIZERS)_\w+|\w+_(CACHE_DIR|CACHE_PATH|HOME|WORKSPACE_BASE|LOG_LEVEL|RUN_ID)"
)
# Loaded in one only, these change what happens; others come with whatever was imported so far.
_TELLING_LIBRARIES = ("libnccl", "libtcmalloc", "libjemalloc", "libgomp", "libiomp")
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        topic: patch, code, release, file, argument, variable, model, version, library, hardware, other.
        subject: the thing's name.
        a, b: what it was in each, as a clause that follows "was".
        matters: whether it may change results or speed.
        joined: a clause that says it for both, where "was a in A and b in B" does not read well.
    """

    topic: str
    subject: str
    a: str
    b: str
    matters: bool = True
    joined: str = ""

    def __str__(self) -> str:
        return f"{self.subject} {self.joined}" if self.joined else f"{self.subject} was {self.a} in A and {self.b} in B"


def diff(a: Document, b: Document) -> list[Difference]:
    """Every difference, most telling first; those that do not matter last. Swapping arguments swaps `a` and `b` only.

    Time, host name and command line are not compared (a server's resolved arguments are).
    """
    found: list[Difference] = []
    for part in (_patches, _code, _files, _arguments, _variables, _models, _versions, _libraries, _hardware):
        found += part(a, b)
    return sorted(found, key=lambda difference: not difference.matters)


def summary(a: Document, b: Document, found: list[Difference]) -> str:
    """One sentence: "same arguments, but `x` was on in A and off in B"."""
    telling = [difference for difference in found if difference.matters]
    if not telling:
        return "nothing that matters differs" + (f" ({len(found)} smaller differences)" if found else "")
    both = a.server_args is not None and b.server_args is not None
    same = both and not any(difference.topic == "argument" for difference in telling)
    more = f", and {len(telling) - 1} more" if len(telling) > 1 else ""
    return f"{'same arguments, but ' if same else ''}{telling[0]}{more}"


def _patches(a: Document, b: Document) -> Iterator[Difference]:
    there, here = ({patch.name: patch for patch in document.code.patches} for document in (a, b))
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name), here.get(name)
        if bool(one and one.on) != bool(other and other.on):
            yield Difference("patch", f"`{name}`", _state(one), _state(other))
    for name in sorted(there.keys() & here.keys()):
        one, other = there[name], here[name]
        if one.on and other.on and one.sha256 != other.sha256:
            clause = f"was on in both, with different code ({one.sha256[:12]} in A, {other.sha256[:12]} in B)"
            yield Difference("code", f"`{name}`", one.sha256[:12], other.sha256[:12], joined=clause)
    order = [[patch.name for patch in document.code.patches if patch.on] for document in (a, b)]
    if order[0] != order[1] and sorted(order[0]) == sorted(order[1]):
        yield Difference("code", "the order of the patches", ", ".join(order[0]), ", ".join(order[1]))


def _state(patch: PatchState | None) -> str:
    if patch is None:
        return "not in the series"
    if patch.on:
        return "on"
    said = patch.state if patch.state not in ("off", "applied") else ""
    reason = ": ".join(filter(None, (said, patch.reason)))
    return f"off ({reason})" if reason else "off"


def _code(a: Document, b: Document) -> Iterator[Difference]:
    if a.code.release != b.code.release:
        yield Difference("release", "sglang", a.code.release, b.code.release)
    same_patches = [(p.name, p.sha256) for p in a.code.patches if p.on] == [
        (p.name, p.sha256) for p in b.code.patches if p.on
    ]
    if a.code.id != b.code.id and a.code.release == b.code.release and same_patches:
        clause = f"differs: patch set {a.code.id} in A, {b.code.id} in B"
        yield Difference("code", "the runtime code that patches share", a.code.id, b.code.id, joined=clause)
    if a.code.active != b.code.active and same_patches:
        words = {True: "active", False: "inactive"}
        yield Difference("code", "patching", words[a.code.active], words[b.code.active])
    if a.code.version != b.code.version:
        yield Difference("version", "sglang-patches", _said(a.code.version), _said(b.code.version), matters=False)


def _files(a: Document, b: Document) -> Iterator[Difference]:
    edits = [_hashes(document, "edit") for document in (a, b)]
    for path, one, other in _unequal(*edits):
        words = [
            "as the wheel has it (or not loaded)" if sha is _ABSENT else "gone" if sha is None else f"edited ({sha})"
            for sha in (one and _short(one), other and _short(other))
        ]
        yield Difference("file", f"upstream's {path}", words[0], words[1])
    # Which patched files are loaded depends on the process; their content only on patches and upstream.
    copies = [_hashes(document, "patch") for document in (a, b)]
    patches = [[(p.name, p.sha256) for p in document.code.patches if p.on] for document in (a, b)]
    if patches[0] == patches[1] and a.code.release == b.code.release:
        for path in sorted(copies[0].keys() & copies[1].keys()):
            if copies[0][path] != copies[1][path]:
                clause = "was patched by the same patches to different text"
                yield Difference(
                    "file", f"upstream's {path}", _said(copies[0][path]), _said(copies[1][path]), joined=clause
                )


def _hashes(document: Document, by: str) -> dict[str, Any]:
    return {file.path: file.sha256 for process in document.processes for file in process.files if file.by == by}


def _short(sha: Any) -> Any:
    return sha[:12] if isinstance(sha, str) else sha


def _arguments(a: Document, b: Document) -> Iterator[Difference]:
    if a.server_args is None or b.server_args is None:
        if a.server_args is not b.server_args:
            words = ["a server" if d.server_args is not None else "an environment" for d in (a, b)]
            yield Difference("other", "the document", words[0], words[1], matters=False)
        return
    yield from arguments(a.server_args, b.server_args)


def arguments(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """What differs between the resolved arguments of two servers, by their names without dashes."""
    for name, one, other in _unequal(a, b):
        option = f"--{name.replace('_', '-')}"
        yield Difference(
            "argument",
            option,
            _said(one),
            _said(other),
            matters=name not in _MINOR_ARGUMENTS and MASK not in (one, other),
        )


def same_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Of masked variables (`secrets.environment`) those that matter where two documents are compared."""
    return {name: value for name, value in environ.items() if not _MINOR_VARIABLE.fullmatch(name)}


def _variables(a: Document, b: Document) -> Iterator[Difference]:
    for name, one, other in _unequal(a.environment, b.environment):
        minor = _MINOR_VARIABLE.fullmatch(name) is not None or MASK in (one, other)
        words = ["unset" if value is _ABSENT else _said(value) for value in (one, other)]
        yield Difference("variable", name, words[0], words[1], matters=not minor)


def _models(a: Document, b: Document) -> Iterator[Difference]:
    if a.server_args is None or b.server_args is None:
        return
    for role in sorted(a.models.keys() | b.models.keys()):
        one, other = a.models.get(role), b.models.get(role)
        if one is None or other is None:
            words = ["none" if model is None else model.path for model in (one, other)]
            yield Difference("model", f"the {role} model", words[0], words[1])
            continue
        content = False
        for label, field in (("config.json", "config_sha256"), ("weights", "index_sha256")):
            left, right = getattr(one, field), getattr(other, field)
            if left != right:
                content = True
                words = ["unknown" if sha is None else _short(sha) for sha in (left, right)]
                yield Difference("model", f"{label} of the {role} model", words[0], words[1])
        samples = one.weights_sample_sha256, other.weights_sample_sha256
        if not content and None not in samples and samples[0] != samples[1]:
            content = True
            words = [str(_short(sha)) for sha in samples]
            clause = f"are other numbers ({words[0]} in A, {words[1]} in B)"
            yield Difference("model", f"the weights of the {role} model", words[0], words[1], joined=clause)
        # By content the same, or not known: then name and revision are all there is to go by.
        unknown = one.config_sha256 is None and other.config_sha256 is None
        for label in ("path", "revision"):
            left, right = getattr(one, label), getattr(other, label)
            if left != right:
                subject = f"the {label} of the {role} model"
                yield Difference("model", subject, _said(left), _said(right), matters=unknown and not content)


def _versions(a: Document, b: Document) -> Iterator[Difference]:
    for name, one, other in _unequal(a.versions, b.versions):
        words = ["not installed" if value in (None, _ABSENT) else str(value) for value in (one, other)]
        # CUDA's is told only where torch is loaded.
        yield Difference("version", name, words[0], words[1], matters=_ABSENT not in (one, other))
    one, other = (", ".join(sorted({p.nccl for p in d.processes if p.nccl})) for d in (a, b))
    if one != other:
        yield Difference("version", "NCCL", one or "not loaded", other or "not loaded", matters=bool(one and other))


def _libraries(a: Document, b: Document) -> Iterator[Difference]:
    sides = [
        {library.name: library for process in document.processes for library in process.libraries}
        for document in (a, b)
    ]
    alike = sorted(p.name for p in a.processes) == sorted(p.name for p in b.processes)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(name), sides[1].get(name)
        if one is None or other is None:
            words = ["not loaded" if library is None else f"loaded from {library.path}" for library in (one, other)]
            yield Difference("library", name, words[0], words[1], matters=alike and name.startswith(_TELLING_LIBRARIES))
        elif one.size != other.size:
            yield Difference("library", name, f"of {one.size} bytes", f"of {other.size} bytes")
        elif one.sha256 and other.sha256 and one.sha256 != other.sha256:
            clause = f"has the same size and other content ({one.sha256[:12]} in A, {other.sha256[:12]} in B)"
            yield Difference("library", name, one.sha256[:12], other.sha256[:12], joined=clause)


def _hardware(a: Document, b: Document) -> Iterator[Difference]:
    one, other = a.machine, b.machine

    def told(subject: str, read: Callable[[Machine], Any], matters: bool = True) -> Iterator[Difference]:
        left, right = read(one), read(other)
        if left != right:
            yield Difference("hardware", subject, _said(left), _said(right), matters=matters)

    yield from told("the GPUs", lambda m: sorted(gpu.name for gpu in m.gpus))
    if one.topology_fingerprint != other.topology_fingerprint and len(one.gpus) == len(other.gpus):
        yield Difference("hardware", "the topology", one.topology, other.topology)
    yield from told("the NVIDIA driver", lambda m: m.driver)
    if len(one.gpus) == len(other.gpus):
        for label, field in (
            ("power limit (W)", "power_limit"), ("highest SM clock (MHz)", "max_sm_clock"),
            ("highest memory clock (MHz)", "max_memory_clock"),
        ):  # fmt: skip
            yield from told(f"the GPUs' {label}", partial(_of_each_gpu, field=field))
    yield from told("the CPU", lambda m: m.cpu)
    yield from told("the number of CPUs", lambda m: m.cpus)
    yield from told("the memory (GiB)", lambda m: round(m.memory_gib))
    yield from told("the kernel", lambda m: m.kernel)
    yield from told("the container", lambda m: m.container, matters=False)
    yield from told("the GPUs' UUIDs", lambda m: sorted(unnamed.name(gpu.uuid or "") for gpu in m.gpus), matters=False)


def _of_each_gpu(machine: Machine, field: str) -> list[Any]:
    return sorted((getattr(gpu, field) for gpu in machine.gpus), key=lambda value: (value is None, value or 0))


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(a.keys() | b.keys()):
        one, other = a.get(name, _ABSENT), b.get(name, _ABSENT)
        if one != other or isinstance(one, bool) != isinstance(other, bool):
            yield name, one, other


def _said(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."
