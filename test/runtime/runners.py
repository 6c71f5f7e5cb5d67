"""Upstream's own `ModelRunner` of the bundled target and of drafts, on the CPU, in every lane. In a process of its own:
upstream publishes its arguments and its parallel groups once a process. Imported before upstream is."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

import lane_table
from drafts import DRAFT, TARGET

RELEASE = lane_table.release()
if RELEASE == "0.5.9":
    import target_0_5_9


def start(port: int, rank: int = 0, tp: int = 1) -> tuple[Any, Any]:
    """Upstream's arguments, published, and the target's runner, as `sglang.benchmark.one_batch` makes it.

    Args:
        port: where the ranks of torch.distributed meet, the same for all.
        rank: this process' tensor-parallel rank, of ``tp``.
    """
    # Upstream wants a NUMA node a rank unless told where to run; it binds nothing without AMX.
    cores = sorted(os.sched_getaffinity(0))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(tp))
    # An installed NCCL is taken for a usable one, GPU or not.
    os.environ["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    if RELEASE == "0.5.9":
        target = target_0_5_9.make_runner(rank, tp, port)
        return target.server_args, target
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(TARGET), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        grammar_backend="none", dtype="float32", max_total_tokens=2048, tp_size=tp, speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(DRAFT), speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4, log_level="warning",
    )  # fmt: skip
    if hasattr(arguments, "resolve_once"):  # else they are resolved as they are made
        arguments.resolve_once()
    _set_envs_and_config(arguments)
    if hasattr(runtime_context, "SpawnRanks"):
        from sglang.benchmark.one_batch import _init_process_global_configs
        from sglang.srt.distributed import bootstrap

        ranks = runtime_context.SpawnRanks(
            world_rank=runtime_context.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0), gpu_id=rank
        )
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        _init_process_global_configs()
        config = ModelConfig.from_server_args(arguments)
        device = runtime_context.get_device().device
        bootstrap.init_parallel_runtime(server_args=arguments, device=device, dist_port=port)
        bootstrap.init_layer_runtime(model_config=config)
    else:  # the runner makes its own parallel groups
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config

        runtime_context.publish(arguments, role="scheduler")
        for initialize in (initialize_moe_config, initialize_fp8_gemm_config, initialize_fp4_gemm_config):
            initialize(arguments)
        config = ModelConfig.from_server_args(arguments)
    return arguments, runner(arguments, config, port, rank)


def runner(arguments: Any, config: Any, port: int = 0, rank: int = 0, **more: Any) -> Any:
    """Upstream's `ModelRunner` of a model's configuration, its weights loaded, without pools."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    if "ps" in inspect.signature(ModelRunner).parameters:
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState

        tp = arguments.tp_size
        more["ps"] = ParallelState.trivial(
            tp_rank=rank, tp_size=tp, attn_tp_rank=rank, attn_tp_size=tp, dp_rank=None, gpu_id=rank
        )
    if RELEASE == "0.5.9":
        more |= target_0_5_9.ONE_RANK
    return ModelRunner(
        model_config=config, mem_fraction_static=0.5, gpu_id=rank, nccl_port=port, server_args=arguments, **more
    )
