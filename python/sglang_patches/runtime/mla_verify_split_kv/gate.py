"""Whether a server, and then a call, can verify with the split kernels: by what they need, not by a platform's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_patches.runtime._split_kv import gate
from sglang_patches.runtime._split_kv.gate import capability

# Algorithms whose drafts of topk 1 are a chain; the mask is not looked at, because that would wait for the GPU.
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Upstream's name of the attention backend that has the hook.
BACKEND = "triton"
MAX_WIDTH, MAX_ROPE = 512, 64


@dataclass(frozen=True, kw_only=True)
class Facts(gate.Facts):
    """What decides for a whole server.

    Attributes:
        verifier: name of the attention backend that verifies where it is another than this one, else "".
    """

    algorithm: str | None
    topk: int
    width: int
    rope: int
    upstream_serves: bool
    verifier: str = ""


def facts(backend: Any, model_runner: Any) -> Facts:
    """Of upstream's ``TritonAttnBackend``, after its ``__init__``, and ``ModelRunner``."""
    config = model_runner.model_config
    algorithm = model_runner.spec_algorithm
    return Facts(
        **gate.common(backend, model_runner, capability(model_runner)),
        algorithm=None if algorithm is None or algorithm.is_none() else algorithm.name,
        topk=backend.topk,
        width=int(getattr(config, "kv_lora_rank", None) or 0),
        rope=int(getattr(config, "qk_rope_head_dim", None) or 0),
        upstream_serves=backend.use_verify_shared_kv or backend.use_verify_splitkv,
        verifier=verifier(model_runner),
    )


def verifier(model_runner: Any) -> str:
    """As in `Facts`: upstream composes a backend of two (``HybridAttnBackend``) where prefill and decode have others,
    and ``--speculative-attention-mode`` says which of the two verifies."""
    from sglang.srt.runtime_context import get_spec

    # Upstream sets both just before it makes a backend, but not where one is made without a server.
    prefill, decode = (
        getattr(model_runner, f"{phase}_attention_backend_str", BACKEND) for phase in ("prefill", "decode")
    )
    if prefill == decode:
        return ""
    verifies: str = decode if get_spec().speculative_attention_mode == "decode" else prefill
    return "" if verifies == BACKEND else verifies


def server_reason(seen: Facts) -> tuple[str, str] | None:
    """Why no verify of this server is split: (reason, sentence); None if it can be."""
    return gate.first(
        (
            (seen.algorithm is None, "no_speculation", "the server does not speculate"),
            (
                bool(seen.verifier),
                "other_backend",
                f"{seen.verifier} verifies, not {BACKEND}, by --speculative-attention-mode",
            ),
            gate.prefill_node_check(seen, "verifies"),
            (seen.upstream_serves, "upstream", "upstream's own split verify kernel runs here"),
            (
                seen.algorithm not in CHAINS,
                "algorithm",
                f"{seen.algorithm} drafts may be no chain; {', '.join(CHAINS)} are",
            ),
            (seen.topk != 1, "topk", f"drafts are trees (topk {seen.topk}); topk 1 is needed"),
            gate.tokens_check(seen),
            (not seen.mla, "not_mla", "the model's attention is not MLA"),
            (
                not (0 < seen.width <= MAX_WIDTH and 0 < seen.rope <= MAX_ROPE),
                "head_dim",
                f"kv_lora_rank {seen.width}, qk_rope_head_dim {seen.rope}; "
                f"supported: 1 to {MAX_WIDTH}, 1 to {MAX_ROPE}",
            ),
            *gate.machine_checks(seen),
        )
    )


def call_reason(
    q: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    tokens: int,
    **options: Any,
) -> str | None:
    """Why this verify goes to upstream's extend kernel; None if the split kernels do the same. No values are read.

    Args:
        options: as `_split_kv.gate.option_reason`.
    """
    width = v_extend.shape[-1]
    if reason := gate.option_reason(**options) or gate.batch_reason(q, k_extend, kv_indptr, tokens):
        return reason
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
    return gate.type_reason(q, k_buffer)
