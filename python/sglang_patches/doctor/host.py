"""A host as plain data: all that the checks look at, so that a host can be recorded here and examined elsewhere.

``sglang-patches doctor --record FILE`` writes one, ``--recorded FILE`` reads it in place of the machine. None always
means that the source could not be read; `Host.unread` then says why. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sglang_patches.errors import PatchError
from sglang_patches.nccl.topology import Topology

_STRICT = ConfigDict(extra="forbid")  # a misspelt field of a recorded host would be a check that sees nothing


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of one visible GPU, at the same position as in `Topology.gpus`, which has its name and slot.

    Attributes:
        sm: compute capability as one number, such as 90.
        memory, memory_free: of the GPU, now.
        generation, width: of its PCIe link now; the generation falls while a GPU idles.
        own_generation, own_width: what the GPU itself is capable of, whatever its slot allows.
        performance_state: 0 (busiest clocks) to 15 (idle), as P0 to P15 of nvidia-smi.
    """

    __pydantic_config__ = _STRICT

    sm: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    generation: int | None = None
    width: int | None = None
    own_generation: int | None = None
    own_width: int | None = None
    performance_state: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the driver allows no peer access between positions `a` and `b`, in NVML's words (``nvmlGpuP2PStatus_t``)."""

    a: int
    b: int
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: its number, its CPUs, free memory."""

    number: int
    cpus: tuple[int, ...]
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class Library:
    """One NCCL library that a process which imports torch loads, and the version that it tells itself."""

    path: str
    version: str | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """What `import sgl_kernel` came to in such a process.

    Attributes:
        file: the native library it loaded, or the Python package where it has none (our build for CPUs).
        archs: SM numbers for which that library has machine code; empty where it has none or none can be read.
        ptx: SM numbers of its PTX, which newer GPUs can compile.
        error: of the import.
    """

    file: str | None = None
    archs: tuple[int, ...] = ()
    ptx: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the series and its state, as `sglang-patches status` says."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint, from its ``config.json`` and the headers of its weight files.

    Attributes:
        path: folder or hub name as given.
        here: its files are on this machine.
        problem: why it cannot be served; None where nothing is wrong with it.
        remedy: what to do about its absence or problem; empty: download it (again).
        split, whole: bytes of weights that tensor parallelism divides, and that every rank holds whole.
        kv_split, kv_whole: bytes of KV cache a token, likewise (MLA's latent is whole on every rank).
        kv_heads: key/value heads; with more ranks than these each rank has one all the same. 0: not known, or MLA.
        layers, context_length: from the configuration.
        unread: its files are on this machine, in a form that only a server reads.
    """

    __pydantic_config__ = _STRICT

    path: str
    here: bool = False
    problem: str | None = None
    remedy: str = ""
    split: int = 0
    whole: int = 0
    kv_split: int = 0
    kv_whole: int = 0
    kv_heads: int = 0
    layers: int = 0
    context_length: int = 0
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """What is to be served. `draft_refused` and `draft_warnings` are those of ``sglang-patches draft check``;
    `memory_fraction`, `base_gpu` and `gpu_step` are upstream's ``--mem-fraction-static``, ``--base-gpu-id`` and
    ``--gpu-id-step``, `bind` its ``--host``; `port_seen` and `port_remedy` say why the port is not
    free, and what to do."""

    __pydantic_config__ = _STRICT

    tp: int = 1
    port: int = 30000
    bind: str = "127.0.0.1"
    port_free: bool = True
    port_seen: str = ""
    port_remedy: str = ""
    memory_fraction: float = 0.9
    base_gpu: int = 0
    gpu_step: int = 1
    model: Model | None = None
    draft: Model | None = None
    draft_refused: tuple[str, ...] = ()
    draft_warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """Everything the checks look at.

    Attributes:
        topology: the visible GPUs and their connections.
        gpus: one for each of `topology.gpus`.
        refusals: for pairs without peer access.
        driver_present: an NVIDIA driver is there (device node or libcuda), whether NVML works or not.
        driver, driver_cuda: version of the driver, and the newest CUDA it can run, such as ``13.0``.
        torch_cuda: the CUDA that torch was built for; empty for a build without.
        cuda_problem: why torch could not start CUDA on a machine with GPUs.
        iommu: ``off``, ``identity`` (addresses pass unchanged) or ``translated``.
        acs: ports of PCIe switches with several GPUs that send peer traffic up to the root (ACS redirect).
        driver_options: options of the kernel module that concern peer access, where set.
        container: kind of container or its image; None for none.
        cpus: that this process may use.
        nodes: NUMA nodes; `numa_balancing`: the kernel migrates pages between them by itself.
        memory_available: host memory, within the container's limit.
        shm, shm_free: /dev/shm.
        limits: hard limits by name: ``nofile``, ``memlock`` (bytes), ``nproc``; -1 is unlimited.
        environment: variables that concern the checks.
        import_path: folders that ``python -m`` started here loads modules from and another user can write to, each with
            the reason.
        installed, pinned: versions by distribution; `pinned` is what SGLang's and torch's own metadata ask for.
        nccl: NCCL libraries that one process has loaded.
        patches: states, and `patch_problem` where the selection is not usable.
        unread: why a source could not be read, by its name.
    """

    __pydantic_config__ = _STRICT

    topology: Topology = field(default_factory=lambda: Topology(absent="not recorded"))
    gpus: tuple[Gpu, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    driver_present: bool = False
    driver: str | None = None
    driver_cuda: str | None = None
    torch_cuda: str | None = None
    cuda_problem: str | None = None
    iommu: str | None = None
    acs: tuple[str, ...] | None = None
    driver_options: dict[str, str] | None = None
    container: str | None = None
    cpus: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    numa_balancing: bool | None = None
    memory_available: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    import_path: dict[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    nccl: tuple[Library, ...] | None = None
    kernels: Kernels | None = None
    patches: tuple[Patch, ...] = ()
    patch_problem: str | None = None
    serving: Serving = Serving()
    unread: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """JSON that `read` reads."""
        return _ADAPTER.dump_json(self, indent=1, exclude_defaults=True).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Host:
        """Raises ValueError for text that is no host, or has a field that hosts have not."""
        return _ADAPTER.validate_json(text)

    @classmethod
    def read(cls, file: Path) -> Host:
        """A recorded host. Raises PatchError for a file that is none, OSError for one that cannot be read."""
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as error:
            raise PatchError(
                f"{file} is no recorded host: {str(error)[:300]}\n"
                f"  remedy     record one with: sglang-patches doctor --record FILE"
            ) from None


_ADAPTER = TypeAdapter(Host)
