"""Patch ``cpu-quick-start``: without a GPU, FlashInfer is not imported.

Upstream asks ``is_flashinfer_available`` before it imports FlashInfer, and that says no where there is no CUDA. Four
modules for FP4 and expert parallelism, which every process of a server imports, do not ask but try. FlashInfer then
brings CUTLASS' Python DSL and MLIR along: 1.4 s of processor time in each process, for kernels that only a GPU has.
"""

from __future__ import annotations

import torch


def wants_flashinfer() -> None:
    """Return where FlashInfer can be of use.

    Raises:
        ImportError: there is no GPU here; upstream does without, as where FlashInfer is not installed.
    """
    if not torch.cuda.is_available():
        raise ImportError("no GPU for FlashInfer to run on")
