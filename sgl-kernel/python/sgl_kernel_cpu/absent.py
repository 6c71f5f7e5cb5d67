"""What this build does not provide: importable where SGLang imports it, an error that names it where it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

_EVERY_RELEASE = ("allreduce", "metal", "rmsnorm", "scalar_type")
# By upstream release: imports that SGLang tries, with a fallback of its own when they fail, so they must not resolve.
PROBED_BY = {
    "0.5.23": frozenset(
        {*_EVERY_RELEASE, "kvcacheio.get_device_accessible_ptr", "kvcacheio.transfer_embedding_ranges_direct"}
    ),
    "0.5.17": frozenset(
        {
            *_EVERY_RELEASE,
            "awq_dequantize",
            "causal_conv1d_fwd",
            "causal_conv1d_update",
            "gptq_gemm",
            "gptq_shuffle",
        }
    ),
}
# No release needs to import what another one probes.
PROBED = frozenset().union(*PROBED_BY.values())


class NotProvided:
    """Stands for one function of ``sgl_kernel`` that the CPU build lacks.

    Raises:
        NotImplementedError: when called.
        AttributeError: when an attribute is read, so that feature probes see nothing.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def _message(self) -> str:
        return (
            f"{self.__name__} is not provided by the CPU build of sgl_kernel: it needs a CUDA GPU and the "
            f"sglang-kernel wheel. Run on a machine with a GPU, or choose options that do not use it "
            f"(CPU: --attention-backend torch_native --sampling-backend pytorch, an unquantized model)."
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(self._message())

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"no attribute {attribute!r}: {self._message()}")

    def __repr__(self) -> str:
        return f"<{self.__name__}: not provided by the CPU build>"


def module_getattr(submodule: str) -> Callable[[str], NotProvided]:
    """Make the ``__getattr__`` (PEP 562) of the package (``""``) or of one of its submodules (``"mamba"``)."""

    def __getattr__(name: str) -> NotProvided:
        path = f"{submodule}.{name}".lstrip(".")
        if name.startswith("_") or path in PROBED:
            raise AttributeError(f"the CPU build of sgl_kernel has no {path!r}")
        return NotProvided(f"sgl_kernel.{path}")

    return __getattr__
