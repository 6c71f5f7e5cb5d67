"""Which runners of a server get a metadata graph: those whose preparation is known to read and write fixed places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_patches.runtime.eagle_metadata_graph.prep import Kind

# Algorithms whose verify, draft decode and draft extend are those that upstream's EAGLE worker runs.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides for one runner.

    Attributes:
        tokens: draft tokens that the runner was made for.
        nvidia: its GPU is one.
        backend: name of the attention backend's class, if it is not one that this knows, else "".
        switched_off: an operator's ``SGLANG_ENABLE_METADATA_GLUE_GRAPH=0``.
        glued: upstream glues the runner already.
        translated: the KV pool translates slots.
    """

    algorithm: str | None
    topk: int
    tokens: int
    nvidia: bool
    backend: str
    switched_off: bool
    glued: bool
    window: bool
    translated: bool
    dcp_size: int
    deterministic: bool
    ragged: bool
    two_batch_overlap: bool
    multiplexed: bool
    lora: bool


def kind(runner: Any) -> Kind | None:
    """Which forward of a cycle a CUDA graph runner of upstream's runs, None for another.

    Subclasses (another device's, another algorithm's) have preparations of their own.
    """
    name = type(runner).__name__
    if name == "EAGLEDraftCudaGraphRunner":
        return Kind.DRAFT_DECODE
    if name == "EAGLEDraftExtendCudaGraphRunner":
        return Kind.DRAFT_EXTEND
    # A draft worker with such a runner is of another algorithm.
    return Kind.VERIFY if name == "DecodeCudaGraphRunner" and not runner.model_runner.is_draft_worker else None


def facts(runner: Any, which: Kind) -> Facts:
    """Of a runner, after its ``__init__``."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_exec, get_spec

    model_runner, algorithm = runner.model_runner, runner.model_runner.spec_algorithm
    backend, leaves = _backends(runner.attn_backend, which)
    switch = envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH
    return Facts(
        algorithm=None if algorithm is None or algorithm.is_none() else algorithm.name,
        topk=get_spec().speculative_eagle_topk or 0,
        tokens=(runner.speculative_num_steps or 0) + 1,
        nvidia=torch.version.hip is None and str(runner.device).startswith("cuda"),
        backend=backend,
        switched_off=switch.is_set() and not switch.get(),
        glued=getattr(runner, "_metadata_glue", None) is not None,
        window=any(leaf.use_sliding_window_kv_pool or (leaf.sliding_window_size or 0) > 0 for leaf in leaves),
        translated=any(leaf.kv_index_translator.reads_are_translated for leaf in leaves),
        dcp_size=max((leaf.dcp_size for leaf in leaves), default=1),
        deterministic=any(leaf.enable_deterministic for leaf in leaves),
        ragged=getattr(runner, "ragged_verify_mode", False),
        two_batch_overlap=get_exec().overlap.enable_two_batch_overlap,
        multiplexed=get_disagg().enable_pdmux,
        lora=model_runner.lora_manager is not None,
    )


def _backends(backend: Any, which: Kind) -> tuple[str, list[Any]]:
    """As in `Facts`, and the backends of single forwards that it is made of."""
    name, wanted = type(backend).__name__, "TritonAttnBackend"
    if which is Kind.DRAFT_DECODE:
        if name != "TritonMultiStepDraftBackend":
            return name, []
        leaves = list(backend.attn_backends)
    else:
        leaves = [backend]
    other = next((type(leaf).__name__ for leaf in leaves if type(leaf).__name__ != wanted), "")
    if other:
        return other, []
    return (
        ("", leaves) if all(leaf.dllm_attention is None for leaf in leaves) else (f"{wanted} of a diffusion model", [])
    )


def reason(seen: Facts) -> tuple[str, str] | None:
    """Why the runner has no metadata graph of ours: (reason, sentence); None if it has."""
    checks = (
        (seen.algorithm is None, "no_speculation", "the server does not speculate"),
        (seen.algorithm not in ALGORITHMS, "algorithm", f"{seen.algorithm} is none of {', '.join(ALGORITHMS)}"),
        (seen.topk != 1, "topk", f"drafts of topk {seen.topk}; a chain (1) is supported"),
        (not seen.nvidia, "device", "no NVIDIA GPU"),
        (bool(seen.backend), "other_backend", f"{seen.backend} prepares here, not triton's backend alone"),
        (seen.switched_off, "operator", "SGLANG_ENABLE_METADATA_GLUE_GRAPH is set to false"),
        (seen.glued, "operator", "SGLANG_ENABLE_METADATA_GLUE_GRAPH is set: upstream's own glue graph is used"),
        (seen.window, "sliding_window", "attention has a sliding window"),
        (seen.translated, "kv_pool", "the KV pool translates slots"),
        (seen.dcp_size > 1, "context_parallel", f"decode context parallelism of {seen.dcp_size}"),
        (seen.deterministic, "deterministic", "--enable-deterministic-inference prepares otherwise"),
        (seen.ragged, "ragged", "requests are verified with uneven numbers of tokens"),
        (seen.two_batch_overlap, "two_batch_overlap", "two-batch overlap has a backend for each half"),
        (seen.multiplexed, "pd_multiplexing", "PD multiplexing replays on two streams"),
        (seen.lora, "lora", "LoRA adapters are prepared with the metadata"),
    )
    return next(((code, sentence) for refuses, code, sentence in checks if refuses), None)


def operator_skips_view() -> bool:
    """Whether an operator has said himself if the replay view is skipped."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW.is_set())
