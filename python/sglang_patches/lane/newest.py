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
    # Files below `runtime/` whose imports of upstream are not reached, by the attributes of this class.
    not_reached: ClassVar[frozenset[str]] = frozenset()
    # Whether there is a PCIe-IPC all-reduce at all.
    has_pcie_ipc: ClassVar[bool] = True
    # Answers 503 until the server's own warm-up request is served, then 200.
    ready_path: ClassVar[str] = "/ready"
    # What a server without a GPU is started with beside what all lanes are: variables and arguments.
    cpu_environment: ClassVar[Mapping[str, str]] = {}
    cpu_arguments: ClassVar[tuple[str, ...]] = ()
    # States that every draft of this upstream takes, where its code says so; None where the draft's files do.
    draft_states: ClassVar[int | None] = None
    # Whether a captured state is read at its layer's boundary: the embedding's output like any other, and complete.
    # Else the target's loop adds the residual to what the layer before gave, whatever it left undone.
    captures_at_boundary: ClassVar[bool] = True
    # Whether a graph runner declines a batch whose tokens per request differ from the captured ones.
    declines_other_widths: ClassVar[bool] = True
    # What a Kimi-K2.5 processor calls the rows and columns of patches of its images.
    image_grid: ClassVar[str] = "image_grid_thw"
    # What capturing one batch size returns where no graph was captured.
    no_graph: ClassVar[Any] = None

    def runtime_context(self) -> Any:
        """Where a process finds its arguments and ranks: ``get_parallel``, ``get_spec`` and the like."""
        from sglang.srt import runtime_context

        return runtime_context

    def argument_names(self) -> frozenset[str]:
        """Names of the server's arguments."""
        from sglang.srt.server_args import ServerArgs, record_fields

        return frozenset(field.name for field in record_fields(ServerArgs))

    def resolving(self, server_args: Any) -> Any:
        """The arguments as they are so far, while upstream resolves them."""
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)

    def resolved_arguments(self) -> dict[str, Any]:
        """The arguments of this process, resolved, by name."""
        from sglang.srt.runtime_context import get_context

        return get_context().resolved_server_args_dict()

    def resolutions(self, server_args: Any) -> Any:
        """Who decided which arguments, in order: (name of upstream's method, fields that it decided)."""
        return getattr(server_args, "_resolved_overrides", None) or ()

    def decode_graphs_are_off(self, server_args: Any) -> bool:
        """Whether decode graphs are switched off for the whole server, by whatever argument."""
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

        return bool(check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED))

    def no_draft_extend_graphs(self) -> bool:
        """Whether the environment switches draft-extend graphs off."""
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get())

    def is_out_of_tree_platform(self) -> bool:
        """Whether a plug-in brings the device."""
        from sglang.srt.platforms import current_platform

        return bool(current_platform.is_out_of_tree())

    def has_metrics(self, reporter: Any) -> bool:
        """Whether what upstream calls ``update_spec_metrics`` on has a metrics collector to report to."""
        return bool(reporter.current_scheduler_metrics_enabled)

    def verify_runner(self, model_runner: Any) -> Any:
        """The graph runner of the target's verify and decode; None where nothing was captured."""
        return model_runner.decode_cuda_graph_runner

    def draft_worker(self, worker: Any) -> Any:
        """What drafts, of the worker whose ``init_cuda_graphs`` captures all graphs; has the draft's graph runners."""
        return worker.draft_worker

    def draft_runner(self, draft_worker: Any) -> Any:
        """The ``ModelRunner`` of the draft."""
        return draft_worker.draft_runner

    def reuses_dsa_seed(self, draft_worker: Any) -> bool:
        """Whether draft decode starts from the sparse-attention index of draft extend."""
        return bool(draft_worker.seed_dsa_topk_from_draft_extend)

    def captured_width(self, runner: Any) -> int:
        """Tokens per request that a graph runner has captured."""
        return int(runner.captured_req_width)

    def graph_batch_size(self, runner: Any, batch: Any) -> int:
        """The size by which a runner looks up its graph: the batch's, or the largest of all data-parallel ranks."""
        if runner.require_mlp_tp_gather:
            return int(max(batch.original_global_num_tokens_cpu))
        return int(batch.batch_size)

    def verify_width(self, model_runner: Any) -> int:
        """Tokens per request of a verify of this target."""
        return int(model_runner.decode_num_tokens_per_req())

    def layers_of(self, model_runner: Any) -> int:
        """Layers of the target on this rank."""
        return int(model_runner.layer_info.num_effective_layers)

    def algorithm_of(self, model_config: Any) -> str:
        """Speculative algorithm that a ``ModelConfig`` was made for, in capitals; empty without one."""
        return (model_config.speculative_algorithm or "").upper()

    def context_length(self, text_config: Any) -> int:
        """Positions that a model's configuration allows."""
        from sglang.srt.utils.hf_transformers.common import get_context_length

        return int(get_context_length(text_config))

    def request_pool(self, backend: Any, batch: Any) -> Any:
        """The request-to-token pool that an attention backend reads for a ``ForwardBatch``."""
        return backend.req_to_token_pool

    def kv_pool(self, backend: Any, batch: Any) -> Any:
        """The KV pool that an attention backend reads for a ``ForwardBatch``."""
        return backend.token_to_kv_pool

    def kv_location(self, batch: Any) -> Any:
        """Where a forward writes its KV, as the KV pool's ``set_kv_buffer`` takes it."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        return KVWriteLoc(batch.out_cache_loc, None)

    def tree_mask(self, spec: Any, prefix_lens: Any) -> Any:
        """Which drafts of its tree each draft of a verify sees: bool ``[requests, n, n]``; None for a chain.

        Args:
            spec: upstream's ``EagleVerifyInput`` on a CPU.
            prefix_lens: ``[requests]``, committed tokens.
        """
        # QLEN_ONLY: for each request n x n, row-major, True where query may see key. A chain (topk 1) is causal.
        return None if spec.tree_topk == 1 else spec.custom_mask.view(-1, spec.draft_token_num, spec.draft_token_num)

    def is_ragged_draft_extend(self, mode: Any) -> bool:
        """Whether a ``ForwardMode`` is the draft extend that has accepted tokens only, so many for each request."""
        return False

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
