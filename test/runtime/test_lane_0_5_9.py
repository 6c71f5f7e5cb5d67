"""Lane 0.5.9: the core patches with upstream's own classes and the trained tiny weights, with each patch and without.

States and drafts are compared in `test_deepseek_v2_embedding_capture_states.py` and
`test_kimi_k25_eagle3_delegation_loading.py`, which hold for this lane too.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafts import write_draft
from sglang.srt.layers import communicator
from sglang.srt.managers import scheduler  # noqa: F401 (the two after it import it in a circle)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_metrics_mixin import SchedulerMetricsMixin
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer
from sglang.srt.speculative import eagle_worker, eagle_worker_v2
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_patches import lane
from sglang_patches.runtime import deepseek_v2_embedding_capture as capture
from sglang_patches.runtime import provenance
from sglang_patches.runtime.deepseek_v2_embedding_capture import in_loop
from sglang_patches.runtime.deepseek_v2_embedding_capture.layer_ids import LayerIdError, LayerIds, Request
from sglang_patches.runtime.eagle_verify_cuda_graph import coverage, reasons
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Reason

HERE = Path(__file__).parent
DELEGATION, CAPTURE, GRAPHS = (
    "kimi-k25-eagle3-delegation", "deepseek-v2-embedding-capture", "eagle-verify-cuda-graph",
)  # fmt: skip


def run(*what: str, without: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """`target_0_5_9.py` in a process of its own, with every patch but one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_PATCHES_AUX")}
    kept |= {"SGLANG_PATCHES": f"-{without}" if without else "", **environ}
    command = [sys.executable, "target_0_5_9.py", *what]
    return subprocess.run(command, cwd=HERE, env=kept, capture_output=True, text=True, timeout=300, check=False)


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_eagle_3_starts_with_the_delegation() -> None:
    found = told(run("worker"))
    assert (found["layers"], found["embedding"]) == ([2, 6, 9], False)
    assert (found["draft"], found["shares"]) == ("LlamaForCausalLMEagle3", True)
    assert found["outcomes"][DELEGATION]["detail"] == "the draft fits the target and was loaded whole"
    assert found["outcomes"][CAPTURE]["layer_inputs"] == [2, 6, 9]
    assert "draft_decode batch size 1-8: cpu" in found["outcomes"][GRAPHS]["detail"]


def test_without_it_the_start_ends_in_an_attribute_error() -> None:
    done = run("worker", without=DELEGATION)
    assert done.returncode == 1
    lacking = "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'"
    assert lacking in done.stderr


def test_the_embeddings_output_is_captured_where_upstream_raises() -> None:
    assert told(run("embedding")) == {"shape": [3, 3 * 256], "first": True}
    assert "NoneType" in told(run("embedding", without=CAPTURE))["error"]


@pytest.fixture(scope="module")
def other_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft whose layers are not upstream's default."""
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 4, 7], "use_aux_hidden_state": True}}
    return str(write_draft(tmp_path_factory.mktemp("draft") / "other", ids))


def test_graphs_capture_the_layers_that_the_draft_asks_for_and_every_size(other_layers: str) -> None:
    found = told(run("graphs", other_layers))
    assert (found["layers"], found["embedding"]) == ([5, 8], True)
    assert found["served"] == {"layers": [5, 8], "embedding": True}
    assert found["sizes"] == [1, 2, 4, 6, 8]


def test_upstream_captures_graphs_with_layers_of_its_own(other_layers: str) -> None:
    """And serves other ones afterwards: what the two patches are for."""
    found = told(run("graphs", other_layers, without=f"{CAPTURE},-{GRAPHS}"))
    assert found["layers"] == [2, 6, 9]
    assert found["served"]["layers"] == [0, 5, 8]
    assert found["sizes"] == [1, 2]


def test_drafts_take_three_states_here(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5], "use_aux_hidden_state": True}}
    with pytest.raises(
        LayerIdError, match=r"names 2 layers, \[1, 5\], but drafts take 3 hidden states in this upstream"
    ):
        ModelConfig(str(write_draft(tmp_path / "two", ids)), dtype="float32", is_draft_model=True)


class Layers:
    """As much of a ``DeepseekV2Model`` as is told what to capture."""

    def __init__(self, count: int) -> None:
        self.layers = [SimpleNamespace() for _ in range(count)]


