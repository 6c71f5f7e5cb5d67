"""Upstream 0.5.17 (torch 2.11): arguments are resolved in ``server_args.py``, and there is no PCIe-IPC all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sglang_patches.lane import newest


class Lane(newest.Lane):
    # Data-parallel attention and decode context parallelism are not among the names of the sizes here.
    eager_pynccl: ClassVar[Mapping[str, Any]] = {
        "enable_symm_mem": False,
        "enable_pdmux": False,
        "enable_torch_compile": False,
        "enable_dp_attention": False,
        "attn_cp_size": 1,
        "dcp_size": 1,
    }
    graph_vote: ClassVar[str] = "can_run_dp_cuda_graph"
    draft_graph_vote: ClassVar[str | None] = None
    no_slices: ClassVar[str] = "sglang 0.5.17, whose verify batches are not known to be sliceable"
    has_pcie_ipc: ClassVar[bool] = False
    ready_path: ClassVar[str] = "/health"

    # Told by the scheduler when it is ready, before anybody asks again.
    _dp_rank = 0

    def argument_names(self) -> frozenset[str]:
        from dataclasses import fields

        from sglang.srt.server_args import ServerArgs

        return frozenset(field.name for field in fields(ServerArgs))

    def resolving(self, server_args: Any) -> Any:
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(server_args)

    def draft_backend(self, stamp: str, backend: Any) -> Any:
        return backend

    def draft_model_config(self, config: Any, server_args: Any) -> Any:
        if not config.eagle_use_aux_hidden_state and config.eagle_draft_num_layers is None:
            return None
        # Upstream makes it here too, and keeps only what it needs of it.
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(
            server_args,
            model_path=server_args.speculative_draft_model_path,
            model_revision=server_args.speculative_draft_model_revision,
            is_draft_model=True,
        )

    def decode_graph_config(self, model_runner: Any) -> Any:
        return model_runner.server_args.cuda_graph_config.decode

    def graph_size_alignment(self, model_runner: Any) -> int:
        from sglang.srt.utils.common import get_cuda_graph_batch_size_alignment

        return int(get_cuda_graph_batch_size_alignment(model_runner.server_args))

    def launch_world_size(self) -> int:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().world_size)

    def dp_rank(self, scheduler: Any) -> int:
        if scheduler is not None:
            self._dp_rank = scheduler.ps.dp_rank or 0
        return self._dp_rank

    def has_paged_experts(self) -> bool:
        return False

    def pcie_ipc_allreduce(self, coordinator: Any, group_name: str) -> bool:
        return False
