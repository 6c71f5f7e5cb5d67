"""Whether a server, and then a call, can verify with the split kernels: by what they need, not by a platform's name.

Reasons are stable names, counted and told in ``/server_info``; the sentences beside them are for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

# Algorithms whose drafts of topk 1 are a chain; the mask is not looked at, because that would wait for the GPU.
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
TOKENS = (2, 16)
# Upstream's name of the attention backend that has the hook.
BACKEND = "triton"
MAX_WIDTH, MAX_ROPE = 512, 64
COMPUTE: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Facts:
    """What decides for a whole server. ``capability`` is None without an NVIDIA GPU.

    Attributes:
        verifier: name of the attention backend that verifies where it is another than this one, else "".
        prefill_node: of a disaggregated server, which verifies nothing; "switchable" where it may become a decode node.
    """

    capability: tuple[int, int] | None
    algorithm: str | None
    topk: int
    tokens: int
    mla: bool
    width: int
    rope: int
    compute: torch.dtype
    cache: torch.dtype
    dcp_size: int
    deterministic: bool
    upstream_serves: bool
    verifier: str = ""
    prefill_node: Literal["", "fixed", "switchable"] = ""


def facts(backend: Any, model_runner: Any) -> Facts:
    """Of upstream's ``TritonAttnBackend``, after its ``__init__``, and ``ModelRunner``."""
    config = model_runner.model_config
    algorithm = model_runner.spec_algorithm
    return Facts(
        capability=capability(model_runner),
        algorithm=None if algorithm is None or algorithm.is_none() else algorithm.name,
        topk=backend.topk,
        tokens=backend.num_draft_tokens or 0,
        mla=backend.use_mla,
        width=int(getattr(config, "kv_lora_rank", None) or 0),
        rope=int(getattr(config, "qk_rope_head_dim", None) or 0),
        compute=model_runner.dtype,
        cache=model_runner.kv_cache_dtype,
        dcp_size=backend.dcp_size,
        deterministic=backend.enable_deterministic,
        upstream_serves=backend.use_verify_shared_kv or backend.use_verify_splitkv,
        verifier=verifier(model_runner),
        prefill_node=prefill_node(),
    )


def verifier(model_runner: Any) -> str:
    """As in `Facts`: upstream composes a backend of two (``HybridAttnBackend``) where prefill and decode have others,
    and ``--speculative-attention-mode`` says which of the two verifies."""
    from sglang.srt.runtime_context import get_spec

    prefill, decode = model_runner.prefill_attention_backend_str, model_runner.decode_attention_backend_str
    if prefill == decode:
        return ""
    verifies: str = decode if get_spec().speculative_attention_mode == "decode" else prefill
    return "" if verifies == BACKEND else verifies


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


def server_reason(seen: Facts) -> tuple[str, str] | None:
    """Why no verify of this server is split: (reason, sentence); None if it can be."""
    low, high = TOKENS
    checks = (
        (seen.algorithm is None, "no_speculation", "the server does not speculate"),
        (
            bool(seen.verifier),
            "other_backend",
            f"{seen.verifier} verifies, not {BACKEND}, by --speculative-attention-mode",
        ),
        (seen.prefill_node == "fixed", "prefill_node", "a prefill node verifies nothing"),
        (seen.upstream_serves, "upstream", "upstream's own split verify kernel runs here"),
        (
            seen.algorithm not in CHAINS,
            "algorithm",
            f"{seen.algorithm} drafts may be no chain; {', '.join(CHAINS)} are",
        ),
        (seen.topk != 1, "topk", f"drafts are trees (topk {seen.topk}); topk 1 is needed"),
        (not low <= seen.tokens <= high, "draft_tokens", f"{seen.tokens} draft tokens; {low} to {high} are supported"),
        (not seen.mla, "not_mla", "the model's attention is not MLA"),
        (
            not (0 < seen.width <= MAX_WIDTH and 0 < seen.rope <= MAX_ROPE),
            "head_dim",
            f"kv_lora_rank {seen.width}, qk_rope_head_dim {seen.rope}; supported: 1 to {MAX_WIDTH}, 1 to {MAX_ROPE}",
        ),
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
    return next(((reason, sentence) for wrong, reason, sentence in checks if wrong), None)


def call_reason(
    q: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    is_causal: bool,
    tokens: int,
    *,
    logit_cap: float,
    sliding_window_size: int,
    sinks: torch.Tensor | None,
    temperature_len: int,
) -> str | None:
    """Why this verify goes to upstream's extend kernel; None if the split kernels do the same. No values are read."""
    batch, width = kv_indptr.shape[0] - 1, v_extend.shape[-1]
    if sinks is not None:
        return "sinks"
    if sliding_window_size is not None and sliding_window_size > -1:
        return "sliding_window"
    if logit_cap:
        return "logit_cap"
    if temperature_len is not None and temperature_len > 0:
        return "temperature"
    if not is_causal:
        return "not_causal"
    if not TOKENS[0] <= tokens <= TOKENS[1]:
        return "draft_tokens"
    # A batch of uneven widths has fewer rows than its widest request would give.
    if batch < 1 or q.shape[0] != batch * tokens or k_extend.shape[0] != q.shape[0]:
        return "ragged"
    if any(tensor.dim() != 3 for tensor in (q, k_extend, v_extend, k_buffer, v_buffer)):
        return "layout"
    if k_extend.shape[1] != 1 or k_buffer.shape[1] != 1:
        return "kv_heads"
    if not (q.shape[2] == k_extend.shape[2] == k_buffer.shape[2] > width == v_buffer.shape[2]):
        return "head_dim"
    if width > MAX_WIDTH or q.shape[2] - width > MAX_ROPE:
        return "head_dim"
    # The value of a cached token must be the first numbers of its key; so it is in upstream's MLA pools, if none is
    # unpacked into tensors of its own.
    if v_buffer.data_ptr() != k_buffer.data_ptr() or v_buffer.stride(0) != k_buffer.stride(0):
        return "value_apart"
    if any(tensor.stride(-1) != 1 for tensor in (q, k_extend, out, k_buffer)):
        return "layout"
    if q.dtype not in COMPUTE or (k_buffer.dtype != q.dtype and k_buffer.dtype not in FP8):
        return "dtype"
    return None


def _gpu(found: tuple[int, int] | None) -> str:
    return "no NVIDIA GPU" if found is None else f"SM {found[0]}{found[1]}"
