"""One engine, to run in a process of its own: greedy answers of batches of every size, timed from outside."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

#: Arms: without speculation; a chain of 3 steps; a chain as long as the plan says for the batch.
ARMS = ("none", "fixed", "plan")
_DRAFT_TOKENS = 4
_WARM_UP_TOKENS = 16


class Work(BaseModel):
    """What is served and asked."""

    model_config = ConfigDict(extra="forbid")

    layers: int
    weights: str
    batch_sizes: list[int]
    context: int
    tokens: int
    repeats: int
    plan: Path | None


def measure(arm: str, work: Work, out: Path) -> None:
    """Serve a share of Kimi-K2.5 as `arm` says, with routers drawn, and write what was measured.

    Prompts are prefilled once and stay in the radix cache, so that a timed answer computes one prompt token a request.
    Written: ``batches`` (``batch_size``; ``seconds`` and ``passes``, target passes of the first request, by repeat),
    ``routers_drawn``, ``arguments`` and ``provenance``.
    """
    import numpy as np
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    from sglang_patches.bench import shard
    from sglang_patches.bench.verify_step import arguments, grid, probe
    from sglang_patches.nccl.provenance import whole

    class Served(Engine):
        run_scheduler_process_func = staticmethod(probe.run_plain if arm == "none" else probe.run_speculative)

    asked = grid.Grid(
        batch_sizes=work.batch_sizes, contexts=[work.context], modes=["graph"], rounds=1, tokens=work.tokens
    )
    with tempfile.TemporaryDirectory() as folder:
        target, draft = shard.write(Path(folder), work.layers, work.weights)
        extra = ["--speculative-adaptive", "--speculative-adaptive-config", str(work.plan)] if arm == "plan" else []
        chosen = arguments.Chosen(target, draft, dummy=True, cuda=True, grid=asked, extra=extra)
        steps = 0 if arm == "none" else _DRAFT_TOKENS
        engine = Served(server_args=prepare_server_args(chosen.arguments(steps)))
        answer = Path(folder) / "answer.json"
        engine.collective_rpc("verify_step", do="draw", out=str(answer))
        drawn = json.loads(answer.read_text())
        generator = np.random.default_rng(0)
        prompts = generator.integers(8, chosen.vocabulary(), (asked.requests, work.context)).tolist()

        def generate(size: int, tokens: int) -> tuple[float, int]:
            params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            begun = time.perf_counter()
            answers = engine.generate(input_ids=prompts[:size], sampling_params=params)
            seconds = time.perf_counter() - begun
            told = answers[0]["meta_info"]
            if told["completion_tokens"] != tokens:
                raise ValueError(f"{tokens} tokens were asked for, {told['completion_tokens']} came")
            return seconds, int(told.get("spec_verify_ct") or tokens)

        generate(asked.requests, 1)
        batches: list[dict[str, Any]] = []
        for size in work.batch_sizes:
            generate(size, _WARM_UP_TOKENS)
            timed = [generate(size, work.tokens) for _ in range(work.repeats)]
            batches.append(
                {"batch_size": size, "seconds": [round(s, 5) for s, _ in timed], "passes": [p for _, p in timed]}
            )
        state = engine.get_server_info()["internal_states"][0].get("sglang_patches", {})
        engine.shutdown()
        told = {"arm": arm, "batches": batches, "routers_drawn": drawn, "arguments": chosen.shown(steps)}
        out.write_text(json.dumps({**told, "outcomes": state.get("outcomes", {}), "provenance": whole()}))
