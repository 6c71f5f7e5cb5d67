"""eagle-verify-cuda-graph: the reason of every eager pass, against upstream's own decision, and what counts tell.

The graph runners are upstream's classes with upstream's ``can_run_graph``; only what needs a GPU is left out: they are
made without ``__init__``, which captures, and their backends hold keys where graphs would be.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contexts import published_for_scheduler, resolve
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, ShapeKey
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_patches import lane
from sglang_patches.runtime import eagle_verify_cuda_graph as patch
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, reasons
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Path, Phase, Reason

MODEL, DRAFT = "test/models/tiny-kimi", "test/models/tiny-kimi-eagle3"
CAPTURED = [1, 2, 4]
WIDTH = 4


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> counting.Passes:
    """Empty counts, in the places that read them."""
    fresh = counting.Passes()
    monkeypatch.setattr(counting, "passes", fresh)
    monkeypatch.setattr(patch, "passes", fresh)
    return fresh


def runner(kind: Any, **changes: Any) -> Any:
    made = kind.__new__(kind)
    backend = FullCudaGraphBackend.__new__(FullCudaGraphBackend)
    backend._graphs = {ShapeKey(size=size): object() for size in CAPTURED}
    made.__dict__.update(
        {
            "backend": backend,
            "capture_bs": CAPTURED,
            "max_bs": max(CAPTURED),
            "captured_req_width": WIDTH,
            "disable_padding": False,
            "require_mlp_tp_gather": False,
            "require_mlp_sync": False,
            "ragged_verify_mode": False,
            "is_encoder_decoder": False,
            "enable_two_batch_overlap": False,
            "enable_pdmux": False,
            "record_nolora_graph": False,
            "attention_graph_variants": None,
            "model_runner": SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.EAGLE3),
        }
    )
    made.__dict__.update(changes)
    return made


# The fields that say whether all data-parallel ranks run a graph.
VOTE, DRAFT_VOTE = lane.here().graph_vote, lane.here().draft_graph_vote or "no_such_vote"


def batch(size: int = 1, **changes: Any) -> Any:
    made = SimpleNamespace(
        batch_size=size,
        forward_mode=ForwardMode.TARGET_VERIFY,
        replace_embeds=None,
        spec_info=SimpleNamespace(num_tokens_per_req=WIDTH, ragged_verify_layout=None, dsa_topk_indices=None),
        seq_lens=torch.ones(size),
        input_ids=torch.zeros(size * WIDTH),
        encoder_lens=torch.ones(size),
        original_global_num_tokens_cpu=[size, 1],
        can_run_tbo=True,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    made.__dict__.update({VOTE: True, DRAFT_VOTE: True})
    made.__dict__.update(changes)
    return made


NGRAM = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.NGRAM)
OTHER_WIDTH = SimpleNamespace(num_tokens_per_req=WIDTH + 1, ragged_verify_layout=None, dsa_topk_indices=None)
# What makes upstream decline a verify batch, alone: (changes of the runner, changes of the batch) -> reason.
VERIFY_CASES: list[tuple[dict[str, Any], dict[str, Any], Reason]] = [
    ({}, {"replace_embeds": torch.zeros(1)}, Reason.REPLACE_EMBEDS),
    ({"ragged_verify_mode": True}, {}, Reason.RAGGED),
    ({}, {"spec_info": OTHER_WIDTH}, Reason.WIDTH),
    ({}, {"batch_size": 5}, Reason.BATCH_TOO_LARGE),
    ({"disable_padding": True}, {"batch_size": 3}, Reason.SIZE_NOT_CAPTURED),
    ({"disable_padding": True}, {"batch_size": 5}, Reason.BATCH_TOO_LARGE),
    ({"require_mlp_tp_gather": True}, {"original_global_num_tokens_cpu": [1, 5]}, Reason.BATCH_TOO_LARGE),
    ({"require_mlp_sync": True}, {VOTE: False}, Reason.DP_RANK),
    ({"is_encoder_decoder": True}, {"encoder_lens": torch.zeros(1)}, Reason.ENCODER_LENS),
    ({"enable_two_batch_overlap": True}, {"can_run_tbo": False}, Reason.TWO_BATCH_OVERLAP),
    ({"model_runner": NGRAM}, {"input_ids": torch.zeros(1)}, Reason.NGRAM_WIDTH),
]


@pytest.mark.parametrize(("of_runner", "of_batch", "reason"), VERIFY_CASES)
def test_a_declined_verify_has_its_reason(of_runner: dict[str, Any], of_batch: dict[str, Any], reason: Reason) -> None:
    graphs, declined = runner(DecodeCudaGraphRunner, **of_runner), batch(**of_batch)
    assert not graphs.can_run_graph(declined)
    assert reasons.declined_verify(graphs, declined) is reason


DRAFT_CASES = [
    ({}, {"spec_info": OTHER_WIDTH}, Reason.WIDTH),
    ({}, {"batch_size": 5, "seq_lens": torch.ones(5)}, Reason.BATCH_TOO_LARGE),
    ({"disable_padding": True}, {"batch_size": 3, "seq_lens": torch.ones(3)}, Reason.SIZE_NOT_CAPTURED),
    ({"require_mlp_tp_gather": True}, {"original_global_num_tokens_cpu": [1, 5]}, Reason.BATCH_TOO_LARGE),
    ({"require_mlp_sync": True}, {VOTE: False}, Reason.DP_RANK),
]


@pytest.mark.parametrize(("of_runner", "of_batch", "reason"), DRAFT_CASES)
@pytest.mark.parametrize("kind", [EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner])
def test_a_declined_draft_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, kind: type, of_runner: dict[str, Any], of_batch: dict[str, Any], reason: Reason
) -> None:
    monkeypatch.setattr(EAGLEDraftCudaGraphRunner, "_sampling_variant", lambda self, batch: None, raising=False)
    graphs, declined = runner(kind, **of_runner), batch(**of_batch)
    assert not graphs.can_run_graph(declined)
    explain = reasons.declined_draft if kind is EAGLEDraftCudaGraphRunner else reasons.declined_extend
    assert explain(graphs, declined) is reason


def test_draft_decode_has_two_reasons_of_its_own() -> None:
    graphs = runner(EAGLEDraftCudaGraphRunner, require_mlp_sync=True)
    declined = batch(**{DRAFT_VOTE: False})
    assert not graphs.can_run_graph(declined)
    assert reasons.declined_draft(graphs, declined) is Reason.DP_DRAFT
    # `EagleDraftWorker.draft` declines this one after the runner took it.
    assert reasons.declined_draft(runner(EAGLEDraftCudaGraphRunner), batch(), seed_missing=True) is Reason.DSA_SEED


@settings(max_examples=300, deadline=None)
@given(picked=st.lists(st.sampled_from(VERIFY_CASES), max_size=4), size=st.integers(1, 6))
def test_no_mixture_of_causes_is_other(picked: list[tuple[dict[str, Any], dict[str, Any], Reason]], size: int) -> None:
    of_runner: dict[str, Any] = {}
    of_batch: dict[str, Any] = {}
    for runner_part, batch_part, _ in picked:
        of_runner |= runner_part
        of_batch |= batch_part
    graphs, mixed = runner(DecodeCudaGraphRunner, **of_runner), batch(size, **of_batch)
    if graphs.can_run_graph(mixed):
        assert reasons.replayed(graphs, mixed) in (Reason.CAPTURED, Reason.PADDED)
    else:
        assert reasons.declined_verify(graphs, mixed) is not Reason.OTHER


def test_a_condition_that_upstream_adds_is_other_and_a_replay_tells_padding() -> None:
    assert reasons.declined_verify(runner(DecodeCudaGraphRunner), batch()) is Reason.OTHER
    assert reasons.replayed(runner(DecodeCudaGraphRunner), batch(2)) is Reason.CAPTURED
    assert reasons.replayed(runner(DecodeCudaGraphRunner), batch(3)) is Reason.PADDED


BASE = ["--model-path", MODEL, "--dtype", "float32", "--grammar-backend", "none", "--sampling-backend", "pytorch"]
CPU = ["--device", "cpu", "--attention-backend", "intel_amx"]
CUDA = ["--device", "cuda", "--attention-backend", "triton"]
SPECULATION = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", DRAFT),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (CUDA, None),
        ([*CPU, "--disable-cuda-graph"], Reason.OFF_BY_FLAG),
        ([*CPU, "--disable-decode-cuda-graph"], Reason.OFF_BY_FLAG),
        ([*CPU, "--cuda-graph-backend-decode", "disabled"], Reason.OFF_BY_FLAG),
        ([*CPU, "--cuda-graph-config", '{"decode": {"backend": "disabled"}}'], Reason.OFF_BY_FLAG),
        (["--device", "cpu", "--attention-backend", "torch_native"], Reason.OFF_ATTENTION_BACKEND),
        (["--device", "cpu", "--attention-backend", "flex_attention"], Reason.OFF_ATTENTION_BACKEND),
        ([*CPU, "--moe-a2a-backend", "deepep", "--deepep-mode", "normal"], Reason.OFF_DEEPEP_NORMAL),
        ([*CPU, "--disaggregation-mode", "prefill"], Reason.OFF_PD_PREFILL),
        ([*CPU, "--debug-tensor-dump-output-folder", "dump"], Reason.OFF_TENSOR_DUMP),
        ([*CPU, "--msprobe-dump-config", "dump"], Reason.OFF_TENSOR_DUMP),
        # The operator's own choice comes first.
        (["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"], Reason.OFF_BY_FLAG),
    ],
)
def test_who_switched_graphs_off(arguments: list[str], reason: Reason | None) -> None:
    server_args = prepare_server_args([*BASE, *arguments])
    resolve(server_args)
    assert reasons.off_reason(server_args._resolved_overrides) is reason


def off(backend: str) -> dict[str, Any]:
    return {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend=backend))}


@pytest.mark.parametrize(
    ("trail", "reason"),
    [
        # These two hooks refuse the small model, so their declarations are made here as they make them.
        ([("handle_kv_cache_sharding", off("disabled"))], Reason.OFF_KV_SHARDING),
        ([("_handle_multi_item_scoring", off("disabled"))], Reason.OFF_MULTI_ITEM),
        ([("_handle_xpu_backends", off("disabled"))], Reason.OFF_OTHER),
        ([("_parse_cuda_graph_config", off("disabled")), ("later", off("full"))], None),
        ([("hook", {"page_size": 1})], None),
    ],
)
def test_declarations_that_the_small_model_cannot_bring_about(trail: Any, reason: Reason | None) -> None:
    assert reasons.off_reason(trail) is reason


def test_the_hooks_named_here_are_upstreams() -> None:
    """A hook that upstream renames would silently become ``off_other``."""
    import sglang.srt.arg_groups as groups

    folder = groups.__path__[0]
    sources = "".join(path.read_text() for path in pathlib.Path(folder).glob("*.py"))
    for hook in reasons._OFF_BY_HOOK:
        assert f'"{hook}"' in sources, hook


def on_gpu(**changes: Any) -> Any:
    """Stands for the ``ModelRunner`` of a GPU, whose real class needs one."""
    server_args = prepare_server_args([*BASE, *CUDA])
    resolve(server_args)
    made = SimpleNamespace(device="cuda", server_args=server_args, is_generation=True)
    made.__dict__.update(changes)
    return made


@pytest.fixture
def published() -> Iterator[Callable[..., None]]:
    """A CUDA server's configuration in this process until the test ends; gives what overrides its fields."""
    server_args = prepare_server_args([*BASE, *CUDA])

    def override(**fields: Any) -> None:
        get_context().override("test", **fields)

    with published_for_scheduler(server_args):
        yield override


