"""Metrics of the patches: all are declared in one place, and counts and times reach them as they are said to."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.speculative import eagle_worker_v2

from sglang_patches import lane
from sglang_patches.observe.scrape import Scrape, parse
from sglang_patches.runtime import _metrics, oea_topk, pcie_nccl_allreduce, provenance
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, phase_times
from sglang_patches.runtime.eagle_verify_cuda_graph.phase_times import DeviceClock, HostClock, PhaseTimes
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Phase
from sglang_patches.runtime.pcie_nccl_allreduce import paths

RUNTIME = Path(_metrics.__file__).parent
LABELS = {"model_name": "tiny", "tp_rank": "0"}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Metrics of a test are its own."""
    fresh = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.metrics.REGISTRY", fresh)
    for kind in ("Counter", "Gauge", "Histogram"):
        made = getattr(__import__("prometheus_client"), kind)
        defaults = tuple(fresh if value is REGISTRY else value for value in made.__init__.__defaults__)
        monkeypatch.setattr(made.__init__, "__defaults__", defaults)
    for cached in (_metrics._child, _metrics._made):
        cached.cache_clear()
    monkeypatch.setattr(counting, "passes", counting.Passes())
    _registry_of_test.append(fresh)
    yield
    _registry_of_test.clear()
    for cached in (_metrics._child, _metrics._made):
        cached.cache_clear()


_registry_of_test: list[CollectorRegistry] = []


def told() -> Scrape:
    return parse(generate_latest(_registry_of_test[0]).decode(), 0.0)


def values(name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in told().series(name)}


def decode_step() -> None:
    """A decode step, as upstream's collector is told of it."""
    silent = SimpleNamespace(labels=lambda **names: SimpleNamespace(inc=lambda by: None))
    collector: Any = SimpleNamespace(labels=LABELS, cuda_graph_passes_total=silent)
    SchedulerMetricsCollector.increment_decode_cuda_graph_pass(collector, value=True)


def test_no_other_module_of_the_runtime_makes_or_names_a_metric() -> None:
    names = {metric.name for metric in _metrics.ALL}
    assert len(names) == len(_metrics.ALL)
    found = []
    for file in RUNTIME.rglob("*.py"):
        if file.name == "_metrics.py":
            continue
        tree = ast.parse(file.read_text())
        imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        if any("prometheus_client" in ast.unparse(node) for node in imported):
            found.append(f"{file.name} imports prometheus_client")
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        found += [f"{file.name} names {text}" for text in texts if text in names]
    assert not found


@pytest.mark.parametrize("metric", _metrics.ALL, ids=lambda metric: metric.name)
def test_a_metric_appears_under_the_names_and_labels_that_are_declared(metric: _metrics.Metric) -> None:
    assert (RUNTIME / metric.patch.replace("-", "_")).exists() or (
        RUNTIME / f"{metric.patch.replace('-', '_')}.py"
    ).exists()
    assert metric.kind != "counter" or metric.name.endswith("_total")
    child = metric.child(LABELS if metric.scheduler else {}, **dict.fromkeys(metric.labels, "x"))
    {"counter": lambda: child.inc(2), "gauge": lambda: child.set(2), "histogram": lambda: child.observe(2)}[
        metric.kind
    ]()
    scrape = told()
    for name, labels in _metrics.series_names(metric).items():
        (seen, *_) = [found for found, _ in scrape.series(name)]
        assert set(seen) == {*labels, *(LABELS if metric.scheduler else ())}


def test_counts_are_carried_over_once_and_zero_makes_a_series() -> None:
    exported = _metrics.Exported(_metrics.ACCEPTED)
    for counts in ([(("1",), 3), (("2",), 0)], [(("1",), 3), (("2",), 0)], [(("1",), 5), (("2",), 0)]):
        exported.export(counts, LABELS)
    assert values(_metrics.ACCEPTED.name, "position") == {"1": 5.0, "2": 0.0}
    exported.export([(("1",), 2)], LABELS)  # it went back, so it began anew
    exported.export([(("1",), 4)], LABELS)
    assert values(_metrics.ACCEPTED.name, "position") == {"1": 9.0, "2": 0.0}


def test_an_error_of_a_patch_does_not_reach_upstreams_loop(caplog: pytest.LogCaptureFixture) -> None:
    counted = []

    def broken(labels: Any) -> None:
        raise ZeroDivisionError

    @_metrics.on_decode_step("some-patch", broken)
    def increment(self: Any, value: bool) -> None:
        counted.append(value)

    for _ in range(3):
        increment(SimpleNamespace(labels=LABELS), value=True)
    assert counted == [True] * 3
    assert [record.message for record in caplog.records if "some-patch" in record.message] == [
        "sglang-patches: some-patch: its metrics are not up to date, by an error"
    ]


