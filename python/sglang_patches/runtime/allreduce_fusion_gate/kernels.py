"""What upstream's fused all-reduce kernels can do, asked of the libraries that have them.

Facts that no library tells are named with the place in its source (flashinfer 0.7.2). Nothing here starts CUDA, except
`device_lacks`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.runtime.allreduce_fusion_gate.decision import Problem

# csrc/trtllm_allreduce_fusion.cuh has a kernel for these counts of ranks only; another one is an error in a forward.
_TRTLLM_RANKS = (2, 4, 8, 16)
# csrc/trtllm_mnnvl_allreduce.cu checks nranks.
_MNNVL_RANKS = range(2, 65)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Both kernels load 16 bytes at a time, and check that a row is a whole number of loads.
_LOAD_BYTES = 16
# The functions of flashinfer/jit/comm.py that say for which major versions a kernel is compiled.
_GENERATORS = {"trtllm": "gen_trtllm_comm_module", "mnnvl": "gen_trtllm_mnnvl_comm_module"}


def resolved(backend: str, sm: int) -> str:
    """The backend that "auto" stands for: mnnvl for SM 10x, else trtllm, as upstream's `_resolve_backend` has it."""
    if backend != "auto":
        return backend
    return "mnnvl" if sm // 10 == 10 else "trtllm"


def supports(problem: Problem) -> str:
    """Why no kernel can do this problem; empty if one can. See `decision.Supports`."""
    backend = resolved(problem.backend, problem.sm)
    where = f"the {backend} kernel of fused all-reduce"
    if backend == "cutedsl":
        if reason := _cutedsl_lacks(problem):
            return f"{where} {reason}"
        return ""
    if backend not in _GENERATORS:
        return f"{where} is not known to this patch (it knows trtllm, mnnvl and cutedsl)"
    majors = compiled_for(backend)
    if majors is None:
        return f"flashinfer does not tell for which GPUs {where} is compiled (missing, or another release than 0.7.2)"
    if problem.sm // 10 not in majors:
        known = ", ".join(f"SM {major}x" for major in majors)
        return f"{where} is not compiled for SM {problem.sm} GPUs (it is for {known})"
    if backend == "mnnvl" and problem.nodes > 1 and problem.sm // 10 != 10:
        return f"{where} spans {problem.nodes} hosts with SM 10x GPUs only, these are SM {problem.sm}"
    if backend == "trtllm" and problem.nodes > 1:
        return f"{where} is for one host, this group spans {problem.nodes}"
    ranks = _TRTLLM_RANKS if backend == "trtllm" else _MNNVL_RANKS
    if problem.world_size not in ranks:
        told = f"2 to {ranks[-1]}" if isinstance(ranks, range) else ", ".join(map(str, ranks))
        return f"{where} is for {told} ranks, this group has {problem.world_size}"
    if problem.dtype not in _DTYPES:
        return f"{where} takes float16, bfloat16 and float32, not {_name(problem.dtype)}"
    if problem.hidden * problem.dtype.itemsize % _LOAD_BYTES:
        return (
            f"{where} loads {_LOAD_BYTES} bytes at a time, and rows of {problem.hidden} {_name(problem.dtype)} are "
            f"no multiple of that"
        )
    return ""


def _cutedsl_lacks(problem: Problem) -> str:
    from sglang.srt.layers.flashinfer_mnnvl_cutedsl import SUPPORTED_TP_SIZES

    if problem.sm // 10 != 10:
        return f"is for SM 10x GPUs, these are SM {problem.sm}"
    if problem.world_size not in SUPPORTED_TP_SIZES:
        return f"is for {', '.join(map(str, SUPPORTED_TP_SIZES))} ranks, this group has {problem.world_size}"
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, not {_name(problem.dtype)}"
    return ""


@functools.cache
def compiled_for(backend: str) -> tuple[int, ...] | None:
    """The major compute capabilities that flashinfer compiles this backend's kernel for; None where it does not tell.

    Flashinfer has no list to read: its generator hands the list to the compilation context, which looks at the GPUs of
    this process. So the generator runs here with a context that only listens.
    """
    told: list[int] = []

    class Listener:
        @staticmethod
        def get_nvcc_flags_list(supported_major_versions: list[int] | None = None, **_: Any) -> list[str]:
            told.extend(supported_major_versions or [])
            return []

    try:
        from flashinfer.jit import comm

        generator = getattr(comm, _GENERATORS[backend])
        names = generator.__globals__ | {"current_compilation_context": Listener, "gen_jit_spec": _makes_nothing}
        types.FunctionType(generator.__code__, names)()
    except Exception:  # missing, or made in another way: every kind of error means that it does not tell
        return None
    return tuple(sorted(set(told))) or None


def device_lacks(backend: str, sm: int, device: int) -> str:
    """What this rank's GPU lacks for the backend, asked of the driver; empty if nothing is known to be missing."""
    if resolved(backend, sm) not in ("mnnvl", "cutedsl"):
        return ""
    try:
        from flashinfer.comm.mnnvl import is_multicast_supported
    except ImportError as error:
        return f"flashinfer's multicast memory does not import: {error}"
    return "" if is_multicast_supported(device) else f"GPU {device} has no NVLink multicast, which the kernel needs"


def runs_where_compiled(upstreams_own: bool) -> bool:
    """For upstream's constant "these GPUs are SM 90": also true where the trtllm kernel is compiled for them.

    Only SM 12x gains by that; upstream never chooses the fusion for it, so it takes the operator's option and a group
    that passes the gate.
    """
    return upstreams_own or _beyond_upstream()


def resolves_where_compiled(resolve: Callable[..., str]) -> Callable[..., str]:
    """Decorate upstream's ``_resolve_backend(backend, is_multi_node)``, which raises for all but SM 9x and 10x."""

    @functools.wraps(resolve)
    def resolve_backend(backend: str, is_multi_node: bool = False) -> str:
        if backend in ("auto", "trtllm") and not is_multi_node and _beyond_upstream():
            return "trtllm"
        return resolve(backend, is_multi_node)

    return resolve_backend


@functools.cache
def _beyond_upstream() -> bool:
    """Whether these GPUs are none of upstream's (SM 9x, SM 10x) and the trtllm kernel is compiled for them."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    major = torch.cuda.get_device_capability()[0]
    return major not in (9, 10) and major in (compiled_for("trtllm") or ())


def _makes_nothing(*_: Any, **__: Any) -> None:
    """In place of flashinfer's maker of build instructions."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
