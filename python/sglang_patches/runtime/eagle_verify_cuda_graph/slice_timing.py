"""Measures at start whether a verify above the largest captured size is faster in slices than in one eager pass.

Both ways run upstream's own forward, in turn, over a batch made up here: random tokens behind ``CONTEXT`` committed
ones, all of whose KV is slot 0, the one that upstream pads with and nothing reads. Ranks run the same passes, take for
each size the slowest rank's figures, and so decide alike.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_patches import lane
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, slice_policy, slices
from sglang_patches.runtime.eagle_verify_cuda_graph.slice_policy import Decision, Timing

# Committed tokens of each request while measuring.
CONTEXT = 1024
# Passes of each way and size: the first ones compile and allocate and are not counted.
WARM_UP, COUNTED = 2, 5
# Share of the free memory that the logits of one eager pass may take while measuring, three times counted (the logits
# and what sampling and gathering make of them); what is larger is left to upstream.
MEMORY_SHARE = 0.5

logger = logging.getLogger("sglang_patches")

Way = Callable[[Any], Any]


def decide(worker: Any) -> None:
    """Decide for this ``EAGLEWorkerV2``, whose graphs are captured; says so in the log where it measured.

    Raises:
        torch.OutOfMemoryError: with several ranks, because the others wait for this one in the pass that failed.
    """
    slice_policy.set_decision(None)  # or an earlier one's slices would be measured as eager
    try:
        decision = _decide(worker)
    except Exception as error:
        if slice_policy.lost_rank(error):
            raise
        counting.failed("slice")
        decision = Decision(0, f"measuring failed: {slice_policy.first_line(error)}")
    slice_policy.set_decision(decision)
    if decision is not None and decision.timings and counting.speaks():
        told = ", ".join(f"{t.batch_size}: {t.sliced_ms:.2f} against {t.eager_ms:.2f}" for t in decision.timings)
        logger.info(
            "sglang-patches: %s: measured in %.1f s, batch size and ms of a verify in slices against eager: %s; %s",
            counting.PATCH,
            decision.seconds,
            told,
            decision.why,
        )


def _decide(worker: Any) -> Decision | None:
    model_runner = worker.target_worker.model_runner
    runner = lane.here().verify_runner(model_runner)
    limit = int(model_runner.req_to_token_pool.size)
    if not hasattr(runner, "capture_bs") or limit <= runner.max_bs:
        return None
    if why := slice_policy.forbidden(model_runner, runner):
        return Decision(0, f"not with {why}")
    sizes = fitting(
        sizes_to_measure(runner.max_bs, limit), _bytes_per_request(model_runner, runner), _free(model_runner)
    )
    if not sizes:
        return Decision(0, "too little GPU memory is free to measure it")
    started = time.perf_counter()
    lengths_on_host = _lengths_on_host(worker)

    def make(size: int) -> Any:
        return verify_batch(model_runner, runner, size, lengths_on_host)

    ways: tuple[Way, Way] = (
        lambda batch: model_runner._forward_raw(batch, None),
        lambda batch: slice_policy.run(model_runner, batch),
    )
    try:
        with torch.no_grad():
            timings = measure(sizes, make, ways, time.perf_counter, runner.device_module.synchronize)
        runner.device_module.empty_cache()  # what eager passes over large batches held
    except Exception as error:
        if slice_policy.lost_rank(error):
            raise
        counting.failed("slice")
        # Said to the other ranks too: they failed alike, or else must not use slices that this one has not.
        timings = [Timing(size, 0.0, float("inf")) for size in sizes]
    timings = agreed(timings)
    up_to = reach(timings, limit)
    return Decision(up_to, _why(timings, up_to, limit), runner, tuple(timings), time.perf_counter() - started)


def sizes_to_measure(largest: int, limit: int) -> list[int]:
    """Up to three batch sizes above the largest captured one: the next, the limit and the one half way (by ratio)."""
    first = largest + 1
    return sorted({first, round((first * limit) ** 0.5), limit})


def fitting(sizes: Sequence[int], bytes_per_request: int, free: float) -> list[int]:
    """Those of `sizes` for which `MEMORY_SHARE` of the `free` bytes pays."""
    return [size for size in sizes if size * bytes_per_request <= free * MEMORY_SHARE]


def _bytes_per_request(model_runner: Any, runner: Any) -> int:
    return 3 * 4 * int(runner.captured_req_width) * int(model_runner.model_config.vocab_size)


def _free(model_runner: Any) -> float:
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.common import get_available_gpu_memory

    gib = get_available_gpu_memory(
        model_runner.device,
        model_runner.gpu_id,
        distributed=slice_policy.several_ranks(),
        cpu_group=get_parallel().world_group.cpu_group,
    )
    return float(gib) * 2**30


def _lengths_on_host(worker: Any) -> bool:
    from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

    return bool(decide_needs_cpu_seq_lens(worker.spec_v2_attn_backends))


def verify_batch(model_runner: Any, runner: Any, size: int, lengths_on_host: bool) -> Any:
    """A target-verify ``ForwardBatch`` of `size` requests that looks as upstream's would, with the same tokens on every
    rank; it writes KV slot 0 only.

    Args:
        lengths_on_host: whether this server keeps sequence lengths on the CPU too.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    device, width = model_runner.device, int(runner.captured_req_width)
    room = int(model_runner.req_to_token_pool.req_to_token.shape[1])
    length = max(1, min(CONTEXT, room - width))
    lengths = torch.full((size,), length, dtype=torch.int64)
    layout = slices.mask_layout(model_runner)
    if layout == TreeMaskMode.FULL_MASK:
        cells = size * width * (length + width)
    else:
        cells = size * width * (width if layout == TreeMaskMode.QLEN_ONLY else 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model_runner.model_config.vocab_size, (size * width,), generator=generator).to(device)
    positions = (torch.arange(width) + length).repeat(size).to(device)
    rows = torch.arange(size * width, device=device).view(size, width)
    standalone = model_runner.spec_algorithm.is_standalone()
    capture = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL
    spec_info = EagleVerifyInput(
        draft_token=tokens,
        custom_mask=torch.ones(cells, dtype=torch.bool, device=device),
        positions=positions,
        retrieve_index=rows,
        retrieve_next_token=torch.full_like(rows, -1),
        retrieve_next_sibling=torch.full_like(rows, -1),
        retrieve_cum_len=None,
        spec_steps=int(get_spec().speculative_num_steps),
        topk=int(get_spec().speculative_eagle_topk),
        draft_token_num=width,
        capture_hidden_mode=capture,
        seq_lens_sum=size * length if lengths_on_host else None,
        seq_lens_cpu=lengths if lengths_on_host else None,
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=size,
        input_ids=tokens,
        # Row 0 of the table is upstream's own for padding; no request has it.
        req_pool_indices=torch.zeros(size, dtype=torch.int64, device=device),
        seq_lens=lengths.to(device),
        seq_lens_cpu=lengths if lengths_on_host else None,
        seq_lens_sum=size * length if lengths_on_host else None,
        orig_seq_lens=lengths.to(device, torch.int32),
        out_cache_loc=torch.zeros(size * width, dtype=torch.int64, device=device),
        positions=positions,
        spec_algorithm=model_runner.spec_algorithm,
        spec_info=spec_info,
        capture_hidden_mode=capture,
    )
    batch._init_num_token_non_padded(device=device, is_draft_worker=False)
    translator = model_runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
    return batch