def verify(drafts: list[int], steps: int, *, gone: tuple[int, ...] = ()) -> list[list[int]]:
    """Upstream's own method on what it reads of a verify pass: by request, so many draft tokens accepted of `steps`.

    Args:
        gone: requests that have finished (even places) or were retracted (odd ones).
    """
    result = SimpleNamespace(
        next_token_ids=torch.arange(len(drafts) * (steps + 1)),
        accept_lens=torch.tensor([count + 1 for count in drafts]),
        num_non_draft_tokens_per_req=1,
        block_accept_lens=None,
        cap_lens=None,
        speculative_output_stride=None,
        speculative_num_draft_tokens=steps + 1,
    )
    reporter = SimpleNamespace(
        snapshot_spec_decode_metrics=lambda *_: None,
        current_scheduler_metrics_enabled=True,
        metrics_collector=SimpleNamespace(labels=LABELS),
    )
    processor: Any = SimpleNamespace(
        metrics_reporter=reporter,
        model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
        advance_grammar_fsm=lambda *_: None,
    )
    batch: Any = SimpleNamespace(
        reqs=[
            SimpleNamespace(
                is_retracted=at in gone and at % 2 == 1,
                finished=lambda at=at: at in gone and at % 2 == 0,
                grammar=None,
                kv=SimpleNamespace(kv_committed_len=0),
                kv_committed_len=0,  # the same in 0.5.17
                spec_verify_ct=7,
                spec_num_correct_drafts=0,
                update_spec_correct_drafts_histogram=lambda drafts: None,
            )
            for at in range(len(drafts))
        ]
    )
    return SchedulerBatchResultProcessor._resolve_spec_v2_tokens(processor, result, batch)  # type: ignore[arg-type]


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> provenance._Acceptance:
    fresh = provenance._Acceptance()
    monkeypatch.setattr(provenance, "_acceptance", fresh)
    return fresh


def test_accepted_drafts_are_counted_by_position(acceptance: provenance._Acceptance) -> None:
    assert verify([2, 0, 1], steps=3) == [[0, 1, 2], [4], [8, 9]]
    assert values(_metrics.ACCEPTED.name, "position") == {"1": 2.0, "2": 1.0, "3": 0.0}
    assert values(_metrics.DRAFTED.name, "position") == {"1": 3.0, "2": 3.0, "3": 3.0}
    assert values(_metrics.VERIFIED.name, "tp_rank") == {"0": 3.0}


def test_a_position_that_was_not_drafted_was_not_rejected(acceptance: provenance._Acceptance) -> None:
    """--speculative-adaptive: 3 steps, then 1, then none."""
    verify([3, 3], steps=3)
    for _ in range(5):
        verify([1, 0], steps=1)
    verify([0, 0], steps=0)
    assert values(_metrics.DRAFTED.name, "position") == {"1": 12.0, "2": 2.0, "3": 2.0}
    assert values(_metrics.ACCEPTED.name, "position") == {"1": 7.0, "2": 2.0, "3": 2.0}
    assert values(_metrics.VERIFIED.name, "tp_rank") == {"0": 14.0}
    assert (acceptance.tokens, acceptance.passes) == (25, 14)


def test_the_pass_after_a_request_has_finished_is_not_counted(acceptance: provenance._Acceptance) -> None:
    verify([3, 3, 1, 2], steps=3, gone=(0, 1))
    assert values(_metrics.VERIFIED.name, "tp_rank") == {"0": 2.0}
    assert values(_metrics.ACCEPTED.name, "position") == {"1": 2.0, "2": 1.0, "3": 0.0}
    assert (acceptance.tokens, acceptance.passes) == (5, 2)
    verify([3, 3], steps=3, gone=(0, 1))
    assert (acceptance.tokens, acceptance.passes) == (5, 2)


def test_a_tree_has_the_depth_of_its_steps(acceptance: provenance._Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_eagle_topk=4, speculative_num_steps=2)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    verify([1], steps=7)  # 8 tokens
    assert values(_metrics.DRAFTED.name, "position") == {"1": 1.0, "2": 1.0}


class Event:
    """A CUDA event of a stream that the test moves on."""

    reached = 0.0
    issued = 0.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def record(self) -> None:
        self.at = Event.issued

    def query(self) -> bool:
        return Event.reached >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "read before the stream was there"
        return (end.at - self.at) * 1000


