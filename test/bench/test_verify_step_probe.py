"""bench/verify_step/probe.py: what counts as a cycle, how its parts add up; kernels.py: which part a kernel is of."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.bench.verify_step import host, kernels, probe

BUSY = SimpleNamespace(is_idle=lambda: False)


def batch(size: int) -> Any:
    return SimpleNamespace(seq_lens=[0] * size, forward_mode=BUSY)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; each part below moves it on."""
    now = [0.0]
    monkeypatch.setattr(probe, "_mark", lambda: now[0])
    monkeypatch.setattr(probe, "_synchronize", lambda: None)
    return now


def part(recorder: probe.Probe, clock: list[float], name: str, size: int, seconds: float, sampling: float = 0) -> None:
    def work(worker: Any, given: Any) -> None:
        clock[0] += seconds
        if sampling:
            recorder.sampling()
            clock[0] += sampling

    recorder.timed(name, work)(None, batch(size))
    clock[0] += 0.0005  # what the host does between parts


def cycle(recorder: probe.Probe, clock: list[float], size: int) -> None:
    part(recorder, clock, "draft_decode", size, 0.001)
    part(recorder, clock, "verify", size, 0.004, sampling=0.0003)
    part(recorder, clock, "draft_extend", size, 0.002)


def test_a_cycle_is_its_parts_and_the_gap(clock: list[float]) -> None:
    recorder = probe.Probe()
    recorder.begin(eager=False)
    for _ in range(3):
        cycle(recorder, clock, 2)
    taken = recorder.take(2)["ms"]
    expected = {
        "draft_decode": 1, "verify": 4, "sampling": 0.3, "draft_extend": 2, "host_gap": 1.5, "cycle": 8.8
    }  # fmt: skip
    assert taken.keys() == expected.keys()
    for name, milliseconds in expected.items():
        assert taken[name] == pytest.approx([milliseconds] * 2)  # the last has no next one that tells its end


def test_without_speculation_a_cycle_is_decode_and_sampling(clock: list[float]) -> None:
    recorder = probe.Probe()
    recorder.parts = probe.PLAIN
    recorder.begin(eager=False)
    for _ in range(3):
        part(recorder, clock, "decode", 1, 0.002, sampling=0.0001)
    taken = recorder.take(1)["ms"]
    assert taken["decode"] == pytest.approx([2.0, 2.0])
    assert taken["sampling"] == pytest.approx([0.1, 0.1])
    assert taken["cycle"] == pytest.approx([2.6, 2.6])


def test_the_host_is_timed_before_the_cycles_and_after(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([1.0, 1.5, 2.0, 2.5])
    monkeypatch.setattr(host, "loop", lambda: next(told))
    recorder = probe.Probe()
    recorder.begin(eager=False)
    assert recorder.take(1)["host_ms"] == [1.0, 1.5]
    recorder.begin(eager=False)
    assert recorder.take(1)["host_ms"] == [2.0, 2.5]


def test_the_host_s_loop_takes_longer_where_the_interpreter_does() -> None:
    """A trace function is a slow interpreter: each line of the loop calls it."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return trace

    quick, before = min(host.loop() for _ in range(3)), sys.gettrace()
    sys.settrace(trace)
    try:
        slow = host.loop()
    finally:
        sys.settrace(before)
    assert slow > 2 * quick > 0


def test_cycles_beside_a_prefill_or_of_another_batch_size_are_no_samples(clock: list[float]) -> None:
    recorder = probe.Probe()
    recorder.begin(eager=False)
    cycle(recorder, clock, 1)
    recorder.interrupt()
    recorder.sampling()  # of the prefill's own tokens
    cycle(recorder, clock, 1)
    cycle(recorder, clock, 2)
    cycle(recorder, clock, 2)
    assert len(recorder.take(2)["ms"]["cycle"]) == 1
    assert recorder.take(1)["ms"]["cycle"] == []
    cycle(recorder, clock, 2)  # after take nothing is recorded
    assert len(recorder.take(2)["ms"]["cycle"]) == 1


def test_eager_makes_every_runner_decline() -> None:
    wrapped = probe._unless_eager(lambda self, given: True)
    said: list[bool] = []

    def ask(worker: Any, given: Any) -> None:
        said.append(wrapped(said, None))

    part = probe.probe.timed("verify", ask)
    try:
        for eager in (True, False, False):
            probe.probe.begin(eager)
            part(None, batch(1))
            part(None, batch(1))
        assert said == [False] * 2 + [True] * 4
        assert probe.probe.take(1)["graphs"] == {"list": [2, 2]}
        wrapped(said, None)  # a prefill's, outside a part
        assert probe.probe.take(1)["graphs"] == {"list": [2, 2]}
    finally:
        probe.probe.eager = False


MARKER = "void at::cuda::(anonymous namespace)::spin_kernel(long)"
ENTERED = [("prefill", 0), ("verify", 2), ("sampling", 2), ("host_gap", 2), ("verify", 1)]
EVENTS = [
    (5, 5, "before any marker"),
    (10, 1, MARKER), (12, 9, "prefill's"),
    (30, 1, MARKER), (32, 1000, "gemm"), (1040, 1000, "gemm"), (1500, 1000, "on another stream"),
    (3000, 1, MARKER), (3002, 500, "argmax"),
    (4000, 1, MARKER), (4002, 10, "copy"),
    (5000, 1, MARKER), (5002, 700, "gemm"),
]  # fmt: skip


def test_a_kernel_is_of_the_part_whose_marker_came_last() -> None:
    told = kernels.attribute(EVENTS, ENTERED, batch_size=2)
    assert [(part, name) for part, name, *_ in told] == [
        ("verify", "gemm"),
        ("verify", "gemm"),
        ("verify", "on another stream"),
        ("sampling", "argmax"),
        ("host_gap", "copy"),
    ]
    summed = kernels.summary(told, cycles=2)
    assert summed["kernels"][0] == {"part": "verify", "name": "gemm", "launches": 1.0, "us": 1.0}
    assert summed["operations"] == 2.5
    # 1000 + 1000, of the overlapping one 460 more, then 500 and 10 ns, over two cycles
    assert summed["busy"] == pytest.approx((1000 + 1000 + 460 + 500 + 10) / 1e6 / 2, abs=1e-4)


def test_where_markers_are_missing_no_part_is_guessed() -> None:
    told = kernels.attribute(EVENTS[2:], ENTERED, batch_size=2)
    assert {part for part, *_ in told} == {None}
    assert len(told) == 7
