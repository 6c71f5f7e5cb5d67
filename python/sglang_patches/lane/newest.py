"""The newest lane's upstream, 0.5.23: the base of all adapters. Its attributes are all that lanes may differ in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Lane:
    """Names and places in upstream. Upstream is imported within methods: this module is imported without it."""

    # Arguments, with the value that harms nothing, by which upstream calls the tensor-parallel pynccl communicator
    # outside of CUDA graphs too, or sets the graph usage of communicators itself.
    eager_pynccl: ClassVar[Mapping[str, Any]] = {
        "enable_symm_mem": False,
        "enable_pdmux": False,
        "enable_torch_compile": False,
        "enable_kv_cache_sharding": False,
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
    }
    # Fields of `ForwardBatch`: whether all data-parallel ranks run a graph for a decode, and for a draft decode.
    graph_vote: ClassVar[str] = "can_run_decode_cuda_graph"
    draft_graph_vote: ClassVar[str | None] = "can_run_dp_draft_cuda_graph"
    # Why a verify batch is never cut into slices; empty where its fields are known (`eagle_verify_cuda_graph.slices`).
    no_slices: ClassVar[str] = ""
    # Whether there is a PCIe-IPC all-reduce at all.
    has_pcie_ipc: ClassVar[bool] = True
    # Answers 503 until the server's own warm-up request is served, then 200.
    ready_path: ClassVar[str] = "/ready"

    def argument_names(self) -> frozenset[str]:
        """Names of the server's arguments."""
        from sglang.srt.server_args import ServerArgs, record_fields

        return frozenset(field.name for field in record_fields(ServerArgs))

    def resolving(self, server_args: Any) -> Any:
        """The arguments as they are so far, while upstream resolves them."""
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)

    def draft_backend(self, stamp: str, backend: Any) -> Any:
        """What an entry of ``DraftBackendFactory``'s maps gives: the attention backend with the name it is known by."""
        return stamp, backend

    def draft_model_config(self, config: Any, server_args: Any) -> Any:
        """The ``ModelConfig`` of the EAGLE-3 draft; None without one.

        Args:
            config: upstream's ``SpecAuxHiddenStateConfig``, resolved.
        """
        return config.draft_model_config

    def decode_graph_config(self, model_runner: Any) -> Any:
        """Upstream's resolved ``cuda_graph_config.decode``, which every graph runner reads its sizes from."""
        from sglang.srt.runtime_context import get_exec

        return get_exec().graph.cuda_graph_config.decode

    def graph_size_alignment(self, model_runner: Any) -> int:
        """The number that every captured batch size is a multiple of."""
        from sglang.srt.utils.common import get_cuda_graph_batch_size_alignment

        return int(get_cuda_graph_batch_size_alignment())

    def launch_world_size(self) -> int:
        """Processes that take part in a forward of this server, all data-parallel ranks included."""
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().launch_world_size)

    def dp_rank(self, scheduler: Any) -> int:
        """The data-parallel rank of this process' scheduler.

        Args:
            scheduler: upstream's, where it is at hand.
        """
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().dp_rank or 0

    def has_paged_experts(self) -> bool:
        """Whether experts are paged in and out of GPU memory."""
        from sglang.srt.runtime_context import get_exec

        return bool(get_exec().moe.enable_paged_experts)

    def pcie_ipc_allreduce(self, coordinator: Any, group_name: str) -> bool:
        """Whether upstream tries its PCIe-IPC all-reduce for this ``GroupCoordinator``."""
        from sglang.srt.distributed.device_communicators.pcie_ipc_ar import eligible_group

        return bool(
            eligible_group(
                group_name=group_name,
                world_size=coordinator.world_size,
                deterministic=coordinator._deterministic_collectives_enabled(),
            )
        )
