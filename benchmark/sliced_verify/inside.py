"""Runs inside the scheduler process: few captured sizes, slices switched on and off, one verify both ways.

Graphs are captured up to `CAPTURED` requests only, so that batches up to `REQUESTS` have none of their own. Timing is
that of `bench verify-step` (`sglang_patches.bench.verify_step.probe`), which is installed beside.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_patches.bench.verify_step import probe

#: Largest batch size that has a CUDA graph, and the most requests that run at once.
CAPTURED, REQUESTS = 4, 16
#: Batch sizes without a graph of their own: cut into slices of 4+1, 4+4, 4+4+3 and 4+4+4+4 requests.
SIZES: tuple[int, ...] = (5, 8, 11, REQUESTS)


class Switch:
    """The worker that verifies, and what start-up decided about slices; both None on a CPU, which has no graphs."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.decision: Any = None
        self._set: Callable[[Any], None] = lambda decision: None

    def install(self) -> None:
        """Remember both at start."""
        from sglang_patches.runtime.eagle_verify_cuda_graph import coverage, slice_policy, slice_timing

        coverage.MAX_ADDED_SIZE = CAPTURED
        decide, set_decision = slice_timing.decide, slice_policy.set_decision
        self._set = set_decision

        def remembered(decision: Any) -> None:
            self.decision = decision
            set_decision(decision)

        def deciding(worker: Any) -> None:
            self.worker = worker
            decide(worker)

        slice_policy.set_decision, slice_timing.decide = remembered, deciding

    def slices(self, on: bool, whatever: bool = False) -> int:
        """Verify in slices from here on, or as upstream does.

        Args:
            whatever: slices up to `REQUESTS`, whatever start-up found faster; what forbids them still does.

        Returns: up to which batch size, 0 for none.
        """
        decision = self.decision
        if on and whatever and decision is not None and decision.runner is not None:
            decision = dataclasses.replace(decision, up_to=REQUESTS)
        self._set(decision if on else None)
        return decision.up_to if on and decision is not None else 0


switch = Switch()


def forward() -> list[dict[str, Any]]:
    """One verify of random tokens, eager and replayed (whole where it has a graph, else in slices), each twice.

    Returns: for each batch size and pair of passes the largest absolute difference of logits and of hidden states, the
    largest absolute logit (``of``), the share of rows with the same best token, and whether all logits are finite.

    Raises RuntimeError where start-up found that nothing can be sliced.
    """
    import torch
    from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

    from sglang_patches.runtime.eagle_verify_cuda_graph import slice_policy, slice_timing

    if switch.decision is None or switch.decision.runner is None:
        why = "nothing was decided" if switch.decision is None else switch.decision.why
        raise RuntimeError(f"this server verifies nothing in slices ({why})")
    model_runner = switch.worker.target_worker.model_runner
    runner = model_runner.decode_cuda_graph_runner
    on_host = bool(decide_needs_cpu_seq_lens(switch.worker.spec_v2_attn_backends))

    def outputs(size: int, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        batch = slice_timing.verify_batch(model_runner, runner, size, on_host)
        # Slots of their own: start-up's batch writes all its KV to slot 0, in no particular order.
        batch.out_cache_loc = torch.arange(1, size * runner.captured_req_width + 1, device=model_runner.device)
        translator = model_runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        probe.probe.eager = way == "eager"
        if way == "replayed" and size > runner.max_bs:
            output = slice_policy.run(model_runner, batch)
        else:
            output = model_runner._forward_raw(batch, None).logits_output
        torch.cuda.synchronize()
        return output.next_token_logits.float().clone(), output.hidden_states.float().clone()

    told = []
    switch.slices(False)  # or an eager pass would be cut
    try:
        with torch.no_grad():
            for size in (CAPTURED - 1, *SIZES):
                seen = [outputs(size, way) for way in ("eager", "replayed", "eager", "replayed")]
                entry: dict[str, Any] = {"batch_size": size}
                for name, one, other in (
                    ("eager - replayed", seen[0], seen[1]),
                    ("eager - eager again", seen[0], seen[2]),
                    ("replayed - replayed again", seen[1], seen[3]),
                ):
                    entry[name] = difference(one, other)
                told.append(entry)
    finally:
        probe.probe.eager = False
        switch.slices(True)
    return told


def difference(one: tuple[Any, Any], other: tuple[Any, Any]) -> dict[str, Any]:
    """How far two passes' (logits, hidden states), each ``[rows, width]`` in float32, are apart; see `forward`."""
    import torch

    (a, hidden), (b, other_hidden) = one, other
    return {
        "logits": float((a - b).abs().max()),
        "of": float(a.abs().max()),
        "hidden": float((hidden - other_hidden).abs().max()),
        "argmax_equal": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        "finite": bool(torch.isfinite(a).all() and torch.isfinite(b).all()),
    }


def _answer(scheduler: Any, do: str, out: str, on: bool = True, whatever: bool = False) -> None:
    """RPC of the scheduler; the answer goes to file `out` as JSON. ``slices``, ``counts`` or ``forward``."""
    from sglang_patches.runtime.eagle_verify_cuda_graph import counting

    if do == "slices":
        result: Any = switch.slices(on, whatever)
    elif do == "counts":
        result = counting.passes.figures()["passes"]["verify"]
    elif do == "forward":
        result = forward()
    else:
        raise ValueError(f"sliced_verify knows no {do!r}; it knows slices, counts, forward")
    Path(out).write_text(json.dumps(result))


def run_scheduler(*args: Any, **named: Any) -> Any:
    """Upstream's scheduler process with the switch and the probe."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    switch.install()
    probe.install(plain=False)
    Scheduler.sliced_verify = _answer
    return run_scheduler_process(*args, **named)
