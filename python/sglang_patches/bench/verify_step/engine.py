"""One engine with the probe in its scheduler, in a process of its own: starts it, measures the grid, appends records.

Started by `command` with the specification as a JSON file. It imports upstream at once, so that this happens while the
engine before it starts, then waits for a line on its standard input; when that is closed, its starter is gone, and it
ends. Progress goes to a file descriptor, one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from sglang_patches.bench.verify_step import grid as grids
from sglang_patches.bench.verify_step import journal

_PROFILED_TOKENS = 24
_COUNTED_TOKENS = 12


class Spec(BaseModel):
    """What an engine process is told."""

    model_config = ConfigDict(extra="forbid")

    draft_tokens: int
    arguments: list[str]
    shown: list[str]
    command: list[str]
    grid: grids.Grid
    share: str
    vocabulary: int
    sweep: bool
    folder: Path
    progress: int


class Bench:
    """The engine, and what it is asked."""

    def __init__(self, spec: Spec, scratch: Path) -> None:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import prepare_server_args

        from sglang_patches.bench.verify_step import probe

        run = probe.run_speculative if spec.draft_tokens else probe.run_plain

        class ProbedEngine(Engine):
            run_scheduler_process_func = staticmethod(run)

        self.spec = spec
        self.scratch = scratch
        longest = max(spec.grid.contexts)
        # The first ids are special tokens.
        generator = np.random.default_rng(0)
        self.prompts = generator.integers(8, spec.vocabulary, (spec.grid.requests, longest)).tolist()
        begun = time.perf_counter()
        self.engine = ProbedEngine(server_args=prepare_server_args(spec.arguments))
        self.start_seconds = time.perf_counter() - begun
        self._asked = 0

    def generate(self, requests: int, context: int, tokens: int) -> int:
        """Greedy answers of `tokens` tokens to the first prompts, cut to `context`, at once.

        Returns: the most prompt tokens of a request that were not in the radix cache.

        Raises ValueError if a prompt had another length.
        """
        prompts = [prompt[:context] for prompt in self.prompts[:requests]]
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self.engine.generate(input_ids=prompts, sampling_params=params)
        told = [answer["meta_info"] for answer in answers]
        lengths = {meta["prompt_tokens"] for meta in told}
        if lengths != {context}:
            raise ValueError(f"prompts of {context} tokens were served as {sorted(lengths)}")
        return max(context - meta["cached_tokens"] for meta in told)

    def ask(self, do: str, **named: Any) -> Any:
        """Call the probe in the scheduler; returns its answer."""
        self._asked += 1
        out = self.scratch / f"answer-{self._asked}.json"
        self.engine.collective_rpc("verify_step", do=do, out=str(out), **named)
        answer = json.loads(out.read_text())
        out.unlink()
        return answer

    def told(self) -> dict[str, Any]:
        """What the patches in the scheduler tell, empty where `provenance` is off."""
        states = self.engine.get_server_info()["internal_states"]
        return states[0].get("sglang_patches", {})


def provenance(bench: Bench) -> tuple[dict[str, Any] | None, str]:
    """The document of this engine, or None and why there is none."""
    from sglang.srt.runtime_context import get_context

    from sglang_patches.document import collect
    from sglang_patches.document.schema import Process
    from sglang_patches.document.unnamed import unnamed

    try:
        document = collect.document(
            collect.process("engine", collect.SERVER_BUDGET), get_context().resolved_server_args_dict()
        )
        scheduler = bench.told().get("process")
        if scheduler:
            document.processes.append(Process.model_validate(scheduler))
        return unnamed(document.model_dump()), ""
    except Exception as error:  # whatever it is, times were measured, and the reason is told with them
        return None, f"{type(error).__name__}: {error}"


class Measurement:
    """Carries the grid out."""

    def __init__(self, spec: Spec, bench: Bench) -> None:
        self.spec, self.bench, self.grid = spec, bench, spec.grid
        self.run = uuid.uuid4().hex[:12]
        self.turns = list(self.grid.turns())
        self.whole = sum(turn.cost for turn in self.turns)
        self.whole += len(self.grid.cells()) * _COUNTED_TOKENS * 8 + len(self.grid.profiles()) * _PROFILED_TOKENS * 8
        self.carried = 0

    def note(self, record: str, **fields: Any) -> None:
        """Keep a record."""
        engine = self.spec.draft_tokens
        at = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"record": record, "engine": engine, "arm": grids.key(engine), "run": self.run, "at": at}
        journal.append(self.spec.folder, {**head, **fields})

    def progress(self, say: str, cost: int = 0) -> None:
        """Tell the starter."""
        self.carried += cost
        tell(self.spec.progress, say=say, part=self.carried / self.whole)

    def carry_out(self) -> None:
        """All of it."""
        bench, grid = self.bench, self.grid
        begun = time.perf_counter()
        drawn = bench.ask("draw") if grid.drawn_routers else 0
        values_drawn = bench.ask("draw_all") if grid.drawn_values else 0
        self.progress("prefilling the longest prompts")
        bench.generate(grid.requests, max(grid.contexts), 1)
        document, why_not = provenance(bench)
        if self.spec.sweep:
            for size in range(1, grid.requests + 1):
                bench.generate(size, min(grid.contexts), 8)
        self.note(
            "engine",
            arguments=self.spec.shown,
            command=self.spec.command,
            grid=grid.model_dump(),
            share=self.spec.share,
            start_seconds=round(bench.start_seconds, 1),
            prefill_seconds=round(time.perf_counter() - begun, 1),
            facts=bench.ask("facts"),
            routers_drawn=drawn,
            values_drawn=values_drawn,
            swept=self.spec.sweep,
            outcomes_after_sweep=bench.told().get("outcomes"),
            document=document,
            no_document=why_not,
        )
        for context, size in grid.cells():
            self.progress(f"batch {size}, context {context}: counting experts", _COUNTED_TOKENS * 8)
            self.count(context, size)
        for turn in self.turns:
            self.progress(
                f"batch {turn.batch_size}, context {turn.context}, {turn.mode}, round {turn.round}", turn.cost
            )
            self.time(turn)
        for context, size in grid.profiles():
            self.progress(f"batch {size}, context {context}: kernels", _PROFILED_TOKENS * 8)
            self.profile(context, size)
        self.note("done", seconds=round(time.perf_counter() - begun, 1), outcomes=bench.told().get("outcomes"))

    def count(self, context: int, size: int) -> None:
        """The untimed pass."""
        self.bench.ask("count")
        self.bench.generate(size, context, _COUNTED_TOKENS)
        counted = self.bench.ask("counted", batch_size=size)
        seen = counted["contexts"]
        if seen is not None and not context <= seen[0] <= seen[1] <= context + self.grid.room:
            raise ValueError(f"a batch of {size} at context {context} had {seen[0]} to {seen[1]} tokens cached")
        self.note("routing", batch_size=size, context=context, **counted)

    def time(self, turn: grids.Turn) -> None:
        """One generation; round 0 leaves no record."""
        self.bench.ask("begin", eager=turn.mode == "eager")
        prefilled = self.bench.generate(turn.batch_size, turn.context, turn.tokens)
        taken = self.bench.ask("take", batch_size=turn.batch_size)
        if turn.round:
            told = {"batch_size": turn.batch_size, "context": turn.context, "mode": turn.mode, "round": turn.round}
            self.note("cycles", **told, prefilled=prefilled, **taken)

    def profile(self, context: int, size: int) -> None:
        """The profiled pass; the profiler's library may be missing, and the rest of the run still counts."""
        mode = self.grid.modes[0]
        told = {"batch_size": size, "context": context, "mode": mode}
        try:
            self.bench.ask("profile", eager=mode == "eager")
            self.bench.generate(size, context, _PROFILED_TOKENS)
            self.note("kernels", **told, **self.bench.ask("profiled", batch_size=size))
        except Exception as error:
            self.note("kernels", **told, error=f"{type(error).__name__}: {error}")


def tell(progress: int, **fields: Any) -> None:
    """Write a line of progress; a starter that is gone does not matter here."""
    with contextlib.suppress(OSError):
        os.write(progress, (json.dumps(fields) + "\n").encode())


def _end_with_starter() -> None:
    """Wait until standard input is closed, then end this process group: engine, scheduler, detokenizer."""
    sys.stdin.readline()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """``python -m sglang_patches.bench.verify_step.engine SPEC.json``."""
    spec = Spec.model_validate_json(Path(sys.argv[1]).read_text())
    import sglang.srt.entrypoints.engine
    import sglang.srt.server_args  # noqa: F401

    tell(spec.progress, say="imported")
    if not sys.stdin.readline():
        return
    threading.Thread(target=_end_with_starter, daemon=True).start()
    tell(spec.progress, say="starting the engine", part=0)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(spec, Path(scratch))
        tell(spec.progress, say="started", seconds=bench.start_seconds)
        Measurement(spec, bench).carry_out()
        bench.engine.shutdown()
    tell(spec.progress, say="done", part=1)


if __name__ == "__main__":
    main()