def test_states_come_in_the_lists_order_with_repeats_and_the_embedding_first() -> None:
    model: Any = Layers(9)
    in_loop.set_up(model, [8, 0, 8, 2])
    assert (model.layers_to_capture, model.captures_embedding) == ([2, 8], True)
    states: list[torch.Tensor] = []
    embedded = torch.zeros(1)
    in_loop.add_embedding(model, states, embedded)
    embedded += 1  # as the next layer's norm does in place
    states += [torch.tensor([2.0]), torch.tensor([8.0])]
    assert [state.item() for state in in_loop.in_list_order(model, states)] == [8, 0, 8, 2]
    in_loop.set_up(model, [2, 8])
    assert in_loop.in_list_order(model, states[1:]) == states[1:]
    nothing: list[torch.Tensor] = []
    in_loop.add_embedding(model, nothing, embedded)
    assert nothing == []


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_layer_leaves_no_sum_to_the_next(captured: bool) -> None:
    """Upstream's own decoder layer; the sum over ranks is a doubling."""
    batch, hidden = SimpleNamespace(), torch.ones(2, 4)
    steps = SimpleNamespace(
        prepare_attn=lambda states, residual, *_: (states, residual),
        prepare_mlp=lambda states, residual, _: (states, residual),
        should_fuse_mlp_allreduce_with_next_layer=lambda _: True,
        should_use_reduce_scatter=lambda _: False,
        postprocess_layer=lambda states, residual, _: (states, residual),
    )

    def experts(states: torch.Tensor, _: Any, fused: bool, *__: Any) -> torch.Tensor:
        return states.clone() if fused else states * 2

    layer = SimpleNamespace(
        layer_communicator=steps, self_attn=lambda hidden_states, **_: hidden_states, mlp=experts, layer_id=3,
        nsa_enable_prefill_cp=False, output_is_captured=captured,
    )  # fmt: skip
    layer.self_attn.__dict__["fused_qkv_a_proj_with_mqa"] = None
    out, _ = DeepseekV2DecoderLayer.forward(layer, torch.arange(2), hidden, batch, hidden, None, None, None)
    assert hasattr(out, "_sglang_needs_allreduce_fusion") != captured
    assert out[0, 0].item() == (2 if captured else 1)


def test_the_layer_that_is_told_so_is_the_one_before() -> None:
    model: Any = Layers(4)
    in_loop.set_up(model, [0, 3])
    assert [capture.is_captured(layer) for layer in model.layers] == [False, False, True, False]
    assert "_sglang_needs_allreduce_fusion" in inspect.getsource(communicator.LayerCommunicator.prepare_attn)


def test_a_call_without_ids_does_not_take_back_what_was_asked_for() -> None:
    calls: list[Any] = []

    class Target(SimpleNamespace):
        @capture.takes_layer_ids
        def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> None:
            calls.append(layer_ids)

    target = Target(
        config=SimpleNamespace(num_hidden_layers=12), pp_group=SimpleNamespace(world_size=1, is_last_rank=True),
        model=Layers(12),
    )  # fmt: skip
    target.model.first_k_dense_replace = 1
    target.set_eagle3_layers_to_capture(LayerIds(Request((-1, 4, 7), "the test", "layer-output")))
    target.set_eagle3_layers_to_capture()
    assert calls == [[-1, 4, 7], [-1, 4, 7]]
    assert (target.model.layers_to_capture, target.model.captures_embedding) == ([5, 8], True)


RUNNERS = {
    CudaGraphRunner: reasons.declined_verify,
    EAGLEDraftCudaGraphRunner: reasons.declined_draft,
    EAGLEDraftExtendCudaGraphRunner: reasons.declined_extend,
}


def graph_runner(**more: Any) -> SimpleNamespace:
    fields = {
        "require_mlp_tp_gather": False, "require_mlp_sync": False, "disable_padding": False, "enable_pdmux": False,
        "is_encoder_decoder": False, "enable_two_batch_overlap": False, "capture_hidden_mode": 2,
        "num_tokens_per_bs": 4, "capture_bs": [1, 2, 4], "max_bs": 4, "graphs": dict.fromkeys([1, 2, 4]),
        "model_runner": SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.EAGLE3),
    }  # fmt: skip
    return SimpleNamespace(**fields | more)


