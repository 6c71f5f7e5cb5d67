"""Upstream 0.5.9 (torch 2.9, CUDA 12): arguments are in one global object, and targets know little of EAGLE-3."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from sglang_patches.lane import v0_5_17

# Arguments of later releases that the code in `runtime/` asks for, with what is true here.
_LATER = {"speculative_adaptive": False}
# Methods of ``ServerArgs`` that switch decode graphs off, by the argument that made them.
_OFF: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("_handle_attention_backend_compatibility", "attention_backend", ("torch_native", "flex_attention")),
    ("_handle_a2a_moe", "deepep_mode", ("normal",)),
    ("_apply_cuda_graph_disaggregation_roles", "disaggregation_mode", ("prefill",)),
)


class _Arguments:
    """The process's server arguments, which raise ValueError where they are not set yet."""

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.server_args import get_global_server_args

        arguments = get_global_server_args()
        return getattr(arguments, name, _LATER[name]) if name in _LATER else getattr(arguments, name)


class _Ranks:
    """Ranks and groups of this process; each raises AssertionError where its group is not made."""

    @property
    def tp_rank(self) -> int:
        from sglang.srt.distributed import parallel_state

        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def pp_rank(self) -> int:
        from sglang.srt.distributed import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_rank())

    @property
    def attn_tp_rank(self) -> int:
        from sglang.srt.layers import dp_attention

        return int(dp_attention.get_attention_tp_rank())

    @property
    def attn_tp_size(self) -> int:
        from sglang.srt.layers import dp_attention

        return int(dp_attention.get_attention_tp_size())

    @property
    def attn_cp_rank(self) -> int:
        from sglang.srt.layers import dp_attention

        return int(dp_attention.get_attention_cp_rank())

    @property
    def attn_cp_size(self) -> int:
        from sglang.srt.layers import dp_attention

        return int(dp_attention.get_attention_cp_size())

    @property
    def world_group(self) -> Any:
        from sglang.srt.distributed import parallel_state

        return parallel_state.get_world_group()

    @property
    def world_size(self) -> int:
        return int(self.world_group.world_size)


class _Context:
    """What later releases have as module ``sglang.srt.runtime_context``."""

    def __init__(self) -> None:
        arguments, ranks = _Arguments(), _Ranks()
        groups = SimpleNamespace(moe=arguments, graph=arguments)
        self.get_parallel = lambda: ranks
        self.get_exec = lambda: groups
        self.get_spec = self.get_model = self.get_disagg = lambda: arguments
        self.get_device = self.get_observability = lambda: arguments


