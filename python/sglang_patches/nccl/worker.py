"""One rank of a measurement, in a process of its own: NCCL reads its settings once a process.

``python -m sglang_patches.nccl.worker JOB RANK`` prints ``ready`` when its imports are done, waits for a line on
standard input, and then does what the JSON file JOB says (`group.Job`), writing to ``rank<RANK>.json`` beside it.
Needs torch and NumPy, nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_patches.nccl.paths import AllReduce, CannotRun, Place, path_class

_PR_SET_PDEATHSIG = 1
_TIMEOUT_NEVER = 10**6  # seconds; the parent decides when it has waited long enough
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def c_environment(prefix: str = "NCCL_") -> dict[str, str]:
    """The variables as C's getenv sees them: os.environ is a copy made when Python started."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = {}
    index = 0
    while entries[index]:
        name, _, value = entries[index].decode(errors="replace").partition("=")
        if name.startswith(prefix):
            found.setdefault(name, value)  # getenv takes the first
        index += 1
    return found


def python_environment(prefix: str = "NCCL_") -> dict[str, str]:
    """The variables as Python code sees them."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def inputs(seed: int, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The random data that a rank contributes: on the CPU, the same wherever it is computed."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def wrongness(summed: torch.Tensor, seed: int, place: Place) -> float:
    """How far a result is from the exact sum, in units of what rounding may explain: above 1 it is wrong.

    Each of the world - 1 additions, in any order, rounds a partial sum no larger than the sum of the magnitudes by at
    most half a unit in the last place; twice that is allowed. NaN (also an element never written) counts as infinite.
    """
    parts = [
        inputs(seed, rank, (summed.shape[0], summed.shape[1]), place.dtype).double() for rank in range(place.world)
    ]
    exact = torch.stack(parts).sum(0)
    magnitude = torch.stack(parts).abs().sum(0)
    allowed = (place.world - 1) * torch.finfo(place.dtype).eps * magnitude + 1e-30
    ratio = ((summed.cpu().double() - exact).abs() / allowed).max().item()
    return float("inf") if ratio != ratio else float(ratio)


class Measure:
    """Checks and times one path on one rank."""

    def __init__(self, job: dict[str, Any], place: Place, path: AllReduce) -> None:
        self.job, self.place, self.path = job, place, path

    def size(self, rows: int) -> dict[str, Any]:
        """Check and time one size.

        Returns:
            ``us`` (microseconds per all-reduce, one a replay) and ``wrong`` (see `wrongness`, the worst of the checks),
            or ``skipped`` with the reason.
        """
        place, seed = self.place, self.job["seed"] * 131 + rows
        source = inputs(seed, place.rank, (rows, place.hidden), place.dtype).to(place.device)
        if reason := self.path.why_not(source):
            return {"skipped": reason}
        out = torch.full_like(source, float("nan"))
        wrong = [wrongness(self.path(source, out), seed, place)]  # eager; also connects NCCL before any capture
        if place.device.type == "cuda" and self.path.in_graphs:
            times, summed = self._graph(source, out, wrong, seed)
        else:
            times, summed = self._eager(source, out)
        wrong.append(wrongness(summed, seed, place))
        return {"us": [round(value, 3) for value in times], "wrong": max(wrong)}

    def _graph(
        self, source: torch.Tensor, out: torch.Tensor, wrong: list[float], seed: int
    ) -> tuple[list[float], torch.Tensor]:
        calls, graph = self.job["calls"], torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        summed = out
        # thread_local: torch's own NCCL groups, where a path has one, poll events from a thread of theirs.
        with self.path.capturing(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                summed = self.path(source, out)
        summed.fill_(float("nan"))
        graph.replay()
        wrong.append(wrongness(summed, seed, self.place))
        dist.barrier()
        # All replays are queued without waiting, so that ranks stay in step and no host time is in the figures.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.job["replays"] + 1)]
        for _ in range(self.job["warmups"]):
            graph.replay()
        summed.fill_(float("nan"))
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) * 1000 / calls for a, b in itertools.pairwise(events)]
        return times, summed

    def _eager(self, source: torch.Tensor, out: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        synchronize: Callable[[], None] = torch.cuda.synchronize if source.is_cuda else lambda: None
        calls, summed, times = self.job["calls"], out, []
        dist.barrier()
        for replay in range(self.job["warmups"] + self.job["replays"]):
            out.fill_(float("nan"))
            synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                summed = self.path(source, out)
            synchronize()
            if replay >= self.job["warmups"]:
                times.append((time.perf_counter() - started) * 1e6 / calls)
        return times, summed


class Report:
    """What this rank has found so far, always whole on disk, so that a kill loses nothing that was measured."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = {"sizes": {}, "pid": os.getpid()}

    def save(self, **news: Any) -> None:
        """Add and write."""
        self.found.update(news)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.found))
        new.replace(self.file)


def work(job: dict[str, Any], rank: int, report: Report) -> None:
    """Join the group, make each path of the job, and check and time it at every size."""
    world, cuda = job["world"], job["backend"] == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host; its name need not resolve
    store = dist.FileStore(str(Path(job["folder"]) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    place = Place(rank, world, device, job["hidden"], tuple(job["rows"]), _DTYPES[job["dtype"]])
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if cuda:
        from sglang_patches.nccl.bindings import Nccl

        nccl = Nccl()
        versions |= {"nccl": nccl.version(), "nccl_file": str(nccl.file), "gpu": torch.cuda.get_device_name(rank)}
    report.save(python_environment=python_environment(), c_environment=c_environment(), versions=versions)
    for name in job["paths"]:
        path, reason = None, ""
        try:
            path = path_class(name)(place)
        except CannotRun as error:
            reason = str(error)
        reasons: list[str] = [""] * world
        dist.all_gather_object(reasons, reason)
        cannot = {f"rank {index}": text for index, text in enumerate(reasons) if text}
        if cannot or path is None:
            report.save(cannot_run={**report.found.get("cannot_run", {}), name: next(iter(cannot.values()))})
            continue
        measure = Measure(job, place, path)
        for rows in place.rows:
            sizes = report.found["sizes"]
            sizes.setdefault(name, {})[str(rows)] = measure.size(rows)
            report.save()
        dist.barrier()
        path.close()
    # Again: NCCL reads its configuration files into the environment when it starts.
    report.save(done=True, c_environment_after=c_environment())
    dist.destroy_process_group()


def main() -> None:
    """Run as a process: see the module."""
    file, rank = Path(sys.argv[1]), int(sys.argv[2])
    # Whatever ends the parent, ends this: a rank left alone would hold its GPU for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    print("ready", flush=True)
    os.dup2(2, 1)  # nobody reads the pipe any more, and what a library prints must not fill it
    if not sys.stdin.readline():
        return
    job = json.loads(file.read_text())
    report = Report(file.with_name(f"rank{rank}.json"))
    code = 0
    try:
        work(job, rank, report)
    except Exception:
        traceback.print_exc()
        code = 1
    # Not the interpreter's own end: destructors (a path's, those of gloo's threads) must turn neither a good
    # measurement into a crash or a hang, nor an error that has been told into a signal.
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # NCCL's log
    os._exit(code)


if __name__ == "__main__":
    main()
