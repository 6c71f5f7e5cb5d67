"""Triton's launch path on a GPU that is not here: its own front end and launcher, down to the native launch.

Kernels are chosen by Triton itself for an sm_90; what would be compiled, loaded and launched is noted instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

CONSTANT = tl.constexpr(4)

Native = tuple[Any, ...]
# What the native launch takes, and which of it nobody reads where there are no hooks.
FIELDS = 16
HOOKS = slice(8, 11)


class Argument(NamedTuple):
    nested_tuple: Any
    type: Any


class Gpu:
    """A driver as Triton's for CUDA, less the GPU. Attributes: `launched`, `device` and `stream` that are current."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.launched: list[Native] = []
        self.kernels: list[CompiledKernel] = []
        self.device, self.stream = 0, 7
        self.handles = itertools.count(1)
        self.utils = SimpleNamespace(
            launch=lambda *given: self.launched.append(given),
            build_signature_metadata=lambda signature: ",".join(signature).encode(),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, binary, shared, device: (object(), next(self.handles), 16, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + 100 * device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compiled(self, source: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> CompiledKernel:
        """In place of ``triton.compile``, which takes a second: a kernel of no code, with Triton's own launcher."""
        kernel = object.__new__(CompiledKernel)
        kernel.src, kernel.name, kernel.module = source, source.name, None
        kernel.metadata = SimpleNamespace(
            num_ctas=1,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=options["launch_cooperative_grid"],
            launch_pdl=options["launch_pdl"],
            shared=0,
            num_warps=options["num_warps"],
        )
        kernel.packed_metadata = (options["num_warps"], 1, 0)
        kernel.kernel, kernel.metadata_group, kernel.hash = b"", {}, ""
        kernel.function, kernel._run = None, None
        self.kernels.append(kernel)
        return kernel

    def really_compiled(self, *given: Any, **options: Any) -> CompiledKernel:
        self.kernels.append(triton.compile(*given, **options))
        return self.kernels[-1]

    def by(self, launch: Callable[[], Any]) -> tuple[Any, list[Native]]:
        """What `launch` gives, or the type of what it raises, and what it launches."""
        begun = len(self.launched)
        try:
            given = launch()
        except Exception as error:
            given = type(error)
        return given, self.launched[begun:]


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, *, compiles: bool = False) -> Iterator[Gpu]:
    """Triton's active driver while it lasts. Args: `compiles`, kernels are compiled, by the ptxas that Triton has."""
    made = Gpu()
    monkeypatch.setattr(nvidia, "PyKernelArg", Argument)
    monkeypatch.setattr(triton.compiler, "compile", made.really_compiled if compiles else made.compiled)
    before = driver._active
    driver.set_active(made)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        # Kernels go when Python pleases, and would ask the driver of then to unload them.
        for kernel in made.kernels:
            kernel.module = None
        driver._active = before


def less_hooks(native: Native) -> Native:
    assert len(native) == FIELDS
    return (*native[: HOOKS.start], *native[HOOKS.stop :])


# Their bodies are read only where they are compiled.


def several(a, b, n, m, x, pair, W: tl.constexpr, KIND: tl.constexpr = "sum", last=None):  # type: ignore[no-untyped-def]
    tl.store(a, tl.load(b) + n)


def doubled(value):  # type: ignore[no-untyped-def]
    return value * 2


def with_global(a, n):  # type: ignore[no-untyped-def]
    tl.store(a, n * CONSTANT)