def test_times_on_a_device_are_read_when_it_is_done_and_never_before() -> None:
    times = PhaseTimes(DeviceClock(Event))
    for phase, seconds in ((Phase.DRAFT_DECODE, 1.0), (Phase.VERIFY, 4.0)):
        start = times.start()
        Event.issued += seconds
        times.end(phase, start)
    assert times.finished() == []
    Event.reached = 1.0
    assert times.finished() == [(Phase.DRAFT_DECODE, 1.0)]
    Event.reached = 5.0
    times.export(LABELS)
    assert values(f"{_metrics.SPEC_PHASE_SECONDS.name}_sum", "phase") == {"verify": 4.0}
    made = Event.made
    times.end(Phase.VERIFY, times.start())
    assert Event.made == made, "events that were read are used again"


def test_times_that_nobody_reads_do_not_pile_up() -> None:
    times = PhaseTimes(HostClock())
    for _ in range(phase_times.MOST_WAITING):
        times.end(Phase.VERIFY, times.start())
    assert times.start() is None
    assert len(times.finished()) == phase_times.MOST_WAITING
    assert times.start() is not None


def test_upstreams_phases_are_timed_and_an_idle_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for phase, method in (
        (Phase.VERIFY, eagle_worker_v2.EAGLEWorkerV2.verify),
        (Phase.DRAFT_DECODE, eagle_worker_v2.EagleDraftWorker.draft),
        (Phase.DRAFT_EXTEND, eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode),
    ):
        assert method.__wrapped__.__closure__ is None  # ours is around upstream's
        assert phase in [cell.cell_contents for cell in method.__closure__ if isinstance(cell.cell_contents, Phase)]
    times = PhaseTimes(HostClock())
    monkeypatch.setattr(phase_times, "phase_times", lambda: times)

    @phase_times.times("verify")
    def verify(self: Any, batch: Any, more: int = 0) -> int:
        return more

    for idle in (False, True):
        assert verify(None, SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda idle=idle: idle)), more=7) == 7
    ((phase, seconds),) = times.finished()
    assert phase is Phase.VERIFY
    assert 0 <= seconds < 1


