"""The NCCL library this process has loaded, called as upstream's pynccl calls it: directly, on the caller's stream.

Through `torch.distributed` a collective runs on a stream of torch's own; upstream's captured decode graphs hold plain
``ncclAllReduce`` calls instead (`distributed/device_communicators/pynccl.py` in 0.5.23), so that is what is timed.
The signatures are those of NCCL's documented C interface (nccl.h), unchanged since NCCL 2.10.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

_UNIQUE_ID_BYTES = 128
_SUM = 0
_DATA_TYPES = {"torch.float16": 6, "torch.float32": 7, "torch.bfloat16": 9}
_CONFIG_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_GRAPHS_ONLY = 1

#: The first release whose communicators can be made for graphs alone (`graphUsageMode` in ncclConfig_t).
GRAPHS_ONLY_SINCE = (2, 29)


class NcclError(RuntimeError):
    """NCCL is not there, or one of its calls did not succeed."""


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator must share (``ncclUniqueId``)."""

    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)

    @property
    def bytes(self) -> bytes:
        """The 128 bytes to hand to the other ranks."""
        return bytes(self)


def _config_fields() -> list[tuple[str, Any]]:
    pointers = {"netName", "commName"}
    names = [
        "blocking", "cgaClusterSize", "minCTAs", "maxCTAs", "netName", "splitShare", "trafficClass", "commName",
        "collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs", "nChannelsPerNetPeer", "nvlinkCentricSched",
        "graphUsageMode",
    ]  # fmt: skip
    return [(name, ctypes.c_void_p if name in pointers else ctypes.c_int) for name in names]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` up to the field needed here; NCCL takes no more than the size it is told."""

    _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), *_config_fields())


def loaded_library() -> Path:
    """The file of the NCCL this process uses.

    ``SGLANG_NCCL_SO_PATH`` as in upstream, else what `import torch` loaded.

    Raises:
        NcclError: neither is there (a CPU build of torch, say).
    """
    named = os.environ.get("SGLANG_NCCL_SO_PATH")
    if named:
        return Path(named)
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split(maxsplit=5)[-1]
        if Path(file).name.startswith("libnccl.so"):
            return Path(file)
    raise NcclError(
        "no libnccl.so is loaded in this process\n  expected   one, after `import torch`\n"
        "  remedy     install a CUDA build of torch, or name the library in SGLANG_NCCL_SO_PATH"
    )


def names_variable(library: Path, variable: str) -> bool:
    """Whether the library's file holds this name as a C string, which it must to read the variable."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(variable.encode() + b"\0") >= 0


class Nccl:
    """One loaded NCCL library."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or loaded_library()
        self._library = ctypes.CDLL(str(self.file))
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int,
        ]  # fmt: skip
        self._library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
        ]  # fmt: skip
        self._library.ncclAllReduce.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
            ctypes.c_void_p,
        ]  # fmt: skip
        self._library.ncclCommDestroy.argtypes = [ctypes.c_void_p]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns ``ncclResult_t``.

        Raises:
            NcclError: it did not return ncclSuccess; the message has NCCL's own text.
        """
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise NcclError(f"{name} returned {result} ({text}); NCCL_DEBUG=INFO makes NCCL say why")

    def version_code(self) -> int:
        """Of the library really loaded: since NCCL 2.9, 10000 x major + 100 x minor + patch."""
        code = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(code))
        return code.value

    def version(self) -> str:
        """Such as ``2.30.7``."""
        code = self.version_code()
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"

    def has_graphs_only(self) -> bool:
        """Whether a communicator can be made for graphs alone."""
        code = self.version_code()
        return (code // 10000, code // 100 % 100) >= GRAPHS_ONLY_SINCE

    def unique_id(self) -> UniqueId:
        """A new id; one rank makes it and hands its bytes to the others."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return made


class Communicator:
    """A communicator of `world` ranks on the current CUDA device. Collective: every rank makes it together.

    Args:
        graphs_only: promise NCCL that calls are in stream order, also those in graphs (see `GRAPHS_ONLY_SINCE`).
    """

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, world: int, graphs_only: bool = False) -> None:
        self._nccl, self._handle = nccl, ctypes.c_void_p()
        shared = UniqueId.from_buffer_copy(unique_id)
        if not graphs_only:
            nccl.call("ncclCommInitRank", ctypes.byref(self._handle), world, shared, rank)
            return
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, nccl.version_code())
        for name, kind in _config_fields():
            if kind is ctypes.c_int:
                setattr(config, name, _UNDEFINED)
        config.graphUsageMode = _GRAPHS_ONLY
        nccl.call("ncclCommInitRankConfig", ctypes.byref(self._handle), world, shared, rank, ctypes.byref(config))

    def all_reduce(self, source: Any, out: Any, stream: int) -> None:
        """Sum contiguous tensor `source` over all ranks into `out` (same shape and dtype) on a CUDA stream handle."""
        kind = _DATA_TYPES[str(source.dtype)]
        self._nccl.call(
            "ncclAllReduce", source.data_ptr(), out.data_ptr(), source.numel(), kind, _SUM, self._handle, stream
        )

    def close(self) -> None:
        """Destroy it; every rank must."""
        if self._handle:
            self._nccl.call("ncclCommDestroy", self._handle)
            self._handle = ctypes.c_void_p()
