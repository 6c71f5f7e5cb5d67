"""``python -m sglang_patches.doctor.probe``: imports torch and sgl_kernel as a server does and prints what was loaded.

A process of its own, because these imports take seconds, start CUDA, and may end the process that tries them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Of NVIDIA's fat binaries (fatbinary_section.h names the container; the layout of entries is what cuobjdump lists).
_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX, _CUBIN = 1, 2


def archs(file: Path) -> tuple[list[int], list[int]]:
    """SM numbers of the machine code and of the PTX in a library, sorted; both empty where it has none."""
    data, found, at = file.read_bytes(), set(), 0
    while (at := data.find(_MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4) if at + 16 <= len(data) else (0, 0, 0)
        entry, end = at + header, at + header + size
        at += 4
        if (version, header) != (1, 16):
            continue
        while entry + 32 <= min(end, len(data)):
            kind, _, length = struct.unpack_from("<HHI", data, entry)
            (payload,) = struct.unpack_from("<Q", data, entry + 8)
            if kind not in (_PTX, _CUBIN) or length < 32:
                break
            found.add((kind, struct.unpack_from("<I", data, entry + 28)[0]))
            entry += length + payload
    return tuple(sorted(arch for kind, arch in found if kind == wanted) for wanted in (_CUBIN, _PTX))  # type: ignore[return-value]


def _kernels() -> dict[str, Any]:
    from sglang_patches.document import collect

    try:
        package = import_module("sgl_kernel").__file__
    except BaseException as error:  # a library may raise anything when it does not load
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]}
    native = [file for file in collect.mapped() if os.path.basename(file).startswith("common_ops.")]
    if not native:
        return {"file": package}
    code, ptx = archs(Path(native[0]))
    return {"file": native[0], "archs": code, "ptx": ptx}


def _start_cuda(torch: Any) -> str | None:
    """Why CUDA does not start in this process; None where it does."""
    try:
        torch.cuda.init()
    except Exception as error:  # torch's own kinds differ by cause
        return (str(error).strip().splitlines() or [repr(error)])[0][:300]
    return None


def main() -> None:
    """Print one line of JSON: `cuda` (empty for a build without), `cuda_problem`, `nccl`, `kernels`."""
    from sglang_patches import selection
    from sglang_patches.document import collect
    from sglang_patches.nccl.bindings import Nccl, NcclError

    # What libraries print is not the answer, neither now nor when the process ends, behind all that Python wrote.
    answer = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        torch = import_module("torch")
        cuda = torch.version.cuda or ""
        if cuda:
            # As upstream's pynccl does (distributed/device_communicators/pynccl_wrapper.py).
            with contextlib.suppress(OSError):
                ctypes.CDLL(os.environ.get("SGLANG_NCCL_SO_PATH") or "libnccl.so.2")
        problem = _start_cuda(torch) if cuda and selection.has_gpu() else None
        kernels = _kernels() if find_spec("sgl_kernel") else {"error": "sgl_kernel is not installed"}
        nccl = []
        for file in collect.mapped():
            if os.path.basename(file).startswith("libnccl.so"):
                version = None
                with contextlib.suppress(NcclError, OSError, AttributeError):
                    version = Nccl(Path(file)).version()
                nccl.append({"path": file, "version": version})
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps({"cuda": cuda, "cuda_problem": problem, "nccl": nccl, "kernels": kernels}) + "\n")


if __name__ == "__main__":
    main()