@pytest.mark.parametrize(("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (14336, 16384), (16384, 16384)])
def test_sizes_are_rounded_up_to_a_power_of_two(size: int, rounded: int) -> None:
    assert 1 << paths.size_bits(size) == rounded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> paths.Calls:
    made = paths.Calls(wanted=True)
    monkeypatch.setattr(paths, "calls", made)
    return made


TP: Any = SimpleNamespace(unique_name="tp:0")


def test_all_reduces_before_the_first_decode_step_are_no_traffic(calls: paths.Calls) -> None:
    tensor = torch.ones(4, 7168, dtype=torch.bfloat16)
    for _ in range(7):  # before captures, tuning, and the prompt of the server's own request
        paths.note_all_reduce("pynccl", TP, tensor)
    calls.counts["tp:0", "ca", 16, True] += 61
    decode_step()
    assert values(_metrics.ALLREDUCE.name, "when") == {"warm_up": 7.0, "captured": 61.0}
    paths.note_all_reduce("pynccl", TP, tensor)
    paths.note_all_reduce("pynccl", TP, tensor[:3])  # another size of the same power of two
    paths.note_all_reduce("torch", TP, tensor[:1])
    for _ in range(2):
        decode_step()
    seen = {(labels["path"], labels["when"]): value for labels, value in told().series(_metrics.ALLREDUCE.name)}
    assert seen == {
        ("pynccl", "warm_up"): 7.0,
        ("ca", "captured"): 61.0,
        ("pynccl", "eager"): 2.0,
        ("torch", "eager"): 1.0,
    }
    assert set(values(_metrics.ALLREDUCE.name, "up_to_bytes")) == {"65536", "16384"}
    assert set(values(_metrics.ALLREDUCE.name, "group")) == {"tp"}


def test_all_reduces_are_counted_only_where_the_server_has_metrics(
    calls: paths.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As upstream's context says when a group is made; nothing is asked, and nothing can raise, in a forward."""
    context: dict[str, Any] = {}

    def get_observability() -> Any:
        return context["observability"]  # KeyError: not published in this process

    monkeypatch.setattr("sglang.srt.runtime_context.get_observability", get_observability)
    coordinator: Any = SimpleNamespace(world_size=1, unique_name="tp:0", pcie_ipc_comm=None)
    monkeypatch.setattr(lane.here(), "pcie_ipc_allreduce", lambda *_: False)
    for published, counted in ((None, 0), (False, 0), (True, 1)):
        if published is not None:
            context["observability"] = SimpleNamespace(enable_metrics=published)
        pcie_nccl_allreduce.after_communicators(coordinator, "tp")
        context.clear()
        paths.note_all_reduce("torch", TP, torch.ones(3))
        assert calls.counts.total() == counted


def test_every_way_of_upstreams_all_reduce_is_noted(calls: paths.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_step()  # none before it
    summed: list[str] = []

    class Comm:
        disabled = False

        def __getattr__(self, name: str) -> Any:
            if name.startswith("should"):
                return lambda tensor: True

            def done(tensor: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
                summed.append(name)
                return tensor

            return done

        def change_state(self, enable: bool) -> Any:
            return contextlib.nullcontext()

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: summed.append("torch"))
    kind = parallel_state.GroupCoordinator

    def group(**comms: Any) -> Any:
        made = SimpleNamespace(unique_name="tp:0", world_size=2, device_group=None, local_size=2, _fi_workspace_hint="")
        names = ("ca_comm", "qr_comm", "pynccl_comm", "pymscclpp_comm", "torch_symm_mem_comm", "pcie_ipc_comm")
        made.__dict__.update(dict.fromkeys(names), **comms)
        made._all_reduce_in_place = lambda tensor: kind._all_reduce_in_place(made, tensor)
        return made

    tensor = torch.ones(3, 100)  # 1200 bytes
    for method, name in (
        ("ca", "ca_comm"),
        ("qr", "qr_comm"),
        ("torch_symm_mem", "torch_symm_mem_comm"),
        ("pymscclpp", "pymscclpp_comm"),
        ("pynccl", "pynccl_comm"),
    ):
        kind._all_reduce_out_place(group(**{name: Comm()}), tensor, method)
    has_pcie_ipc = lane.here().has_pcie_ipc
    if has_pcie_ipc:
        kind._all_reduce_out_place(group(pcie_ipc_comm=Comm(), pynccl_comm=Comm()), tensor, "pcie_ipc")
    kind._all_reduce_in_place(group(pynccl_comm=Comm()), tensor)
    kind._all_reduce_in_place(group(torch_symm_mem_comm=Comm()), tensor)
    kind._all_reduce_in_place(group(), tensor)
    monkeypatch.setattr(parallel_state, "is_shm_available", lambda *_: False)
    kind.all_reduce(group(), tensor)
    assert len(summed) == 9 + has_pcie_ipc
    decode_step()
    assert values(_metrics.ALLREDUCE.name, "path") == {
        **dict.fromkeys(("ca", "qr", "pymscclpp", *(["pcie_ipc"] * has_pcie_ipc)), 1.0),
        **dict.fromkeys(("torch_symm_mem", "pynccl", "torch"), 2.0),
    }
    assert set(values(_metrics.ALLREDUCE.name, "up_to_bytes")) == {"2048"}
    assert set(values(_metrics.ALLREDUCE.name, "when")) == {"eager"}


def test_passes_of_oea_reach_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oea_topk, "counts", oea_topk.Counts())
    monkeypatch.setattr(oea_topk, "_exported", _metrics.Exported(_metrics.OEA_PASSES))
    oea_topk.counts.passes["verify", "graph", "applied"] += 4
    oea_topk.exports_counts(lambda self, value: None)(SimpleNamespace(labels=LABELS), value=True)
    assert values(_metrics.OEA_PASSES.name, "result") == {"applied": 4.0}


def test_experts_of_oea_reach_metrics_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    experts = oea_topk.Experts(clock=lambda: now[0])
    monkeypatch.setattr(oea_topk, "experts", experts)
    step = oea_topk.exports_counts(lambda self, value: None)
    collector = SimpleNamespace(labels=LABELS)
    step(collector, value=True)
    assert _metrics.OEA_EXPERTS.name not in told()
    place = experts.place(torch.device("cpu"), "verify", capturing=False)
    assert place is not None
    place += torch.tensor([30, 50, 11])
    step(collector, value=True)
    assert values(_metrics.OEA_EXPERTS.name, "set") == {"loaded": 30.0, "upstream": 50.0}
    assert values(_metrics.OEA_LAYERS.name, "phase") == {"verify": 11.0}
    place += torch.tensor([3, 5, 1])
    step(collector, value=True)
    assert values(_metrics.OEA_LAYERS.name, "phase") == {"verify": 11.0}
    now[0] += 1.5
    step(collector, value=True)
    assert values(_metrics.OEA_EXPERTS.name, "set") == {"loaded": 33.0, "upstream": 55.0}
