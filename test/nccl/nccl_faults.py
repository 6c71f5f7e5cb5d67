"""All-reduces that go wrong in the ways real ones do; named as ``nccl_faults:Class`` with this folder on PYTHONPATH."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import torch

from sglang_patches.nccl.paths import CannotRun, GlooAllReduce, Place


class _Faulty(GlooAllReduce):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.rank = place.rank


class Hangs(_Faulty):
    """Rank 1 never comes to an all-reduce of more than one row."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.rank == 1 and source.shape[0] > 1:
            time.sleep(3600)
        return super().__call__(source, out)


class Crashes(_Faulty):
    """Rank 1 dies of a signal; rank 0 waits for it."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            print("about to fall", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__call__(source, out)


def start_compiler() -> None:
    """A child that outlives its parent, as ninja and nvcc of flashinfer do; its pid goes to ``$FAULTS_CHILD``."""
    child = subprocess.Popen(["sleep", "3600"])
    Path(os.environ["FAULTS_CHILD"]).write_text(str(child.pid))


class HangsCompiling(_Faulty):
    """Rank 1 waits for a child that never ends."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            start_compiler()
            time.sleep(3600)
        return super().__call__(source, out)


class CrashesCompiling(_Faulty):
    """Rank 1 dies of a signal, and its child lives on."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.rank == 1:
            start_compiler()
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__call__(source, out)


class Raises(_Faulty):
    """Rank 0 raises."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            raise RuntimeError("no such communicator")
        return super().__call__(source, out)


class SumsWrongly(_Faulty):
    """Rank 1 gets one element that is off by 3 %."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        super().__call__(source, out)
        if self.rank == 1:
            flat = out.view(-1)
            flat[flat.abs().argmax()] *= 1.03
        return out


class LeavesOneOut(_Faulty):
    """The last element is never written."""

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        before = out.view(-1)[-1].clone()
        super().__call__(source, out)
        out.view(-1)[-1] = before
        return out


class OnlyOnRankZero(_Faulty):
    """Rank 1 cannot run it, so that no rank may."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if place.rank == 1:
            raise CannotRun("no peer access from rank 1")
