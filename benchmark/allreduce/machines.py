"""Where the steps of `benchmark.allreduce.stress` run: on GPUs, or on the CPU to try them out."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from sglang_patches.nccl.bindings import Communicator, Nccl
from sglang_patches.runtime.pcie_nccl_allreduce.guard import Guard

TIMED_ROWS, TIMED_CALLS, WARMUPS, REPLAYS = (1, 2, 4, 8, 16, 32, 64), 50, 5, 40


class Captured:
    """A captured chain: `buffer` becomes `source`, then `calls` times the mean over the ranks; replayed by `replay`.

    The mean of means is the first one, so the result is right only if every all-reduce of the chain was.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.source = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.buffer = torch.zeros_like(self.source)
        self.replay: Callable[[], None] = lambda: None

    def body(self, all_reduce: Callable[[torch.Tensor], None], calls: int, world: int) -> None:
        """What is captured."""
        self.buffer.copy_(self.source)
        for _ in range(calls):
            all_reduce(self.buffer)
            self.buffer.div_(world)

    def bare(self, all_reduce: Callable[[torch.Tensor], None], calls: int, _world: int) -> None:
        """The all-reduces alone, of zeros: what is timed."""
        for _ in range(calls):
            all_reduce(self.buffer)


class Gloo:
    """The ranks on the CPU: all-reduces are gloo's, a "graph" is run as it stands, and there is one stream."""

    guard: Guard | None = None

    def __init__(self, rank: int, store: dist.Store, options: argparse.Namespace) -> None:
        self.world, self.hidden, self.device = options.ranks, options.hidden, torch.device("cpu")
        self.versions: dict[str, Any] = {"torch": torch.__version__}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host; its name need not resolve
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place on the graphs' communicator."""
        dist.all_reduce(tensor)

    def capture(self, rows: int, calls: int, bare: bool = False) -> Captured:
        """A chain of `calls` all-reduces of [rows, hidden]; collective."""
        made = Captured((rows, self.hidden), self.device)
        body = made.bare if bare else made.body
        made.replay = lambda: body(self.all_reduce, calls, self.world)
        return made

    def side(self) -> AbstractContextManager[Any]:
        """The second stream, as the current one."""
        return contextlib.nullcontext()

    def idle(self) -> None:
        """Wait for all that was issued."""

    def times(self) -> dict[str, list[float]] | None:
        """Rows -> microseconds per all-reduce, one a replay; None where that would say nothing."""
        return None


class Cuda(Gloo):
    """The ranks on GPUs. Guard is told of calls, captures and replays right where the patch's hooks would tell it."""

    def __init__(self, rank: int, store: dist.Store, options: argparse.Namespace) -> None:
        self.world, self.hidden, self.device = options.ranks, options.hidden, torch.device("cuda", rank)
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=self.world)
        nccl = Nccl()
        self.versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl.version()}
        self.versions |= {"nccl_file": str(nccl.file), "gpu": torch.cuda.get_device_name(rank)}
        if rank == 0:
            store.set("graphs", nccl.unique_id().bytes.hex())
        graphs_only = options.mode == "graphs-only"
        shared = bytes.fromhex(store.get("graphs").decode())
        self.communicator = Communicator(nccl, shared, rank, self.world, graphs_only=graphs_only)
        self.guard = Guard(self.communicator) if graphs_only and options.guard else None
        self.second = torch.cuda.Stream()
        first = torch.zeros(1, dtype=torch.bfloat16, device=self.device)
        self.all_reduce(first)  # connects both communicators before any capture or replay
        self.idle()
        dist.all_reduce(first)
        self.idle()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.guard:
            self.guard.before_call()
        self.communicator.all_reduce(tensor, tensor, torch.cuda.current_stream().cuda_stream)

    def capture(self, rows: int, calls: int, bare: bool = False) -> Captured:
        made, graph, stream = Captured((rows, self.hidden), self.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        body = made.bare if bare else made.body
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.all_reduce(made.buffer)  # as upstream's warm-up forward
            # thread_local: ProcessGroupNCCL's watchdog polls events from a thread of its own.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                body(self.all_reduce, calls, self.world)
            if self.guard:
                self.guard.after_capture(graph)

        def replay() -> None:
            if self.guard:
                self.guard.before_replay(graph)
            graph.replay()

        made.replay = replay
        self.idle()
        return made

    def side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.second)

    def idle(self) -> None:
        torch.cuda.synchronize()

    def times(self) -> dict[str, list[float]] | None:
        found: dict[str, list[float]] = {}
        for rows in TIMED_ROWS:
            chain = self.capture(rows, TIMED_CALLS, bare=True)
            for turn in range(WARMUPS + REPLAYS):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                chain.replay()
                end.record()
                end.synchronize()
                if turn >= WARMUPS:
                    found.setdefault(str(rows), []).append(round(begin.elapsed_time(end) * 1000 / TIMED_CALLS, 3))
        return found
