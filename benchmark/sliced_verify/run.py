"""Measures verify in slices (patch eagle-verify-cuda-graph) against one eager pass, on one GPU, in about 3 minutes.

    python -m benchmark.sliced_verify.run --out benchmark/results/NAME/slices.json [--only tiny|shard]
    python -m benchmark.sliced_verify.run --out /tmp/slices.json --cpu        # the flow alone, on the bundled pair

Graphs are captured up to 4 requests only and 16 run at once. Two engines, one after the other, each with its parts:
  tiny   the bundled pair: what start-up decided, one verify both ways, greedy answers of each batch size with slices,
         without, and in groups of up to 4 requests, which have graphs of their own, with the counts of verify passes
  shard  one TP-8 rank's share of Kimi-K2.5, random weights: start-up, one verify both ways, times of each part of a
         cycle with slices and without, in turn
The file is written after every part. Ends with 0 if all was measured, 1 if a part failed (the file has the error) or
the patch counted a failure of its own, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.sliced_verify.inside import CAPTURED, REQUESTS, SIZES
from sglang_patches import provenance, selection
from sglang_patches.errors import PatchError

REPO = Path(__file__).parents[2]
PATCH = "eagle-verify-cuda-graph"
ROUNDS, TOKENS = 2, 32
Answers = list[list[int]]


class Served:
    """An engine with `inside` in its scheduler."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine as Upstream

        from benchmark.sliced_verify.inside import run_scheduler

        class Switched(Upstream):
            run_scheduler_process_func = staticmethod(run_scheduler)

        self.out = folder / "answer.json"
        begun = time.perf_counter()
        self.engine = Switched(
            speculative_algorithm="EAGLE3",
            speculative_num_steps=3,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=4,
            max_running_requests=REQUESTS,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            grammar_backend="none",
            random_seed=0,
            log_level="warning",
            **options,
        )
        self.start_seconds = round(time.perf_counter() - begun, 1)

    def ask(self, do: str, method: str = "sliced_verify", **named: Any) -> Any:
        """Call the scheduler. Raises AssertionError with the message of what failed there."""
        self.engine.collective_rpc(method, do=do, out=str(self.out), **named)
        return json.loads(self.out.read_text())

    def switch(self, on: bool, whatever: bool = False) -> int:
        """Slices on or off (`inside.Switch.slices`)."""
        return int(self.ask("slices", on=on, whatever=whatever))

    def counts(self) -> dict[str, dict[str, int]]:
        """Verify passes by path and reason."""
        return dict(self.ask("counts"))

    def greedy(self, prompts: Answers, tokens: int) -> Answers:
        """`tokens` greedy token ids after each prompt, all at once."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return [answer["output_ids"] for answer in self.engine.generate(input_ids=prompts, sampling_params=params)]

    def cycles(self, prompts: Answers, tokens: int) -> dict[str, list[float]]:
        """Milliseconds by part of the cycles of such a generation (`probe.Probe.take`)."""
        self.ask("begin", "verify_step")
        self.greedy(prompts, tokens)
        return dict(self.ask("take", "verify_step", batch_size=len(prompts))["ms"])

    def outcome(self) -> dict[str, Any]:
        """Of the patch, as ``/server_info`` has it. Raises RuntimeError if the scheduler tells none."""
        told = self.engine.get_server_info()["internal_states"][0].get("sglang_patches", {})
        if PATCH not in told.get("outcomes", {}):
            raise RuntimeError(
                f"the scheduler tells no outcome of {PATCH}: it needs the patches {PATCH} and provenance"
            )
        return dict(told["outcomes"][PATCH])


def prompts_of(seed: int, requests: int, tokens: int, vocabulary: int) -> Answers:
    """Random prompts; the first ids, special ones, are not in them."""
    return np.random.default_rng(seed).integers(13, vocabulary, (requests, tokens)).tolist()  # type: ignore[no-any-return]


def same(one: Answers, other: Answers) -> dict[str, Any]:
    """How many answers are equal, and at which token each of the others parts."""
    parts = [next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
             for a, b in zip(one, other, strict=True)]  # fmt: skip
    return {"equal": parts.count(None), "of": len(parts), "part_at": [part for part in parts if part is not None]}


def more(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, int]:
    """What was counted between two `Served.counts`, as ``path/reason``."""
    grown = {f"{path}/{why}": count - before.get(path, {}).get(why, 0)
             for path, reasons in after.items() for why, count in reasons.items()}  # fmt: skip
    return {name: count for name, count in grown.items() if count}


def served(engine: Served, vocabulary: int, tokens: int, sizes: Sequence[int], say: Callable[[str], None]) -> Any:
    """Greedy answers of each batch size with slices and without, each twice, and in groups; what of them is equal.

    Slices are replayed at every size, whatever start-up found faster, so that all are compared.
    """
    told = []
    for size in sizes:
        say(f"answers of {size} requests")
        prompts = prompts_of(size, size, 40, vocabulary)
        entry: dict[str, Any] = {"batch_size": size}
        found: dict[str, Answers] = {}
        for way in ("on", "off"):
            engine.switch(way == "on", whatever=True)
            before = engine.counts()
            found[way], found[f"{way} again"] = engine.greedy(prompts, tokens), engine.greedy(prompts, tokens)
            entry[f"counts {way}"] = more(before, engine.counts())
        groups = (prompts[at : at + CAPTURED] for at in range(0, size, CAPTURED))
        found["groups of 4"] = [answer for group in groups for answer in engine.greedy(group, tokens)]
        for pair in ("on = off", "on = on again", "off = off again", "on = groups of 4", "off = groups of 4"):
            one, other = pair.split(" = ")
            entry[pair] = same(found[one], found[other])
        told.append(entry)
    engine.switch(True)
    return told


def cycles(engine: Served, vocabulary: int, sizes: Sequence[int], say: Callable[[str], None]) -> Any:
    """Times of the parts of a cycle with slices, where start-up decided so, and without; a first round is not counted.

    Returns: by batch size and way medians in milliseconds, 10 and 90 percent quantiles, and ``samples``.
    """
    taken: dict[tuple[int, str], dict[str, list[float]]] = {(size, way): {} for size in sizes for way in ("off", "on")}
    for turn in range(ROUNDS + 1):
        for size in sizes:
            say(f"cycles of {size} requests, round {turn} of {ROUNDS}")
            prompts = prompts_of(turn, size, 64, vocabulary)
            for way in ("on", "off") if turn % 2 else ("off", "on"):
                engine.switch(way == "on")
                got = engine.cycles(prompts, TOKENS if turn else 8)
                for part, milliseconds in got.items() if turn else ():
                    taken[size, way].setdefault(part, []).extend(milliseconds)
    engine.switch(True)
    return [{"batch_size": size, "slices": way, **row(samples)} for (size, way), samples in taken.items()]


def row(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians by part, quantiles of verify and cycle, and the samples. Raises ValueError if there is no cycle."""
    if not samples.get("cycle"):
        raise ValueError("no whole cycle was timed: the batch never stayed at its size\n  remedy     more tokens")
    told: dict[str, Any] = {"cycles": len(samples["cycle"])}
    for part, milliseconds in samples.items():
        told[part] = round(float(np.median(milliseconds)), 3)
        if part in ("verify", "cycle"):
            told[f"{part} p10-p90"] = [round(float(q), 2) for q in np.quantile(milliseconds, [0.1, 0.9])]
    return {**told, "samples": samples}


