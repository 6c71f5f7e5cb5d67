"""Times verify, draft decode, draft extend and host gap of EAGLE-3 cycles, with CUDA graphs and eager, in one run.

    python -m benchmark.verify_step.run --out results/       # one GPU; writes cycles.json and table.md

Serves one TP-8 rank's share of Kimi-K2.5 (`shard.py`, random weights) in this process' engine, with graphs captured by
upstream only up to `--captured` requests, so that patch eagle-verify-cuda-graph has to cover the rest. First it serves
every batch size from 1 to `--requests` and notes the patch's counters: their graph shares must be 1. Then each batch
size runs with graphs and eager in turn, `--rounds` times, after one round each that is not counted; `probe.py` says
what is measured. Random weights accept hardly any draft: a cycle's time does not depend on that, so no tokens are told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.verify_step import probe, shard

COLUMNS = ("draft_decode", "verify", "draft_extend", "host_gap", "cycle")
MODES = ("graph", "eager")


class Bench:
    """An engine with the probe in its scheduler."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from sglang.srt.entrypoints.engine import Engine

        class ProbedEngine(Engine):
            run_scheduler_process_func = staticmethod(probe.run_scheduler)

        self.folder = folder
        self.context = arguments.context
        self.vocabulary = arguments.vocabulary
        target, draft = (arguments.model, arguments.draft) if arguments.model else shard.write(folder)
        self.options: dict[str, Any] = {
            "model_path": str(target),
            "speculative_draft_model_path": str(draft),
            "load_format": "auto" if arguments.model else "dummy",
            "skip_tokenizer_init": True,
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "max_running_requests": arguments.requests,
            "context_length": 4096,
            "disable_radix_cache": True,
            "grammar_backend": "none",
            "random_seed": 0,
        }
        for item in arguments.server:
            name, _, value = item.partition("=")
            try:
                self.options[name] = json.loads(value)
            except ValueError:
                self.options[name] = value
        started = time.perf_counter()
        self.engine = ProbedEngine(**self.options)
        self.start_seconds = time.perf_counter() - started

    def generate(self, requests: int, tokens: int, seed: int) -> None:
        """Greedy answers of `tokens` tokens to this many random prompts at once."""
        prompts = np.random.default_rng(seed).integers(2, self.vocabulary, (requests, self.context)).tolist()
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self.engine.generate(input_ids=prompts, sampling_params=params)

    def ask(self, do: str, eager: bool = False) -> Any:
        """Call the probe; returns what it writes, if anything."""
        out = self.folder / "answer.json"
        self.engine.collective_rpc("verify_step", do=do, out=str(out), eager=eager)
        return json.loads(out.read_text())

    def outcome(self) -> dict[str, Any] | None:
        """What patch eagle-verify-cuda-graph tells, None where it or provenance is off."""
        states = self.engine.get_server_info()["internal_states"]
        told: dict[str, Any] = states[0].get("sglang_patches", {}).get("outcomes", {})
        return told.get("eagle-verify-cuda-graph")