def test_no_runner_on_a_cpu() -> None:
    assert reasons.missing(Phase.VERIFY, SimpleNamespace(device="cpu")) is Reason.CPU


def test_no_runner_on_a_gpu(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons.missing(Phase.VERIFY, on_gpu()) is Reason.OTHER
    assert reasons.missing(Phase.VERIFY, on_gpu(is_generation=False)) is Reason.NO_RUNNER_MODEL
    extend = SimpleNamespace(draft_extend_attn_backend=object())
    assert reasons.missing(Phase.DRAFT_EXTEND, on_gpu(), extend) is Reason.EXTEND_ATTENTION_BACKEND
    no_backend = SimpleNamespace(draft_extend_attn_backend=None)
    assert reasons.missing(Phase.DRAFT_EXTEND, on_gpu(), no_backend) is Reason.EXTEND_NO_BACKEND
    with monkeypatch.context() as patched:
        patched.setenv("SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH", "1")
        assert reasons.missing(Phase.DRAFT_EXTEND, on_gpu(), extend) is Reason.EXTEND_SWITCHED_OFF
    from sglang.srt.platforms import current_platform

    elsewhere = on_gpu()
    with monkeypatch.context() as patched:
        patched.setattr(type(current_platform), "is_out_of_tree", lambda self: True)
        assert reasons.missing(Phase.VERIFY, elsewhere) is Reason.NO_RUNNER_PLATFORM
    published(model_impl="mindspore")
    assert reasons.missing(Phase.VERIFY, on_gpu()) is Reason.NO_RUNNER_MODEL
    published(model_impl="auto", disaggregation_mode="prefill")
    assert reasons.missing(Phase.VERIFY, on_gpu()) is Reason.OFF_PD_PREFILL


def test_switched_off_graphs_are_told_by_the_resolution(published: Any) -> None:
    graphs_off = prepare_server_args([*BASE, *CUDA, "--disable-cuda-graph"])
    resolve(graphs_off)
    get_exec().graph.cuda_graph_config.decode.backend = "disabled"
    assert reasons.missing(Phase.VERIFY, on_gpu(server_args=graphs_off)) is Reason.OFF_BY_FLAG


def test_flashinfer_mla_cannot_capture_draft_extend() -> None:
    """The one backend of upstream's draft-extend map on CUDA without a graph: its metadata refuses, so do we."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    backend = FlashInferMLAAttnBackend.__new__(FlashInferMLAAttnBackend)
    view = batch(req_pool_indices=None, seq_lens_sum=1, seq_lens_cpu=None, kv_loc_plan=None)
    view.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    with pytest.raises(ValueError, match="Invalid forward mode"):
        backend.init_forward_metadata_out_graph(view)


def worker(graphs: Any, **changes: Any) -> Any:
    made = SimpleNamespace(
        speculative_num_steps=3,
        seed_dsa_topk_from_draft_extend=False,
        cuda_graph_runner=graphs,
        cuda_graph_runner_for_draft_extend=graphs,
        draft_runner=SimpleNamespace(device="cpu"),
    )
    made.__dict__.update(changes)
    return made


def test_each_phase_is_counted_once(passes: counting.Passes) -> None:
    target = SimpleNamespace(
        model_runner=SimpleNamespace(decode_cuda_graph_runner=runner(DecodeCudaGraphRunner), device="cuda")
    )
    patch.note_verify(target, batch(3), True)
    patch.note_verify(target, batch(5), False)
    patch.note_draft(worker(runner(EAGLEDraftCudaGraphRunner)), batch(4), True)
    patch.note_draft(worker(None), batch(1), None)
    patch.note_draft_extend(worker(runner(EAGLEDraftExtendCudaGraphRunner)), batch(1), True)
    figures = passes.figures()
    assert figures["passes"] == {
        "verify": {"graph": {"padded": 1}, "eager": {"batch_too_large": 1}},
        "draft_decode": {"graph": {"captured": 1}, "cpu": {"cpu": 1}},
        "draft_extend": {"graph": {"captured": 1}},
    }
    assert figures["graph_share"] == {"verify": 0.5, "draft_decode": 0.5, "draft_extend": 1.0}
    assert figures["failures_inside"] == {}


def test_what_computes_nothing_is_not_counted(passes: counting.Passes) -> None:
    graphs = runner(EAGLEDraftCudaGraphRunner)
    patch.note_draft(worker(graphs, speculative_num_steps=1), batch(), False)
    patch.note_draft_extend(worker(graphs), batch(forward_mode=ForwardMode.IDLE), True)
    assert not passes.counts
    assert passes.figures()["graph_share"] == {"verify": None, "draft_decode": None, "draft_extend": None}


def test_a_failure_inside_is_counted_and_reaches_nobody(
    passes: counting.Passes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        patch.note_verify(SimpleNamespace(), batch(), True)  # type: ignore[arg-type]
    assert passes.figures()["failures_inside"] == {"count": 3}
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "AttributeError" in caplog.text


def test_eager_passes_after_warm_up_are_logged_at_most_once_a_minute(
    passes: counting.Passes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(counting.time, "monotonic", lambda: now)
    for _ in range(counting.WARM_UP):
        passes.add(Phase.VERIFY, Path.EAGER, Reason.WIDTH, 1)
    passes.add(Phase.DRAFT_DECODE, Path.CPU, Reason.CPU, 1)
    assert not caplog.messages
    for _ in range(100):
        passes.add(Phase.VERIFY, Path.EAGER, Reason.WIDTH, 7)
    assert caplog.messages == [
        "sglang-patches: eagle-verify-cuda-graph: verify ran without a CUDA graph: reason=width batch_size=7, "
        "11 since the last such line"
    ]
    now += counting.LOG_EVERY + 1
    passes.add(Phase.VERIFY, Path.EAGER, Reason.WIDTH, 9)
    assert "batch_size=9, 100 since" in caplog.messages[-1]
    passes.add(Phase.VERIFY, Path.EAGER, Reason.BATCH_TOO_LARGE, 99)
    assert len(caplog.messages) == 3
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_one_rank_logs_for_all(
    passes: counting.Passes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, published: Any
) -> None:
    from sglang.srt.runtime_context import get_parallel

    def lines_at(attn_tp_rank: int, attn_cp_rank: int) -> int:
        monkeypatch.setattr(type(get_parallel()), "attn_tp_rank", attn_tp_rank, raising=False)
        monkeypatch.setattr(type(get_parallel()), "attn_cp_rank", attn_cp_rank, raising=False)
        passes._logged.clear()
        caplog.clear()
        for _ in range(counting.WARM_UP + 1):
            passes.add(Phase.VERIFY, Path.EAGER, Reason.WIDTH, 1)
        return len(caplog.messages)

    assert [lines_at(0, 0), lines_at(1, 0), lines_at(0, 1)] == [1, 0, 0]
    assert passes.figures()["passes"]["verify"] == {"eager": {"width": 3 * (counting.WARM_UP + 1)}}


def test_the_counter_reaches_metrics_through_upstreams_collector(passes: counting.Passes) -> None:
    labels = {"model_name": "tiny", "tp_rank": "0"}
    seen: list[bool] = []
    graph_passes = SimpleNamespace(labels=lambda **names: SimpleNamespace(inc=lambda by: seen.append(True)))
    collector = SimpleNamespace(labels=labels, cuda_graph_passes_total=graph_passes)
    for phase, path, reason in itertools.product(Phase, (Path.GRAPH,), (Reason.CAPTURED, Reason.PADDED)):
        passes.add(phase, path, reason, 1)
    for _ in range(2):  # the second adds nothing new
        SchedulerMetricsCollector.increment_decode_cuda_graph_pass(collector, value=True)
    assert seen == [True, True]
    lines = [line for line in generate_latest().decode().splitlines() if line.startswith("sglang:spec_forward_total{")]
    assert len(lines) == 6
    for phase in Phase:
        line = next(line for line in lines if f'phase="{phase}"' in line and 'reason="padded"' in line)
        assert 'path="graph"' in line
        assert 'model_name="tiny"' in line
        assert line.endswith(" 1.0")


def test_upstream_calls_with_what_we_read() -> None:
    assert list(inspect.signature(SchedulerMetricsCollector.increment_decode_cuda_graph_pass).parameters) == [
        "self",
        "value",
    ]
