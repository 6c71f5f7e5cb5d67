"""eagle-verify-cuda-graph: when a verify is cut into slices: allowed, measured to be faster, and in reach."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import create_context, get_context, get_parallel, use_context
from sglang.srt.server_args import prepare_server_args
from verify_slices import WIDTH, Runner, model, verify_batch

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import eagle_verify_cuda_graph as patch
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, coverage, slice_policy, slice_timing
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Path as Way
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Phase, Reason
from sglang_patches.runtime.eagle_verify_cuda_graph.slice_policy import Decision, Timing


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> counting.Passes:
    fresh = counting.Passes()
    monkeypatch.setattr(counting, "passes", fresh)
    monkeypatch.setattr(patch, "passes", fresh)
    monkeypatch.setattr(slice_policy, "_state", slice_policy._State())
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    return fresh


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A published configuration, and how many ranks it has."""
    base = ["--model-path", "test/models/tiny-kimi", "--dtype", "float32", "--grammar-backend", "none"]
    server_args = prepare_server_args([*base, "--device", "cuda", "--attention-backend", "triton"])

    def set_to(count: int, **spec: Any) -> None:
        monkeypatch.setattr(type(get_parallel()), "launch_world_size", count, raising=False)
        if spec:
            get_context().override("test", **spec)

    with use_context(create_context(server_args, role="scheduler")):
        for name, value in (("world_group", SimpleNamespace(cpu_group="cpu group")), ("pp_size", 1)):
            monkeypatch.setattr(type(get_parallel()), name, value, raising=False)
        set_to(1)
        yield set_to


def test_nothing_forbids_slices_on_a_plain_server(ranks: Any) -> None:
    runner = Runner()
    assert slice_policy.forbidden(model(runner), runner) == ""


@pytest.mark.parametrize(
    ("of_runner", "of_model", "why"),
    [
        ({"require_mlp_tp_gather": True}, {}, "DP attention"),
        ({"require_attn_tp_gather": True}, {}, "DP attention"),
        ({"require_mlp_sync": True}, {}, "DP attention"),
        ({"enable_two_batch_overlap": True}, {}, "two-batch overlap"),
        ({"enable_pdmux": True}, {}, "--enable-pdmux"),
        ({"ragged_verify_mode": True}, {}, "ragged verify"),
        ({"disable_padding": True}, {}, "--disable-cuda-graph-padding"),
        ({"is_encoder_decoder": True}, {}, "an encoder-decoder model"),
        ({"attention_graph_variants": object()}, {}, "graphs for several kinds of attention"),
        ({"attn_backend": type("HybridLinearAttnBackend", (), {})()}, {}, "HybridLinearAttnBackend"),
        ({}, {"lora_manager": object()}, "LoRA"),
        ({}, {"model_config": SimpleNamespace(model_is_mrope=True)}, "mrope positions"),
        ({}, {"hisparse_coordinator": object()}, "HiSparse"),
        ({}, {"canary_manager": object()}, "the KV canary"),
        ({}, {"ngram_embedding_manager": SimpleNamespace(enabled=True)}, "n-gram embeddings"),
    ],
)
def test_what_forbids_slices_is_named(ranks: Any, of_runner: Any, of_model: Any, why: str) -> None:
    runner = Runner(**of_runner)
    target = model(runner, **of_model)
    assert why in slice_policy.forbidden(target, runner)
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=target))
    slice_timing.decide(worker)
    told = slice_policy.figures()["slices"]
    assert told["up_to"] == 0
    assert why in told["why"]
    assert slice_policy.replay_slices(target, verify_batch()) is None