def measure(bench: Bench, sizes: list[int], rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Cycles of every size and mode, interleaved; round 0 is warm-up."""
    taken = []
    for turn in range(rounds + 1):
        for size in sizes:
            for mode in MODES if turn % 2 == 0 else MODES[::-1]:
                bench.ask("begin", eager=mode == "eager")
                bench.generate(size, 8 if turn == 0 else tokens, seed=turn)
                cycles = [cycle for cycle in bench.ask("take") if cycle["batch_size"] == size]
                taken.append({"round": turn, "batch_size": size, "mode": mode, "cycles": cycles})
                print(f"round {turn} batch {size} {mode}: {len(cycles)} cycles", flush=True)
    return taken


def measure_busy(bench: Bench, sizes: list[int], tokens: int) -> list[dict[str, Any]]:
    """The profiler's share: how long the GPU works in a cycle; an entry has ``error`` where it cannot tell."""
    taken = []
    for size in sizes:
        for mode in MODES:
            entry: dict[str, Any] = {"batch_size": size, "mode": mode}
            try:
                bench.ask("begin", eager=mode == "eager")
                bench.ask("profile_start")
                bench.generate(size, tokens, seed=size)
                entry.update(bench.ask("profile_stop"))
            except Exception as error:  # the profiler's library may be missing: the rest of the run still counts
                entry["error"] = f"{type(error).__name__}: {error}"
            taken.append(entry)
            print(f"profile {entry}", flush=True)
    return taken


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per batch size and mode: median ms of each column, and the 10th and 90th percentile of the cycle."""
    rows = []
    keys = sorted(
        {(entry["batch_size"], entry["mode"]) for entry in samples}, key=lambda key: (key[0], key[1] != "graph")
    )
    for size, mode in keys:
        cycles = [
            cycle
            for entry in samples
            if entry["round"] > 0 and (entry["batch_size"], entry["mode"]) == (size, mode)
            for cycle in entry["cycles"]
        ]
        row: dict[str, Any] = {"batch_size": size, "mode": mode, "cycles": len(cycles)}
        if cycles:
            row |= {name: float(np.median([cycle[name] for cycle in cycles])) for name in COLUMNS}
            row["p10"], row["p90"] = (float(x) for x in np.quantile([cycle["cycle"] for cycle in cycles], [0.1, 0.9]))
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], busy: list[dict[str, Any]]) -> str:
    """The rows as Markdown; milliseconds."""
    works = {(entry["batch_size"], entry["mode"]): entry.get("busy") for entry in busy}
    lines = [
        "| batch | path | draft decode | verify | draft extend | host gap | cycle | p10-p90 | GPU busy | cycles |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        work = works.get((row["batch_size"], row["mode"]))
        told = " | ".join(f"{row[name]:.2f}" if name in row else "-" for name in COLUMNS)
        spread = f"{row['p10']:.2f}-{row['p90']:.2f}" if "p10" in row else "-"
        lines.append(
            f"| {row['batch_size']} | {row['mode']} | {told} | {spread} | {'-' if work is None else f'{work:.2f}'} | "
            f"{row['cycles']} |"
        )
    return "\n".join(lines)


def code_state() -> dict[str, Any]:
    """What these figures were made with."""
    import torch
    from sglang import __version__

    state: dict[str, Any] = {"sglang": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        state["gpu"] = torch.cuda.get_device_name()
        state["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, check=False)
        state["nvidia_smi"] = asked.stdout.strip()
    try:
        from sglang_patches.provenance import code_state as patches

        state["sglang_patches"] = patches()
    except Exception as error:  # upstream alone can be measured too
        state["sglang_patches"] = str(error)
    state["environment"] = {k: v for k, v in os.environ.items() if k.startswith(("SGLANG", "NCCL", "CUDA", "TORCH"))}
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for cycles.json and table.md")
    parser.add_argument("--sizes", default="1,2,4,8,16", help="batch sizes to time (default 1,2,4,8,16)")
    parser.add_argument("--requests", type=int, default=16, help="--max-running-requests (default 16)")
    parser.add_argument("--captured", type=int, default=4, help="largest batch that upstream captures (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per request and round (default 48)")
    parser.add_argument("--context", type=int, default=64, help="prompt tokens (default 64)")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--model", default="", help="a checkpoint instead of the shard (with --draft)")
    parser.add_argument("--draft", default="")
    parser.add_argument("--vocabulary", type=int, default=20000, help="prompt token ids are below this")
    parser.add_argument("--no-profile", action="store_true", help="leave the column GPU busy out")
    parser.add_argument("server", nargs="*", help="more server arguments: name=value, JSON values")
    arguments = parser.parse_args()
    defaults = [f"attention_backend={arguments.attention_backend}"]
    if "device=cpu" not in arguments.server:
        defaults += [f"cuda_graph_max_bs_decode={arguments.captured}", "cuda_graph_bs_prefill=[64,128]"]
        defaults += ["mem_fraction_static=0.7"]
    arguments.server = [*defaults, *arguments.server]
    sizes = [int(size) for size in arguments.sizes.split(",")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        print(f"started in {bench.start_seconds:.1f} s", flush=True)
        bench.generate(1, 16, seed=0)
        at_start = bench.outcome()
        for size in range(1, arguments.requests + 1):
            bench.generate(size, 8, seed=size)
        swept = bench.outcome()
        print("counters after batches of every size:", json.dumps(swept), flush=True)
        result: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "code_state": code_state(),
            "options": bench.options,
            "start_seconds": bench.start_seconds,
            "outcome_after_warm_up": at_start,
            "outcome_after_every_size": swept,
            "samples": measure(bench, sizes, arguments.rounds, arguments.tokens),
        }
        result["summary"] = summary(result["samples"])
        result["outcome_at_end"] = bench.outcome()
        write(arguments.out, result, [])  # a run that is cut short while profiling still has its figures
        if not arguments.no_profile:
            result["busy"] = measure_busy(bench, [sizes[0], sizes[-1]], 24)
            write(arguments.out, result, result["busy"])
        bench.engine.shutdown()


def write(folder: Path, result: dict[str, Any], busy: list[dict[str, Any]]) -> None:
    """Write cycles.json and table.md, and print the table."""
    (folder / "cycles.json").write_text(json.dumps(result) + "\n")
    text = table(result["summary"], busy)
    (folder / "table.md").write_text(text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
