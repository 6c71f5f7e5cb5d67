"""Experts that a verify loads, and how long it takes, against k0: a TP-8 rank's share of Kimi-K2.5 on one GPU.

    python -m benchmark.oea.vs_k0 --out benchmark/results/NAME/vs-k0.json                 # about 1 minute for each k0
    python -m benchmark.oea.vs_k0 --out FILE --k0 8,4 --rounds 2

One engine for each k0, in turn, then in reverse for each further round; 8 is the model's top-k, so upstream's own code.
Verifies have 2, 4, 8 and 16 tokens: 1, 2, 4 and 8 requests of a chain of 2. Tokens are random and weights too, so that
tokens agree about experts no more than chance has it; those of a text agree more, and then there is less to gain.
Written after every engine. Exit code: 0 all was measured, 1 an engine failed, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sglang_patches import provenance, selection
from sglang_patches.bench.folder import replace

REQUESTS = (1, 2, 4, 8)
# With upstream's verify attention most of a verify would be that, whatever k0.
PATCHES = "+oea-topk,+mla-verify-split-kv"


def engine(k0: int, out: Path) -> None:
    """One engine with this k0; to run in a process of its own. Writes its batches and the patch's outcome."""
    from sglang.srt.entrypoints.engine import Engine as Upstream

    from benchmark.oea.inside import run_scheduler
    from sglang_patches.bench import shard
    from sglang_patches.nccl.provenance import whole

    class Measured(Upstream):
        run_scheduler_process_func = staticmethod(run_scheduler)

    with tempfile.TemporaryDirectory() as folder:
        target, draft = shard.write(Path(folder))
        answer = Path(folder) / "answer.json"
        served = Measured(
            model_path=str(target), speculative_draft_model_path=str(draft), speculative_algorithm="EAGLE3",
            speculative_num_steps=1, speculative_eagle_topk=1, speculative_num_draft_tokens=2, load_format="dummy",
            attention_backend="triton", cuda_graph_max_bs_decode=max(REQUESTS), max_running_requests=max(REQUESTS),
            context_length=4096, mem_fraction_static=0.7, skip_tokenizer_init=True, disable_radix_cache=True,
            grammar_backend="none", random_seed=0, log_level="warning",
        )  # fmt: skip
        batches = []
        for requests in REQUESTS:
            served.collective_rpc("oea", requests=requests, out=str(answer))
            batches.append(json.loads(answer.read_text()))
        state = served.get_server_info()["internal_states"][0].get("sglang_patches", {})
        served.shutdown()
    told = {"k0": k0, "batches": batches, "outcome": state.get("outcomes", {}).get("oea-topk"), "provenance": whole()}
    out.write_text(json.dumps(told))


def summary(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each count of tokens and k0, over everything measured with it."""
    rows = []
    for at, _ in enumerate(REQUESTS):
        for k0 in dict.fromkeys(one["k0"] for one in engines):
            batches = [one["batches"][at] for one in engines if one["k0"] == k0]
            ms = np.concatenate([np.ravel(batch["ms"]) for batch in batches])
            loaded = np.concatenate([np.ravel(batch["experts"]) for batch in batches])
            low, middle, high = (float(value) for value in np.quantile(ms, [0.1, 0.5, 0.9]))
            rows.append({"tokens": batches[0]["tokens"], "k0": k0, "experts_a_layer": float(loaded.mean()),
                         "verify_ms": middle, "verify_ms_p10": low, "verify_ms_p90": high})  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| tokens | k0 | experts a layer loads | verify, ms | p10-p90 |", "|---|---|---|---|---|"]
    return lines + [
        f"| {row['tokens']} | {row['k0']} | {row['experts_a_layer']:.1f} | {row['verify_ms']:.3f} "
        f"| {row['verify_ms_p10']:.3f}-{row['verify_ms_p90']:.3f} |"
        for row in rows
    ]


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--k0", default="8,6,4,3,2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        engine(given.one, given.out)
        return 0
    if not selection.has_gpu():
        print("vs_k0: no GPU here\n  remedy     run it on a machine with one", file=sys.stderr)
        return 2
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.oea.vs_k0", *sys.argv[1:]],
        "code_state": provenance.code_state(),
        "engines": [],
    }
    failed, order = False, [int(k0) for k0 in given.k0.split(",")]
    for number in range(given.rounds):
        for k0 in order if number % 2 == 0 else reversed(order):
            part = given.out.with_suffix(".part")
            environ = os.environ | {"SGLANG_PATCHES": PATCHES, "SGLANG_PATCHES_OEA_K0": str(k0)}
            environ["SGLANG_PATCHES_OEA_TOKENS"] = "1-64"
            command = [sys.executable, "-m", "benchmark.oea.vs_k0", "--out", str(part), "--one", str(k0)]
            if subprocess.run(command, env=environ, timeout=900, check=False).returncode or not part.exists():
                print(f"vs_k0: the engine with k0={k0} failed", file=sys.stderr)
                failed = True
                continue
            result["engines"].append(json.loads(part.read_text()))
            part.unlink()
            result["summary"] = summary(result["engines"])
            replace(given.out, json.dumps(result) + "\n")
            print("\n".join(table(result["summary"])), flush=True)
    return 1 if failed or not result["engines"] else 0


if __name__ == "__main__":
    sys.exit(main())