@pytest.mark.parametrize(
    ("more", "size", "wanted"),
    [
        ({}, 3, None),
        ({}, 5, Reason.BATCH_TOO_LARGE),
        ({"disable_padding": True}, 3, Reason.SIZE_NOT_CAPTURED),
        ({"require_mlp_sync": True}, 2, Reason.DP_RANK),
        ({"require_mlp_tp_gather": True}, 1, Reason.BATCH_TOO_LARGE),
    ],
)
@pytest.mark.parametrize("kind", RUNNERS, ids=lambda kind: kind.__name__)
def test_the_reason_is_upstreams(kind: Any, more: dict[str, Any], size: int, wanted: Reason | None) -> None:
    """`can_run` of upstream's own classes says whether, and the reason is found for what it declines."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    runner = graph_runner(capture_hidden_mode=CaptureHiddenMode.FULL, **more)
    batch = SimpleNamespace(
        batch_size=size, seq_lens=torch.ones(size), can_run_dp_cuda_graph=False, can_run_tbo=False,
        capture_hidden_mode=CaptureHiddenMode.NULL, global_num_tokens_cpu=[4, 20],
        spec_info=SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.FULL, num_tokens_per_req=1),
    )  # fmt: skip
    assert kind.can_run(runner, batch) == (wanted is None)
    if wanted is None:
        assert reasons.replayed(runner, batch) is Reason.PADDED
    else:
        assert RUNNERS[kind](runner, batch) is wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"disable_cuda_graph": False}, None),
        ({}, Reason.OFF_BY_FLAG),
        ({"attention_backend": "torch_native"}, Reason.OFF_ATTENTION_BACKEND),
        ({"moe_a2a_backend": "deepep", "deepep_mode": "normal"}, Reason.OFF_DEEPEP_NORMAL),
        ({"deepep_mode": "normal"}, Reason.OFF_BY_FLAG),
        ({"disaggregation_mode": "prefill"}, Reason.OFF_PD_PREFILL),
        ({"debug_tensor_dump_output_folder": "/tmp"}, Reason.OFF_TENSOR_DUMP),
    ],
)
def test_who_switched_graphs_off(arguments: dict[str, Any], wanted: Reason | None) -> None:
    found = SimpleNamespace(
        **{
            "disable_cuda_graph": True,
            "attention_backend": "fa3",
            "moe_a2a_backend": "none",
            "deepep_mode": "auto",
            "disaggregation_mode": "null",
            "debug_tensor_dump_output_folder": None,
        }
        | arguments
    )
    assert reasons.off_reason(lane.here().resolutions(found)) is wanted


def test_an_added_size_that_cannot_be_captured_is_done_without() -> None:
    """Upstream unpacks what capturing gives and files it by size; `audit` takes it out again."""
    plan = coverage.Plan(limit=8, added=(8,))
    runner = graph_runner(capture_bs=[1, 8], max_bs=8, graphs={}, output_buffers={}, device_module=None)

    @coverage.capture_added
    def capture_one_batch_size(self: Any, bs: int, forward: Any) -> tuple[str, str]:
        if bs == 8:
            raise RuntimeError("CUDA out of memory")
        return "graph", "buffers"

    state, coverage._state.plan = coverage._state.plan, plan
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coverage.slice_policy, "several_ranks", lambda: False)
            for bs in (8, 1):
                runner.graphs[bs], runner.output_buffers[bs] = capture_one_batch_size(runner, bs, None)
    finally:
        coverage._state.plan = state
    assert (runner.capture_bs, runner.max_bs) == ([1], 1)
    target = SimpleNamespace(graph_runner=runner)
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target), speculative_num_steps=1, draft_model_runner=target,
        cuda_graph_runner_for_draft_extend=None,
    )  # fmt: skip
    coverage._forget_failed(worker)
    assert (runner.graphs, runner.output_buffers) == ({1: "graph"}, {1: "buffers"})


@pytest.mark.parametrize(
    "method",
    [
        eagle_worker.EAGLEWorker.draft, eagle_worker.EAGLEWorker.verify, eagle_worker.EAGLEWorker.init_cuda_graphs,
        eagle_worker.EAGLEWorker.forward_draft_extend_after_decode, eagle_worker_v2.EagleDraftWorker.draft,
        eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode, eagle_worker_v2.EAGLEWorkerV2.verify,
        eagle_worker_v2.EagleDraftWorker.init_cuda_graphs,
    ],
    ids=lambda method: method.__qualname__,
)  # fmt: skip
def test_both_workers_are_followed(method: Callable[..., Any]) -> None:
    """With and without ``SGLANG_ENABLE_SPEC_V2``."""
    assert hasattr(method, "__wrapped__")


def test_acceptance_is_counted_by_request_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through upstream's own methods: two requests of one pass, then a pass that verified none."""
    monkeypatch.setattr(provenance, "_acceptance", counted := provenance._Acceptance())
    request: Any = SimpleNamespace(spec_acceptance_histogram=[])
    reporter: Any = SimpleNamespace(
        spec_num_accepted_tokens=0, spec_num_forward_ct=0, num_generated_tokens=0, enable_metrics=False
    )
    for accepted in (3, 0):
        Req.update_spec_acceptance_histogram(request, accepted)
    SchedulerMetricsMixin.update_spec_metrics(reporter, 2, 3)
    SchedulerMetricsMixin.update_spec_metrics(reporter, 0, 0)
    assert (counted.passes, counted.tokens) == (2, 5)
    assert (reporter.spec_num_forward_ct, reporter.spec_num_accepted_tokens) == (2, 5)
    assert (counted.drafts, counted.steps) == ({3: 1, 0: 1}, {3: 2})
