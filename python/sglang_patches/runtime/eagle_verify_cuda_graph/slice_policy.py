"""Whether a verify above the largest captured size is cut into slices: may it be, was that faster, did it work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_patches import lane
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, reasons, slices
from sglang_patches.runtime.eagle_verify_cuda_graph.counting import contained
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Path, Phase, Reason

# Attention backends (upstream's classes, exactly) that keep nothing from a verify but its KV, as read in 0.5.23, so
# that one replay may follow another before the batch is committed. Linear and sparse attention keep more.
SLICEABLE: tuple[str, ...] = (
    "TritonAttnBackend",
    "FlashInferAttnBackend",
    "FlashInferMLAAttnBackend",
    "FlashAttentionBackend",
)
# They plan in host memory that the GPU reads later: a second plan has to wait until the GPU is done with the first.
PLANS_ON_HOST = ("FlashInferAttnBackend", "FlashInferMLAAttnBackend")


@dataclass(frozen=True)
class Timing:
    """Medians at one batch size, in milliseconds, of all ranks the slowest's."""

    batch_size: int
    eager_ms: float
    sliced_ms: float


@dataclass(frozen=True)
class Decision:
    """Up to which batch size slices are replayed, 0 for never, and why.

    Attributes:
        runner: the ``DecodeCudaGraphRunner`` that it was made for; another one (captured anew after a change of role)
            gets no slices.
        seconds: what measuring took.
    """

    up_to: int
    why: str
    runner: Any = None
    timings: tuple[Timing, ...] = ()
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """For the outcome in ``/server_info``."""
        timings = [
            {
                "batch_size": timing.batch_size,
                "eager_ms": round(timing.eager_ms, 3),
                "sliced_ms": round(timing.sliced_ms, 3),
            }
            for timing in self.timings
        ]
        return {"up_to": self.up_to, "why": self.why, "measured": timings, "seconds": round(self.seconds, 1)}


@dataclass
class _State:
    decision: Decision | None = None
    refused: Counter[str] = field(default_factory=Counter)


_state = _State()


def figures() -> dict[str, Any]:
    """``slices`` for the outcome; empty where no batch is above the largest captured size."""
    if _state.decision is None:
        return {}
    refused = {"refused": dict(_state.refused)} if _state.refused else {}
    return {"slices": {**_state.decision.figures(), **refused}}


def set_decision(decision: Decision | None) -> None:
    """Replace what holds from now on; None where slices are not needed."""
    _state.decision = decision


def covers(runner: Any, size: int) -> bool:
    """Whether a verify of `size` requests, which has no graph of its own, is served by slices."""
    decision = _state.decision
    return decision is not None and size <= decision.up_to and decision.runner is runner and size > runner.max_bs


def forbidden(model_runner: Any, runner: Any) -> str:
    """What on this server forbids slices, empty where nothing does. Looks at nothing that differs between ranks."""
    if why := lane.here().no_slices:
        return why
    from sglang.srt.eplb.expert_distribution import (
        _ExpertDistributionRecorderNoop,
        get_global_expert_distribution_recorder,
    )
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    backend = type(runner.attn_backend).__name__
    recorder = get_global_expert_distribution_recorder()
    capturers = (get_global_experts_capturer(), get_global_indexer_capturer())
    for found, why in (
        (runner.require_mlp_tp_gather or runner.require_attn_tp_gather or runner.require_mlp_sync, "DP attention"),
        (get_parallel().pp_size > 1, "pipeline parallelism"),
        (runner.enable_two_batch_overlap, "two-batch overlap"),
        (runner.enable_pdmux, "--enable-pdmux"),
        (runner.ragged_verify_mode, "ragged verify"),
        (runner.disable_padding, "--disable-cuda-graph-padding"),
        (runner.is_encoder_decoder, "an encoder-decoder model"),
        (runner.attention_graph_variants is not None, "graphs for several kinds of attention"),
        (get_spec().speculative_adaptive, "adaptive speculation"),
        (model_runner.lora_manager is not None, "LoRA"),
        (model_runner.model_config.model_is_mrope, "mrope positions"),
        (model_runner.hisparse_coordinator is not None, "HiSparse"),
        (model_runner.canary_manager is not None, "the KV canary"),
        (model_runner.ngram_embedding_manager.enabled, "n-gram embeddings"),
        (not isinstance(recorder, _ExpertDistributionRecorderNoop), "recording of the expert distribution"),
        (any(capturer is not None for capturer in capturers), "the return of routed experts or indexer choices"),
        (backend not in SLICEABLE, f"the attention backend {backend} is not known to keep nothing but KV"),
    ):
        if found:
            return why
    return ""


