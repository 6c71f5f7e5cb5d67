"""Mixes prefill-, decode-, verify- and draft-like all-reduces on two or more GPUs and checks every sum.

    NCCL_P2P_DISABLE=1 NCCL_MIN_NCHANNELS=16 python -m benchmark.allreduce.stress --steps 8000 --out default.json

As in upstream with patch pcie-nccl-allreduce, graphs have a communicator of their own, made for graphs alone or (--mode
mixing) as NCCL makes it, and eager work goes through ProcessGroupNCCL. Some steps break NCCL's rules for a communicator
for graphs alone on purpose: eager calls of it, and replays on a second stream that waits for nothing. There the patch's
own Guard must hold, and --no-guard shows what happens without. Before the steps, captured all-reduces are timed; the
host waits for each replay, so the launch is in the figure (`sglang-patches nccl tune` queues replays instead).

Ends with 0 if every sum was right, 1 if one was not or the ranks did not finish in time, 2 if it could not run.
--break STEP plants a wrong sum, to see that it is found; --backend gloo walks through the steps without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmark.allreduce import machines, steps
from benchmark.allreduce.steps import MOST_RANKS, plan
from sglang_patches.nccl import provenance, topology
from sglang_patches.nccl.bindings import Nccl, NcclError
from sglang_patches.nccl.settings import Settings, without_profile
from sglang_patches.nccl.worker import c_environment
from sglang_patches.runtime.pcie_nccl_allreduce import guard


class CannotRun(RuntimeError):
    """Something that the run needs is not there."""


def work(rank: int, folder: Path, options: argparse.Namespace) -> None:
    """One rank, in a process of its own: writes ``rank<RANK>.json`` into the folder."""
    store = dist.FileStore(str(folder / "store"), options.ranks)
    machine = (machines.Cuda if options.backend == "nccl" else machines.Gloo)(rank, store, options)
    found: dict[str, Any] = {
        "us": machine.times() if options.timing else None,
        **steps.run_steps(machine, rank, options),
    }
    found |= {"versions": machine.versions, "c_environment": c_environment()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # Through the store, not a collective: a rank that leaves first must not break what another still waits in.
    store.set(f"done{rank}", "")
    store.wait([f"done{other}" for other in range(options.ranks)])
    sys.stdout.flush()
    os._exit(0)  # the graphs still hold the communicator; taking both down is not what is tested


def possible(options: argparse.Namespace) -> None:
    """Raises CannotRun, with what is missing, where the ranks could not start."""
    if options.backend == "gloo":
        return
    seen = torch.cuda.device_count()
    if seen < options.ranks:
        raise CannotRun(
            f"{options.ranks} ranks need as many GPUs, one each\n  seen       {seen}\n"
            f"  expected   at least {options.ranks}\n"
            "  remedy     run it on a host that has them (see CUDA_VISIBLE_DEVICES), or try it out with --backend gloo"
        )
    nccl = Nccl()
    if options.mode == "graphs-only" and not nccl.has_graphs_only():
        raise CannotRun(
            f"NCCL {nccl.version()} makes no communicator for graphs alone\n  seen       {nccl.file}\n"
            "  expected   NCCL 2.29 or later\n  remedy     --mode mixing, or name a newer one in SGLANG_NCCL_SO_PATH"
        )


def run_ranks(options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """What each rank found; None if they did not finish within --timeout, and are killed then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = mp.spawn(work, args=(folder, options), nprocs=options.ranks, join=False)
        end = time.monotonic() + options.timeout
        try:
            while not ranks.join(timeout=max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    return None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(options.ranks)]


def document(options: argparse.Namespace, settings: Settings, ranks: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The result, JSON-able, with what made it."""
    files = [Path(str(module.__file__)) for module in (sys.modules[__name__], machines, steps, guard)]
    made_by = provenance.document(settings, topology.read(), ranks[0]["versions"] if ranks else {})
    made_by["command"] = ["python", "-m", "benchmark.allreduce.stress", *sys.argv[1:]]
    made_by["sources_sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {
        "format": 1,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": ranks is not None,
        "wrong": sum(sum(rank["wrong"].values()) for rank in ranks or ()),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "ranks": ranks,
        "provenance": made_by,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmark.allreduce.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help=f"2 to {MOST_RANKS}, one a GPU (default 2)")
    parser.add_argument(
        "--mode", choices=["graphs-only", "mixing"], default="graphs-only", help="the graphs' communicator"
    )
    parser.add_argument("--steps", type=int, default=8000, help="0: time only (default 8000)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan of steps (default 1)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of each bfloat16 tensor (default 7168)")
    parser.add_argument("--no-guard", dest="guard", action="store_false", help="nothing keeps NCCL's rules")
    parser.add_argument("--no-timing", dest="timing", action="store_false", help="the steps only")
    parser.add_argument(
        "--break", dest="broken", type=int, metavar="STEP", help="the last rank adds too much at this step"
    )
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl", help="gloo: on the CPU, to try it out")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the ranks (default 300)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    if not 2 <= options.ranks <= MOST_RANKS:
        parser.error(f"--ranks {options.ranks}: expected 2 to {MOST_RANKS}")
    if options.broken is not None:
        kinds = [step.kind for step in plan(options.steps, options.seed)]
        if not 0 <= options.broken < len(kinds) or kinds[options.broken] == "cancel":
            parser.error(f"--break {options.broken}: expected a step of the {options.steps} that sums (0 is the first)")
    return options


def main() -> int:
    """Run it; returns the exit status, see the module."""
    options = parse()
    settings = without_profile()
    os.environ.update(settings.environment)  # what upstream's workers get
    try:
        possible(options)
        ranks = run_ranks(options)
    except (CannotRun, NcclError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"stress: {error}", file=sys.stderr)
        return 2
    result = document(options, settings, ranks)
    if options.out:
        options.out.write_text(json.dumps(result) + "\n")
    if ranks is None:
        print(f"stress: the ranks did not finish within {options.timeout:g} s: they hang, or --timeout is too short")
        return 1
    for index, rank in enumerate(ranks):
        times = {rows: round(statistics.median(us), 2) for rows, us in (rank["us"] or {}).items()}
        print(f"rank {index}: {rank['seconds']} s, checked {rank['checked']}, wrong {rank['wrong']}, "
              f"guard {rank['guard']}, us per all-reduce by rows {times}")  # fmt: skip
    print(f"{result['wrong']} wrong sums")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
