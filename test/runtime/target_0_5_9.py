"""The tiny target, and an EAGLE-3 worker with its draft, made with upstream 0.5.9's own classes on the CPU.

    python target_0_5_9.py WHAT [DRAFT]

Prints what came of it as JSON. WHAT: ``worker``, an EAGLE-3 worker with its draft; ``embedding``, a prefill that
captures the embedding's output; ``graphs``, what upstream's graph runner is about to capture, and which batch sizes.
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

from ranks import free_port  # noqa: E402 (no upstream before the variables are set)

# Arguments of ``ModelRunner`` that later releases find by themselves.
ONE_RANK = {"tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
MODELS = Path(__file__).parents[1] / "models"


def arguments(tp: int = 1, **more: Any) -> Any:
    """Upstream's ``ServerArgs`` for EAGLE-3 with the tiny pair."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    made = ServerArgs(
        model_path=str(MODELS / "tiny-kimi"), device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", dtype="float32", max_total_tokens=2048, tp_size=tp,
        speculative_algorithm="EAGLE3", speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4, log_level="warning", max_running_requests=8,
        **{"speculative_draft_model_path": str(MODELS / "tiny-kimi-eagle3"), **more},
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
        model_config=ModelConfig.from_server_args(made), mem_fraction_static=0.5, gpu_id=rank, nccl_port=port,
        server_args=made, **ONE_RANK | {"tp_rank": rank, "tp_size": tp},
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


def worker() -> dict[str, Any]:
    from sglang_patches.runtime import _outcome

    made = make_worker()
    target, draft = made.target_worker.model_runner.model, made.draft_model_runner.model
    return {
        **captured(target),
        "draft": type(draft).__name__,
        "shares": draft.model.embed_tokens.weight is target.language_model.model.embed_tokens.weight,
        "outcomes": _outcome.outcomes(),
    }


def embedding() -> dict[str, Any]:
    """A prefill of three tokens that captures in upstream's own numbers (layer outputs, -1 the embedding's)."""
    import torch
    from captured_states import Target
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = make_runner(0, 1, free_port())
    runner.model.language_model.set_eagle3_layers_to_capture([-1, 5, 8])
    with torch.inference_mode():
        try:
            states = Target(runner).run(ForwardMode.EXTEND, [1], [0], [[20, 21, 22]])
        except TypeError as error:
            return {"error": str(error)}
    embedded = runner.model.language_model.model.embed_tokens.weight[torch.tensor([20, 21, 22])]
    return {"shape": list(states.shape), "first": torch.equal(states[:, : embedded.shape[1]], embedded)}


def graphs(draft: str) -> dict[str, Any]:
    """Upstream's `CudaGraphRunner` as it is when it begins to capture; nothing is captured without a GPU."""
    from unittest import mock

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    runner = make_runner(0, 1, free_port(), speculative_draft_model_path=draft)
    runner.server_args.cuda_graph_bs = [1, 2]
    runner.server_args.cuda_graph_max_bs = 2
    # As they are before upstream has set any.
    runner.model.language_model.model.layers_to_capture = []
    found: dict[str, Any] = {}

    def capture(self: Any) -> None:
        found.update(captured(runner.model), sizes=self.capture_bs)

    states = {"init_cuda_graph_state": mock.DEFAULT, "get_cuda_graph_seq_len_fill_value": lambda self: 1}
    with (
        mock.patch.object(CudaGraphRunner, "capture", capture),
        mock.patch.multiple(TorchNativeAttnBackend, create=True, **states),
    ):
        CudaGraphRunner(runner)
    runner.model.set_eagle3_layers_to_capture(runner.eagle_aux_hidden_state_layer_ids)
    return {**found, "served": captured(runner.model)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