class _DecodeGraphs:
    """The two arguments that upstream's graph runners read their sizes from, as one object.

    Args:
        arguments: upstream's ``ServerArgs``.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    @property
    def bs(self) -> list[int]:
        return list(self._arguments.cuda_graph_bs)

    @bs.setter
    def bs(self, sizes: list[int]) -> None:
        self._arguments.cuda_graph_bs = sizes

    @property
    def max_bs(self) -> int:
        return int(self._arguments.cuda_graph_max_bs)

    @max_bs.setter
    def max_bs(self, size: int) -> None:
        self._arguments.cuda_graph_max_bs = size


class Lane(v0_5_17.Lane):
    eager_pynccl: ClassVar[Mapping[str, Any]] = {
        "enable_symm_mem": False,
        "enable_pdmux": False,
        "enable_torch_compile": False,
        "enable_dp_attention": False,
        "attn_cp_size": 1,
    }
    no_slices: ClassVar[str] = "sglang 0.5.9, whose verify batches are not known to be sliceable"
    not_reached: ClassVar[frozenset[str]] = frozenset(
        {
            "deepseek_v2_embedding_capture/collector.py",
            "eagle_verify_cuda_graph/slice_policy.py",
            "eagle_verify_cuda_graph/slice_timing.py",
            "eagle_verify_cuda_graph/slices.py",
        }
    )
    # EAGLE's small kernels are Triton's only; and masks of a grammar are made on a GPU only.
    cpu_environment: ClassVar[Mapping[str, str]] = {"TRITON_INTERPRET": "1"}
    cpu_arguments: ClassVar[tuple[str, ...]] = ("--grammar-backend", "none")
    # `models/llama_eagle3.py` and the graph of draft extend have the number as a constant.
    draft_states: ClassVar[int | None] = 3
    captures_at_boundary: ClassVar[bool] = False
    declines_other_widths: ClassVar[bool] = False
    image_grid: ClassVar[str] = "grid_thws"
    no_graph: ClassVar[Any] = (None, None)

    def __init__(self) -> None:
        self._context = _Context()

    def runtime_context(self) -> Any:
        return self._context

    def resolving(self, server_args: Any) -> Any:
        return server_args

    def resolved_arguments(self) -> dict[str, Any]:
        from dataclasses import fields

        from sglang.srt.server_args import get_global_server_args

        arguments = get_global_server_args()
        return {field.name: getattr(arguments, field.name) for field in fields(arguments)}

    def resolutions(self, server_args: Any) -> Any:
        """Made from the arguments: this upstream keeps no record of it."""
        if not server_args.disable_cuda_graph:
            return ()
        off = {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="disabled"))}
        for hook, name, values in _OFF:
            if getattr(server_args, name) in values and not (
                hook == "_handle_a2a_moe" and server_args.moe_a2a_backend != "deepep"
            ):
                return ((hook, off),)
        if server_args.debug_tensor_dump_output_folder is not None:
            return (("_handle_other_validations", off),)
        return (("_parse_cuda_graph_config", off),)

    def decode_graphs_are_off(self, server_args: Any) -> bool:
        return bool(server_args.disable_cuda_graph)

    def no_draft_extend_graphs(self) -> bool:
        return False

    def is_out_of_tree_platform(self) -> bool:
        return False

    def has_metrics(self, reporter: Any) -> bool:
        return bool(reporter.enable_metrics and reporter.current_scheduler_metrics_enabled)

    def verify_runner(self, model_runner: Any) -> Any:
        return model_runner.graph_runner

    def draft_worker(self, worker: Any) -> Any:
        """``EAGLEWorker`` drafts itself; of ``EAGLEWorkerV2`` it is its ``EagleDraftWorker`` that captures."""
        return worker

    def draft_runner(self, draft_worker: Any) -> Any:
        found = getattr(draft_worker, "draft_runner", None)
        return draft_worker.draft_model_runner if found is None else found

    def reuses_dsa_seed(self, draft_worker: Any) -> bool:
        return False

    def captured_width(self, runner: Any) -> int:
        return int(runner.num_tokens_per_bs)

    def graph_batch_size(self, runner: Any, batch: Any) -> int:
        if not runner.require_mlp_tp_gather:
            return int(batch.batch_size)
        largest = int(max(batch.global_num_tokens_cpu))
        algorithm = runner.model_runner.spec_algorithm
        if algorithm.is_eagle() or algorithm.is_standalone():
            return largest // int(runner.num_tokens_per_bs)
        return largest

    def verify_width(self, model_runner: Any) -> int:
        return int(model_runner.server_args.speculative_num_draft_tokens)

    def layers_of(self, model_runner: Any) -> int:
        return int(model_runner.num_effective_layers)

    def algorithm_of(self, model_config: Any) -> str:
        """By the draft's architecture: a ``ModelConfig`` does not tell for which algorithm it was made."""
        architectures = model_config.hf_config.architectures or [""]
        return "EAGLE3" if "eagle3" in architectures[0].lower() else ""

    def context_length(self, text_config: Any) -> int:
        from sglang.srt.utils.hf_transformers_utils import get_context_length

        return int(get_context_length(text_config))

    def request_pool(self, backend: Any, batch: Any) -> Any:
        return batch.req_to_token_pool

    def kv_pool(self, backend: Any, batch: Any) -> Any:
        return batch.token_to_kv_pool

    def kv_location(self, batch: Any) -> Any:
        return batch.out_cache_loc

    def tree_mask(self, spec: Any, prefix_lens: Any) -> Any:
        if spec.topk == 1:
            return None
        import torch

        # FULL_MASK: for each request n rows of its committed tokens and the n drafts.
        n, begin, masks = int(spec.draft_token_num), 0, []
        for prefix in prefix_lens.tolist():
            end = begin + n * (prefix + n)
            masks.append(spec.custom_mask[begin:end].view(n, prefix + n)[:, prefix:])
            begin = end
        return torch.stack(masks)

    def is_ragged_draft_extend(self, mode: Any) -> bool:
        return bool(mode.is_draft_extend())

    def draft_model_config(self, config: Any, server_args: Any) -> Any:
        # Made anew: upstream's ``ModelRunner``, here in the place of the configuration, keeps only what it needs of it.
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(
            server_args,
            model_path=server_args.speculative_draft_model_path,
            model_revision=server_args.speculative_draft_model_revision,
            is_draft_model=True,
        )

    def decode_graph_config(self, model_runner: Any) -> Any:
        return _DecodeGraphs(model_runner.server_args)

    def graph_size_alignment(self, model_runner: Any) -> int:
        from sglang.srt.layers.dp_attention import get_attention_cp_size, get_attention_tp_size
        from sglang.srt.utils import require_gathered_buffer

        # As `get_batch_sizes_to_capture` has it.
        multiple = 2 if model_runner.server_args.enable_two_batch_overlap else 1
        if require_gathered_buffer(model_runner.server_args):
            multiple *= int(get_attention_tp_size())
        if multiple % int(get_attention_cp_size()):
            multiple *= int(get_attention_cp_size())
        return multiple

    def launch_world_size(self) -> int:
        return _Ranks().world_size

    def dp_rank(self, scheduler: Any) -> int:
        if scheduler is not None:
            self._dp_rank = scheduler.dp_rank or 0
        return self._dp_rank