class Result:
    """The file: each part as it is done, or its error."""

    def __init__(self, out: Path, command: list[str]) -> None:
        self.out, self.begun, self.failed = out, time.monotonic(), False
        made = {"command": command, "code_state": {"sglang_patches": provenance.code_state()}}
        self.parts: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "provenance": made}

    def say(self, text: str) -> None:
        """Progress."""
        print(f"{time.monotonic() - self.begun:5.0f} s  {text}", file=sys.stderr, flush=True)

    def part(self, name: str, call: Callable[[], Any]) -> Any:
        """Do a part and keep what it returns; after an error the next part goes on."""
        self.say(name)
        try:
            self.parts[name] = call()
        except Exception as error:
            self.failed = True
            self.parts[name] = {"error": traceback.format_exc()}
            self.say(f"{name} failed: {type(error).__name__}: {error}")
        self.write()
        return self.parts[name]

    def write(self) -> None:
        """Whole or not at all."""
        new = self.out.with_suffix(".new")
        new.write_text(json.dumps(self.parts) + "\n")
        new.replace(self.out)


def measure(name: str, result: Result, folder: Path, options: dict[str, Any]) -> None:
    """One engine, ``tiny`` or ``shard``, and its parts."""
    cpu, sizes = options.get("device") == "cpu", SIZES
    if name == "tiny":
        pair, vocabulary = (REPO / "test/models/tiny-kimi", REPO / "test/models/tiny-kimi-eagle3"), 4096
        options = {"max_total_tokens": 4096 if cpu else 16384, **options}
    else:
        from sglang_patches.bench import shard

        pair, vocabulary = shard.write(folder), shard.VOCABULARY // shard.RANKS
        options = {"load_format": "dummy", "context_length": 4096, "mem_fraction_static": 0.7, **options}
    if cpu:
        sizes = (2,)
    elif name == "tiny":
        options["mm_attention_backend"] = "triton_attn"
    result.say(f"{name}: starting")
    engine = Served(folder, model_path=str(pair[0]), speculative_draft_model_path=str(pair[1]), **options)
    result.part(f"{name}.start", lambda: {"seconds": engine.start_seconds, "outcome": engine.outcome()})
    if not cpu:
        result.part(f"{name}.forward", lambda: engine.ask("forward"))
    if name == "tiny":
        result.part("tiny.served", lambda: served(engine, vocabulary, 24, sizes, result.say))
    if name == "shard" or cpu:
        timed = sizes if cpu else (CAPTURED, *sizes)
        result.part(f"{name}.cycles", lambda: cycles(engine, vocabulary, timed, result.say))
    result.failed |= bool(result.part(f"{name}.end", engine.outcome).get("failures_inside"))
    engine.engine.shutdown()


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--only", choices=("tiny", "shard"), help="one of the two engines")
    parser.add_argument("--cpu", action="store_true", help="the flow of tiny on a CPU, which has no graphs")
    parser.add_argument("--attention-backend", default="triton", help="on a GPU (default triton)")
    given = parser.parse_args()
    if given.cpu and given.only == "shard":
        parser.error("--only shard needs a GPU: with --cpu there is only the bundled pair")
    try:
        if not given.cpu and not selection.has_gpu():
            raise PatchError("no GPU here\n  remedy     --cpu walks through the flow without one")
        result = Result(given.out, ["python", "-m", "benchmark.sliced_verify.run", *sys.argv[1:]])
        if PATCH not in (on := [patch["name"] for patch in provenance.code_state()["patches"]]):
            raise PatchError(f"patch {PATCH} is off (on: {', '.join(on) or 'none'})\n  remedy     select it")
    except PatchError as error:
        print(f"sliced_verify: {error}", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "attention_backend": given.attention_backend,
        "cuda_graph_max_bs_decode": CAPTURED,
        "cuda_graph_bs_prefill": [64, 128],
    }
    if given.cpu:
        from sglang_patches.serve import cpu_environment

        os.environ.update({name: value for name, value in cpu_environment().items() if name not in os.environ})
        options = {"device": "cpu", "attention_backend": "torch_native"}
        options |= {"sampling_backend": "pytorch", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        for name in [given.only] if given.only else ["tiny"] if given.cpu else ["tiny", "shard"]:
            measure(name, result, Path(folder), options)
    from sglang_patches.nccl.provenance import whole

    result.parts["provenance"] |= whole()
    result.write()
    print(f"{given.out}: {'a part failed' if result.failed else 'all was measured'}")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