def _in_reach(model_runner: Any, batch: Any) -> bool:
    runner = lane.here().verify_runner(model_runner)
    return (
        batch.forward_mode.is_target_verify()
        and covers(runner, int(batch.batch_size))
        and reasons.declined_verify(runner, batch) is Reason.BATCH_TOO_LARGE
    )


def taken(model_runner: Any, batch: Any) -> bool:
    """Whether `replay_slices` will take this verify batch, which upstream declined to replay as a whole."""
    return _state.decision is not None and _in_reach(model_runner, batch) and not slices.unknown(batch)


def replay_slices(model_runner: Any, batch: Any) -> Any:
    """Called by upstream's ``ModelRunner._forward_raw`` for every forward that has no graph of its own.

    Counts the verify that it takes. Returns its ``LogitsProcessorOutput``; None where upstream's eager pass is to go
    on, after a failure too, which switches slices off until the next start.

    Raises:
        RuntimeError: out of GPU memory on one of several ranks: the others already wait for it in their replay, and
            cannot be told to take another path.
    """
    decision = _state.decision
    if decision is None or not contained("slice", _in_reach, model_runner, batch):
        return None
    if found := slices.unknown(batch):
        _refuse(found)
        return None
    size = int(batch.batch_size)
    try:
        output = run(model_runner, batch)
    except Exception as error:
        if lost_rank(error):
            raise RuntimeError(
                f"{counting.PATCH}: out of GPU memory while verifying {size} requests in slices, and the other ranks "
                f"already wait for this one. Lower --mem-fraction-static or --max-running-requests. ({error})"
            ) from error
        counting.failed("slice")
        _state.decision = dataclasses.replace(decision, up_to=0, why=f"failed at {size} requests: {first_line(error)}")
        counting.passes.add(Phase.VERIFY, Path.EAGER, Reason.BATCH_TOO_LARGE, size)
        return None
    counting.passes.add(Phase.VERIFY, Path.GRAPH, Reason.SLICED, size)
    return output


def _refuse(found: str) -> None:
    _state.refused[found] += 1
    if _state.refused[found] == 1:
        counting.logger.warning(
            "sglang-patches: %s: a verify with %s is not sliced: how to cut that is not known here",
            counting.PATCH,
            found,
        )


def lost_rank(error: Exception) -> bool:
    """Whether this failure is one that hits a single rank of several; any other hits all of them alike, in which case
    all take upstream's path."""
    return isinstance(error, torch.OutOfMemoryError) and several_ranks()


def first_line(error: Exception) -> str:
    """Kind and first line of an error, for an outcome."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def run(model_runner: Any, batch: Any) -> Any:
    """`slices.replay` on this server's runner, waiting between slices where its attention backend needs it."""
    runner = lane.here().verify_runner(model_runner)
    waits = type(runner.attn_backend).__name__ in PLANS_ON_HOST
    between = runner.device_module.current_stream().synchronize if waits else None
    return slices.replay(batch, model_runner, runner, between)


def several_ranks() -> bool:
    """Whether other processes take part in this server's forwards."""
    return lane.here().launch_world_size() > 1