def test_adaptive_speculation_and_pipelines_forbid_slices(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    monkeypatch.setattr(type(get_parallel()), "pp_size", 2, raising=False)
    assert slice_policy.forbidden(model(runner), runner) == "pipeline parallelism"
    monkeypatch.setattr(type(get_parallel()), "pp_size", 1, raising=False)
    ranks(1, speculative_adaptive=True)
    assert slice_policy.forbidden(model(runner), runner) == "adaptive speculation"


def test_recorders_of_experts_forbid_slices(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    place = "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer"
    with monkeypatch.context() as patched:
        patched.setattr(place, lambda: object())
        assert "routed experts" in slice_policy.forbidden(model(runner), runner)
    place = "sglang.srt.eplb.expert_distribution.get_global_expert_distribution_recorder"
    monkeypatch.setattr(place, lambda: object())
    assert "expert distribution" in slice_policy.forbidden(model(runner), runner)


def test_the_backends_named_here_are_upstreams() -> None:
    """One that upstream renames would silently lose its slices."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    known = (TritonAttnBackend, FlashInferAttnBackend, FlashInferMLAAttnBackend, FlashAttentionBackend)
    assert tuple(backend.__name__ for backend in known) == slice_policy.SLICEABLE
    assert set(slice_policy.PLANS_ON_HOST) < set(slice_policy.SLICEABLE)


def test_only_the_batches_in_reach_are_taken(ranks: Any, passes: counting.Passes) -> None:
    runner = Runner()
    target = model(runner)
    worker = SimpleNamespace(model_runner=target)
    batch = verify_batch()
    # Upstream's eager pass as long as nothing is decided, counted when it declines.
    patch.note_verify(worker, batch, False)
    assert slice_policy.replay_slices(target, batch) is None
    assert passes.counts == {(Phase.VERIFY, Way.EAGER, Reason.BATCH_TOO_LARGE): 1}
    passes.counts.clear()
    slice_policy.set_decision(Decision(5, "the test", runner))
    patch.note_verify(worker, batch, False)
    assert passes.counts == {}
    joined = slice_policy.replay_slices(target, batch)
    assert joined.next_token_logits[:, 0].tolist() == [0.0] * 16 + [16.0] * 4
    assert passes.counts == {(Phase.VERIFY, Way.GRAPH, Reason.SLICED): 1}
    assert runner.waited == 0
    other_width = verify_batch()
    other_width.spec_info.num_tokens_per_req = WIDTH + 1
    for declined in (
        other_width,
        verify_batch(forward_mode=ForwardMode.EXTEND),
        verify_batch(replace_embeds=torch.zeros(1)),
        verify_batch(batch_size=6),
        verify_batch(batch_size=4),
    ):
        assert slice_policy.replay_slices(target, declined) is None
    assert slice_policy.replay_slices(model(Runner()), batch) is None  # another runner than was measured
    assert sum(passes.counts.values()) == 1


def test_a_batch_that_carries_more_is_left_to_upstream_and_told(ranks: Any, passes: counting.Passes) -> None:
    runner = Runner()
    target = model(runner)
    slice_policy.set_decision(Decision(5, "the test", runner))
    batch = verify_batch(mamba_track_indices=torch.zeros(5))
    for _ in range(2):
        patch.note_verify(SimpleNamespace(model_runner=target), batch, False)
        assert slice_policy.replay_slices(target, batch) is None
    assert passes.counts == {(Phase.VERIFY, Way.EAGER, Reason.BATCH_TOO_LARGE): 2}
    assert passes.failures == {}
    assert slice_policy.figures()["slices"]["refused"] == {"mamba_track_indices=Tensor": 2}
    # Others are still sliced.
    assert slice_policy.replay_slices(target, verify_batch()) is not None


def test_a_backend_that_plans_on_the_host_waits_between_slices(ranks: Any) -> None:
    runner = Runner(attn_backend=type("FlashInferMLAAttnBackend", (), {})(), max_bs=2)
    slice_policy.set_decision(Decision(5, "the test", runner))
    assert slice_policy.replay_slices(model(runner), verify_batch()) is not None
    assert runner.waited == 2


class OutOfMemory(Runner):
    def execute(self, batch: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")


def test_out_of_memory_falls_back_alone_and_ends_a_server_of_several_ranks(ranks: Any, passes: Any) -> None:
    runner = OutOfMemory()
    slice_policy.set_decision(Decision(5, "the test", runner))
    assert slice_policy.replay_slices(model(runner), verify_batch()) is None
    assert passes.failures == {"slice": 1}
    ranks(2)
    slice_policy.set_decision(Decision(5, "the test", runner))
    with pytest.raises(RuntimeError, match="out of GPU memory while verifying 5 requests in slices, and the other"):
        slice_policy.replay_slices(model(runner), verify_batch())


def test_sizes_to_measure_span_what_is_above_the_captured() -> None:
    assert slice_timing.sizes_to_measure(4, 16) == [5, 9, 16]
    assert slice_timing.sizes_to_measure(256, 257) == [257]
    assert slice_timing.sizes_to_measure(256, 1024) == [257, 513, 1024]


def test_sizes_for_which_memory_does_not_pay_are_not_measured() -> None:
    assert slice_timing.fitting([5, 9, 16], 100, 2000.0) == [5, 9]
    assert slice_timing.fitting([5, 9, 16], 100, 900.0) == []


@pytest.mark.parametrize(
    ("times", "up_to"),
    [
        ([(5, 30, 6), (9, 30, 9), (16, 30, 12)], 16),
        ([(5, 30, 6), (9, 30, 9), (16, 11, 12)], 9),
        ([(5, 6, 6), (9, 30, 9)], 0),
        ([(5, 30, float("inf"))], 0),
    ],
)
def test_slices_reach_as_far_as_they_were_faster(times: list[tuple[int, float, float]], up_to: int) -> None:
    assert slice_timing.reach([Timing(*time) for time in times], 16) == up_to


def test_medians_are_taken_in_turn() -> None:
    now = [0.0]
    order: list[tuple[str, int]] = []
    # One eager pass in five is slow, and the first two of each way.
    durations = {"eager": [9, 9, 0.030, 0.030, 5, 0.031, 0.030], "sliced": [9, 9, 0.006, 4, 0.006, 0.006, 0.007]}

    def way(name: str) -> Any:
        def run(size: int) -> None:
            done = sum(1 for seen, _ in order if seen == name)
            order.append((name, size))
            now[0] += durations[name][done % 7]

        return run

    ways = (way("eager"), way("sliced"))
    timings = slice_timing.measure([5, 9], lambda size: size, ways, lambda: now[0], lambda: None)
    assert [(t.batch_size, round(t.eager_ms), round(t.sliced_ms)) for t in timings] == [(5, 30, 6), (9, 30, 6)]
    assert order == [(name, size) for size in (5, 9) for _ in range(7) for name in ("eager", "sliced")]


def test_several_ranks_take_the_slowest_ones_figures(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(2)

    def other_rank(figures: torch.Tensor, op: Any, group: Any) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "cpu group")
        figures.copy_(torch.maximum(figures, torch.tensor([[20.0, 40.0], [50.0, 1.0]], dtype=torch.float64)))

    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank)
    assert slice_timing.agreed([Timing(5, 30, 6), Timing(9, 30, 6)]) == [Timing(5, 30, 40), Timing(9, 50, 6)]


def prepared(monkeypatch: pytest.MonkeyPatch, target: Any, eager: float, sliced: float) -> Any:
    """A worker whose passes take so many seconds by a clock of their own."""
    now = [0.0]

    def forward(batch: Any, _: Any) -> None:
        assert slice_policy.figures() == {}  # or slices would be measured as the eager way
        now[0] += eager

    def run(model_runner: Any, batch: Any) -> None:
        now[0] += sliced

    target._forward_raw = forward
    monkeypatch.setattr(slice_policy, "run", run)
    monkeypatch.setattr(slice_timing, "verify_batch", lambda *arguments: arguments[2])
    monkeypatch.setattr(slice_timing, "_lengths_on_host", lambda worker: False)
    monkeypatch.setattr("sglang.srt.utils.common.get_available_gpu_memory", lambda *args, **named: 10.0)
    monkeypatch.setattr(slice_timing.time, "perf_counter", lambda: now[0])
    return SimpleNamespace(target_worker=SimpleNamespace(model_runner=target))


def test_what_was_measured_decides_and_is_told(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    worker = prepared(monkeypatch, model(runner), eager=0.030, sliced=0.006)
    slice_timing.decide(worker)
    told = slice_policy.figures()["slices"]
    assert told["measured"] == [{"batch_size": size, "eager_ms": 30, "sliced_ms": 6} for size in (5, 9, 16)]
    assert (told["up_to"], told["why"]) == (16, "faster than an eager pass at every measured size")
    assert told["seconds"] == round(3 * 7 * 0.036, 1)
    assert slice_policy.covers(runner, 16)
    assert not slice_policy.covers(runner, 4)
    slice_timing.decide(prepared(monkeypatch, model(runner), eager=0.006, sliced=0.030))
    assert slice_policy.figures()["slices"]["why"] == "an eager pass is faster"
    assert not slice_policy.covers(runner, 16)


def test_nothing_is_measured_where_graphs_cover_the_limit(ranks: Any) -> None:
    for runner in (Runner(max_bs=16), None):
        slice_timing.decide(SimpleNamespace(target_worker=SimpleNamespace(model_runner=model(runner))))
        assert slice_policy.figures() == {}


def test_a_measurement_that_fails_leaves_slices_off(ranks: Any, monkeypatch: pytest.MonkeyPatch, passes: Any) -> None:
    target = model(Runner())
    worker = prepared(monkeypatch, target, eager=0.030, sliced=0.006)

    def fails(batch: Any, _: Any) -> None:
        raise ValueError("no such backend")

    target._forward_raw = fails
    slice_timing.decide(worker)
    assert slice_policy.figures()["slices"]["up_to"] == 0
    assert "measuring failed" in slice_policy.figures()["slices"]["why"]
    assert passes.failures == {"slice": 1}

    def lacks_memory(batch: Any, _: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    target._forward_raw = lacks_memory
    ranks(2)
    with pytest.raises(torch.OutOfMemoryError):
        slice_timing.decide(worker)


def test_a_size_served_by_slices_is_no_gap(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    worker = SimpleNamespace(
        speculative_num_steps=1, target_worker=SimpleNamespace(model_runner=model(runner)), draft_worker=None
    )
    assert coverage.gaps(worker) == {Phase.VERIFY: [(5, 16, Reason.BATCH_TOO_LARGE)]}
    slice_policy.set_decision(Decision(9, "the test", runner))
    assert coverage.gaps(worker) == {Phase.VERIFY: [(10, 16, Reason.BATCH_TOO_LARGE)]}
    slice_policy.set_decision(Decision(16, "the test", runner))
    assert coverage.gaps(worker) == {}


@pytest.mark.parametrize(("wanted", "measured"), [("auto", 1), ("require", 1), ("report", 0)])
def test_report_measures_nothing(ranks: Any, monkeypatch: pytest.MonkeyPatch, wanted: str, measured: int) -> None:
    monkeypatch.setenv(coverage.VARIABLE, wanted)
    seen: list[Any] = []

    def decide(worker: Any) -> None:
        seen.append(worker)
        slice_policy.set_decision(Decision(16, "the test", worker.target_worker.model_runner.decode_cuda_graph_runner))

    monkeypatch.setattr(slice_timing, "decide", decide)

    class Worker:
        speculative_num_steps, draft_worker = 1, None
        target_worker = SimpleNamespace(model_runner=model(Runner()))

        @coverage.audit
        def init_cuda_graphs(self) -> None:
            pass

    Worker().init_cuda_graphs()
    assert len(seen) == measured
    told = _outcome.outcomes()[counting.PATCH]
    assert ("slices" in told) == bool(measured)
    assert ("slices" in _outcome._recorded[counting.PATCH]) == bool(measured)  # and so in the log
    assert told["result"] == ("applied" if measured else "failed")
