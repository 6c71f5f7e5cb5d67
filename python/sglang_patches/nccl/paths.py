"""Ways to all-reduce, interchangeable under one base class, so that they are checked and timed by the same code.

A further one needs no change here: a candidate may name its class as ``module:Class``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang_patches.nccl.bindings import GRAPHS_ONLY_SINCE, Communicator, Nccl


class CannotRun(Exception):
    """This way to all-reduce cannot run here; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a path runs: one rank of a group whose gloo process group is the default one."""

    rank: int
    world: int
    device: torch.device
    hidden: int
    rows: tuple[int, ...]
    dtype: torch.dtype


class AllReduce(ABC):
    """One way to sum a tensor over all ranks. Making one is collective: every rank does, or every rank fails.

    Raises:
        CannotRun: not on this machine, with these libraries, or for this group.
    """

    #: Whether calls can be captured in a CUDA graph, as decode and verify are.
    in_graphs = True

    @abstractmethod
    def __init__(self, place: Place) -> None: ...

    @abstractmethod
    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Sum contiguous `source` (rows, hidden) over all ranks; returns `out` or a tensor of its own."""

    def capturing(self) -> AbstractContextManager[Any]:
        """Around the capture of a graph that holds calls of this."""
        return nullcontext()

    def why_not(self, source: torch.Tensor) -> str:
        """Why a tensor of this shape cannot go this way; empty if it can. The same on every rank."""
        return ""

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back what it holds; every rank must."""


class NcclAllReduce(AllReduce):
    """``ncclAllReduce`` on a communicator of its own, as upstream's pynccl does."""

    graphs_only = False

    def __init__(self, place: Place) -> None:
        nccl = Nccl()
        if self.graphs_only and not nccl.has_graphs_only():
            since = ".".join(map(str, GRAPHS_ONLY_SINCE))
            raise CannotRun(f"NCCL {nccl.version()} has no communicators for graphs alone; {since} and later have")
        box = [nccl.unique_id().bytes if place.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        self._communicator = Communicator(nccl, box[0], place.rank, place.world, self.graphs_only)

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._communicator.all_reduce(source, out, torch.cuda.current_stream().cuda_stream)
        return out

    def close(self) -> None:
        self._communicator.close()


class GraphsOnlyNcclAllReduce(NcclAllReduce):
    """The same on a communicator made for graphs alone, as a profile with ``graphs_only`` makes the server's."""

    graphs_only = True


class TorchNcclAllReduce(AllReduce):
    """`torch.distributed` over NCCL: what upstream uses outside graphs, on a second communicator."""

    in_graphs = False

    def __init__(self, place: Place) -> None:
        self._group: Any = dist.new_group(backend="nccl")  # torch's own type is wider than its all_reduce takes

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(source)
        dist.all_reduce(out, group=self._group)
        return out


class GlooAllReduce(AllReduce):
    """gloo on the CPU: to run check and tune without a GPU. Its figures say nothing about NCCL."""

    in_graphs = False

    def __init__(self, place: Place) -> None:
        if place.device.type != "cpu":
            raise CannotRun(f"gloo is for --backend gloo, on the CPU; this group runs on {place.device}")

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(source)
        dist.all_reduce(out)
        return out


class CustomAllReduce(AllReduce):
    """Upstream's custom all-reduce, whichever version it picks (`device_communicators/custom_all_reduce.py`)."""

    def __init__(self, place: Place) -> None:
        try:
            from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce
            from sglang.srt.distributed.parallel_state import init_distributed_environment
        except ImportError as error:
            raise CannotRun(f"upstream's custom all-reduce does not import: {error}") from None
        try:
            # It asks upstream's world group which ranks share this host.
            init_distributed_environment(place.world, place.rank, local_rank=place.rank, backend="nccl")
            self._custom = dispatch_custom_allreduce(group=dist.group.WORLD, device=place.device)(
                group=dist.group.WORLD, device=place.device
            )
        except Exception as error:
            raise CannotRun(f"upstream's custom all-reduce does not start: {error!r}") from error
        if self._custom.disabled:
            raise CannotRun("upstream switches its custom all-reduce off here (more than two GPUs without full NVLink)")

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        summed = self._custom.custom_all_reduce(source)
        if summed is None:
            raise RuntimeError(f"upstream's custom all-reduce declined {tuple(source.shape)} after it had accepted it")
        return summed

    def capturing(self) -> AbstractContextManager[Any]:
        return self._custom.capture()

    def why_not(self, source: torch.Tensor) -> str:
        return "" if self._custom.should_custom_ar(source) else "upstream's custom all-reduce declines this size"

    def close(self) -> None:
        self._custom.close()


class PcieIpcAllReduce(AllReduce):
    """flashinfer's PCIe-IPC all-reduce, built and tuned as upstream's `device_communicators/pcie_ipc_ar.py` does."""

    def __init__(self, place: Place) -> None:
        try:
            from flashinfer.comm import PcieIpcAllReduceWorkspace
        except ImportError as error:
            raise CannotRun(f"flashinfer's PCIe-IPC all-reduce does not import: {error}") from None
        try:
            # Its IPC handshake needs a CUDA group, its tuning one on the host: as in upstream.
            group: Any = dist.new_group(backend="nccl")
            self._workspace = PcieIpcAllReduceWorkspace(
                group=group,
                max_numel=max(place.rows) * place.hidden,
                dtype=place.dtype,
                tune_batches=place.rows,
            )
            self._workspace.tune([place.hidden], dtype=place.dtype, tune_group=dist.group.WORLD)
        except Exception as error:
            raise CannotRun(f"flashinfer's PCIe-IPC all-reduce does not start: {error!r}") from error
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream()
        if stream != self._stream:  # one workspace serves one stream; the phases here do not overlap
            self._workspace.rebind_stream()
            self._stream = stream
        return self._workspace.all_reduce(source, out=out)

    def why_not(self, source: torch.Tensor) -> str:
        return "" if self._workspace.supports(source) else "flashinfer's kernels do not support this size"

    def close(self) -> None:
        self._workspace.destroy()


PATHS: dict[str, type[AllReduce]] = {
    "nccl": NcclAllReduce,
    "nccl-graphs-only": GraphsOnlyNcclAllReduce,
    "torch-nccl": TorchNcclAllReduce,
    "custom": CustomAllReduce,
    "pcie-ipc": PcieIpcAllReduce,
    "gloo": GlooAllReduce,
}


def path_class(name: str) -> type[AllReduce]:
    """The class behind a path's name, or behind ``module:Class``.

    Raises:
        ValueError: no such path.
    """
    if name in PATHS:
        return PATHS[name]
    module, colon, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"path {name!r} does not import: {error}") from error
    if not (isinstance(found, type) and issubclass(found, AllReduce)):
        raise ValueError(
            f"no all-reduce path {name!r}\n  known      {', '.join(PATHS)}, or module:Class of a subclass of "
            f"sglang_patches.nccl.paths.AllReduce"
        )
    return found
