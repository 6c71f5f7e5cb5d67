"""What any kernel that splits the context needs, of a server and of a call: not a platform's name.

Reasons are stable names, counted and told in ``/server_info``; the sentences beside them are for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

# New tokens of a request. One is what a server in upstream's adaptive mode verifies where it drafts nothing.
TOKENS = (1, 16)
COMPUTE: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Check = tuple[bool, str, str]  # whether it refuses, the reason's name, a sentence


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides for a whole server, whatever the attention. ``capability`` is None without an NVIDIA GPU.

    Attributes:
        prefill_node: of a disaggregated server, which neither verifies nor drafts; "switchable" where it may become a
            decode node.
    """

    capability: tuple[int, int] | None
    tokens: int
    mla: bool
    compute: torch.dtype
    cache: torch.dtype
    dcp_size: int
    deterministic: bool
    prefill_node: Literal["", "fixed", "switchable"] = ""


def common(backend: Any, model_runner: Any, capability: tuple[int, int] | None) -> dict[str, Any]:
    """`Facts` of upstream's ``TritonAttnBackend``, after its ``__init__``, and ``ModelRunner``, by name."""
    return {
        "capability": capability,
        "tokens": backend.num_draft_tokens or 0,
        "mla": backend.use_mla,
        "compute": model_runner.dtype,
        "cache": model_runner.kv_cache_dtype,
        "dcp_size": backend.dcp_size,
        "deterministic": backend.enable_deterministic,
        "prefill_node": prefill_node(),
    }


def prefill_node() -> Literal["", "fixed", "switchable"]:
    """As in `Facts`."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_mode != "prefill":
        return ""
    return "switchable" if get_disagg().enable_pd_role_switch else "fixed"


def capability(model_runner: Any) -> tuple[int, int] | None:
    """Compute capability of the rank's NVIDIA GPU."""
    if torch.version.hip is not None or not str(model_runner.device).startswith("cuda"):
        return None
    return torch.cuda.get_device_capability(model_runner.gpu_id)


def tokens_check(seen: Facts) -> Check:
    low, high = TOKENS
    refuses = not low <= seen.tokens <= high
    return refuses, "draft_tokens", f"{seen.tokens} draft tokens; {low} to {high} are supported"


def prefill_node_check(seen: Facts, does: str) -> Check:
    """A node that prefills for others, for good; ``does`` is what it leaves to them."""
    return seen.prefill_node == "fixed", "prefill_node", f"a prefill node {does} nothing"


def machine_checks(seen: Facts) -> tuple[Check, ...]:
    """Of parallelism, GPU and types."""
    return (
        (seen.dcp_size > 1, "context_parallel", f"decode context parallelism of {seen.dcp_size}"),
        (seen.deterministic, "deterministic", "--enable-deterministic-inference has a kernel of its own"),
        (seen.capability is None or seen.capability < (8, 0), "device", f"{_gpu(seen.capability)}; SM 80 is needed"),
        (seen.compute not in COMPUTE, "dtype", f"the model computes in {seen.compute}; bfloat16 or float16 is needed"),
        (
            seen.cache != seen.compute and seen.cache not in FP8,
            "cache_dtype",
            f"the KV cache is {seen.cache}; {seen.compute} or fp8 is needed",
        ),
        (
            seen.cache in FP8 and (seen.capability or (0, 0)) < (8, 9),
            "cache_dtype",
            f"triton reads an fp8 KV cache on SM 89 and newer, this is {_gpu(seen.capability)}",
        ),
    )


def first(checks: tuple[Check, ...]) -> tuple[str, str] | None:
    """(reason, sentence) of the first that refuses."""
    return next(((reason, sentence) for refuses, reason, sentence in checks if refuses), None)


def option_reason(
    *,
    logit_cap: float,
    sliding_window_size: int | None,
    sinks: torch.Tensor | None,
    temperature_len: int | None,
    is_causal: bool,
) -> str | None:
    """Which of the options of upstream's extend kernel a call has that split kernels do not; None if none."""
    if sinks is not None:
        return "sinks"
    if sliding_window_size is not None and sliding_window_size > -1:
        return "sliding_window"
    if logit_cap:
        return "logit_cap"
    if temperature_len is not None and temperature_len > 0:
        return "temperature"
    return None if is_causal else "not_causal"


def batch_reason(q: torch.Tensor, k_new: torch.Tensor, kv_indptr: torch.Tensor, tokens: int) -> str | None:
    """Why a batch whose longest request has ``tokens`` new ones is not one of even, supported numbers of them."""
    batch = kv_indptr.shape[0] - 1
    if not TOKENS[0] <= tokens <= TOKENS[1]:
        return "draft_tokens"
    # A batch of uneven widths has fewer rows than its widest request would give.
    if batch < 1 or q.shape[0] != batch * tokens or k_new.shape[0] != q.shape[0]:
        return "ragged"
    return None


def type_reason(q: torch.Tensor, *cached: torch.Tensor) -> str | None:
    """Why the types of queries and of cached keys and values are not supported."""
    if q.dtype not in COMPUTE or any(tensor.dtype != q.dtype and tensor.dtype not in FP8 for tensor in cached):
        return "dtype"
    return None


def _gpu(found: tuple[int, int] | None) -> str:
    return "no NVIDIA GPU" if found is None else f"SM {found[0]}{found[1]}"
