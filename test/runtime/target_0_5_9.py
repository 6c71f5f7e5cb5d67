"""The tiny target, and an EAGLE-3 worker with its draft, made with upstream 0.5.9's own classes on the CPU.

    python target_0_5_9.py WHAT       (what: target, worker; the arguments' list of ids is the draft's own)

Prints what the target captures as JSON, and after ``worker`` also what the patches decided.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Upstream's small kernels are Triton's, which its interpreter runs without a GPU.
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
os.environ |= CPU

from ranks import free_port

MODELS = Path(__file__).parents[1] / "models"


def arguments(tp: int = 1, **more: Any) -> Any:
    """Upstream's ``ServerArgs`` for EAGLE-3 with the tiny pair."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    made = ServerArgs(
        model_path=str(MODELS / "tiny-kimi"), device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", dtype="float32", max_total_tokens=2048, tp_size=tp,
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(MODELS / "tiny-kimi-eagle3"),
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, log_level="warning",
        max_running_requests=8, **more,
    )  # fmt: skip
    set_global_server_args_for_scheduler(made)
    return made


def prepare() -> None:
    """What upstream does in every scheduler before it makes a model."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.server_args import get_global_server_args

    initialize_moe_config(get_global_server_args())
    initialize_fp8_gemm_config(get_global_server_args())


def make_runner(rank: int, tp: int, port: int, **more: Any) -> Any:
    """Upstream's `ModelRunner` of rank ``rank``: weights, pools and attention backends."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    made = arguments(tp, **more)
    prepare()
    return ModelRunner(
        model_config=ModelConfig.from_server_args(made), mem_fraction_static=0.5, gpu_id=rank, tp_rank=rank,
        tp_size=tp, moe_ep_rank=0, moe_ep_size=1, pp_rank=0, pp_size=1, nccl_port=port, server_args=made,
    )  # fmt: skip


def make_worker() -> Any:
    """Upstream's `EAGLEWorker` over its `TpModelWorker`, as its scheduler makes them."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.eagle_worker import EAGLEWorker

    made, port = arguments(), free_port()
    prepare()
    ranks = {"moe_ep_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None, "nccl_port": port}
    target = TpModelWorker(server_args=made, gpu_id=0, tp_rank=0, pp_rank=0, **ranks)
    return EAGLEWorker(server_args=made, gpu_id=0, tp_rank=0, target_worker=target, **ranks)


def captured(model: Any) -> dict[str, Any]:
    inner = model.language_model.model
    return {"layers": inner.layers_to_capture, "embedding": getattr(inner, "captures_embedding", False)}


def main(what: str) -> None:
    from sglang_patches.runtime import _outcome

    if what == "target":
        told = captured(make_runner(0, 1, free_port()).model)
    else:
        worker = make_worker()
        told = captured(worker.target_worker.model_runner.model)
        told["draft"] = type(worker.draft_model_runner.model).__name__
        told["shares"] = (
            worker.draft_model_runner.model.model.embed_tokens.weight
            is worker.target_worker.model_runner.model.language_model.model.embed_tokens.weight
        )
    print(json.dumps({**told, "outcomes": _outcome.outcomes()}))


if __name__ == "__main__":
    main(sys.argv[1])