def measure(
    sizes: Sequence[int],
    make: Callable[[int], Any],
    ways: tuple[Way, Way],
    clock: Callable[[], float],
    synchronize: Callable[[], Any],
) -> list[Timing]:
    """Median milliseconds, host and GPU, of both ways over `make(size)`, in turn so that a slow moment hits both.

    Args:
        ways: eager, sliced.
        clock: seconds.
        synchronize: waits until the GPU is idle.
    """
    timings = []
    for size in sizes:
        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(WARM_UP + COUNTED):
            for way, seconds in zip(ways, taken, strict=True):
                batch = make(size)  # an eager pass leaves its marks on a batch
                synchronize()
                started = clock()
                way(batch)
                synchronize()
                if turn >= WARM_UP:
                    seconds.append(clock() - started)
        eager, sliced = (1e3 * statistics.median(seconds) for seconds in taken)
        timings.append(Timing(size, eager, sliced))
    return timings


def agreed(timings: Sequence[Timing]) -> list[Timing]:
    """The slowest rank's figures, the same on every rank."""
    if not slice_policy.several_ranks():
        return list(timings)
    from sglang.srt.runtime_context import get_parallel

    figures = torch.tensor([[timing.eager_ms, timing.sliced_ms] for timing in timings], dtype=torch.float64)
    group = get_parallel().world_group.cpu_group
    torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX, group=group)
    return [Timing(timing.batch_size, *row) for timing, row in zip(timings, figures.tolist(), strict=True)]


def reach(timings: Sequence[Timing], limit: int) -> int:
    """Up to which batch size slices were faster, size by size from the smallest: the largest measured one, 0 for none.

    More slices cost more, an eager pass hardly does: what is faster at a size is taken to be so below it.
    """
    up_to = 0
    for timing in timings:
        if timing.sliced_ms >= timing.eager_ms:
            break
        up_to = timing.batch_size
    return min(up_to, limit)


def _why(timings: Sequence[Timing], up_to: int, limit: int) -> str:
    if any(timing.sliced_ms == float("inf") for timing in timings):
        return "measuring failed on a rank; its log has the error"
    if not up_to:
        return "an eager pass is faster"
    if up_to == limit:
        return "faster than an eager pass at every measured size"
    if up_to == timings[-1].batch_size:
        return f"faster than an eager pass; nothing above {up_to} was measured, for lack of free GPU memory"
    return f"an eager pass is faster above {up_to}, as far as was measured"
