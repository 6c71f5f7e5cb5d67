"""Runs inside the scheduler process: verifies of random tokens from their CUDA graph, timed; the experts they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Token sets of each batch size, and replays of each that are timed.
SETS, REPLAYS = 8, 25


def measure(scheduler: Any, requests: int) -> dict[str, Any]:
    """Verifies of so many requests behind 1024 committed tokens each.

    The graph alone is timed, between two events on its stream: what the host does before is the same for every k0.
    Experts are those that upstream's ``TopK`` modules give out in an eager pass over the same tokens.

    Returns: ``tokens``; ``ms`` by token set, one a replay; ``experts``, different ones by token set and layer;
    ``graph`` whether the batch had one.
    """
    import torch
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

    from sglang_patches.bench import routers
    from sglang_patches.runtime.eagle_verify_cuda_graph import slice_timing

    model_runner = scheduler.tp_worker.model_runner
    runner = model_runner.decode_cuda_graph_runner
    on_host = bool(decide_needs_cpu_seq_lens(scheduler.draft_worker.spec_v2_attn_backends))
    width = int(runner.captured_req_width)

    def batch_of(seed: int) -> Any:
        batch = slice_timing.verify_batch(model_runner, runner, requests, on_host)
        drawn = torch.randint(
            8, model_runner.model_config.vocab_size, (requests * width,), generator=torch.Generator().manual_seed(seed)
        )
        batch.input_ids.copy_(drawn)
        return batch

    routers.draw(model_runner.model)
    told: dict[str, Any] = {"tokens": requests * width, "ms": [], "experts": []}
    seen: list[int] = []
    layers = [module for module in model_runner.model.modules() if isinstance(module, TopK)]
    with torch.no_grad():
        for seed in range(SETS):
            batch = batch_of(seed)
            told["graph"] = bool(runner.can_run_graph(batch))
            model_runner._forward_raw(batch, None)
            times = []
            for _ in range(REPLAYS):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                runner.backend.replay(runner._replay_graph_key, batch)
                end.record()
                end.synchronize()
                times.append(round(begin.elapsed_time(end), 4))
            told["ms"].append(times)
            seen.clear()
            hooks = [
                layer.register_forward_hook(lambda _, __, out: seen.append(len(torch.unique(out.topk_ids))))
                for layer in layers
            ]
            may, runner.can_run_graph = runner.can_run_graph, lambda batch: False
            try:
                model_runner._forward_raw(batch_of(seed), None)
            finally:
                runner.can_run_graph = may
                for hook in hooks:
                    hook.remove()
            told["experts"].append(list(seen))
    return told


def _answer(scheduler: Any, requests: int, out: str) -> None:
    """RPC of the scheduler; the answer goes to file `out` as JSON."""
    Path(out).write_text(json.dumps(measure(scheduler, requests)))


def run_scheduler(*args: Any, **named: Any) -> Any:
    """Upstream's scheduler process with the measurement."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    Scheduler.oea = _answer
    return run_scheduler_process(*args, **named)
