"""benchmark/verify_step: what counts as a cycle, how its parts add up, and the geometry that is served."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark.verify_step import probe, run, shard

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


def cycle(recorder: probe.Probe, clock: list[float], size: int, seconds: tuple[float, float, float]) -> None:
    for part, taken in zip(probe.PARTS, seconds, strict=True):

        def work(worker: Any, given: Any, taken: float = taken) -> None:
            clock[0] += taken

        recorder.timed(part, work)(None, batch(size))
        clock[0] += 0.0005  # what the host does between parts


def test_a_cycle_is_its_three_parts_and_the_gap(clock: list[float]) -> None:
    recorder = probe.Probe()
    recorder.begin(eager=False)
    for _ in range(3):
        cycle(recorder, clock, 2, (0.001, 0.004, 0.002))
    taken = recorder.take()
    assert len(taken) == 2  # the last has no next one that tells its end
    for one in taken:
        assert one["batch_size"] == 2
        assert one["draft_decode"] == pytest.approx(1)
        assert one["verify"] == pytest.approx(4)
        assert one["draft_extend"] == pytest.approx(2)
        assert one["host_gap"] == pytest.approx(1.5)
        assert one["cycle"] == pytest.approx(8.5)


def test_cycles_beside_a_prefill_or_another_batch_size_are_no_samples(clock: list[float]) -> None:
    recorder = probe.Probe()
    recorder.begin(eager=False)
    cycle(recorder, clock, 1, (0.001, 0.001, 0.001))
    recorder.interrupt()
    cycle(recorder, clock, 1, (0.001, 0.001, 0.001))
    cycle(recorder, clock, 2, (0.001, 0.001, 0.001))
    assert recorder.take() == []
    cycle(recorder, clock, 2, (0.001, 0.001, 0.001))  # after take nothing is recorded
    assert recorder.take() == []


def test_eager_makes_every_runner_decline() -> None:
    wrapped = probe._unless_eager(lambda self, given: True)
    probe.probe.eager = True
    try:
        assert wrapped(None, None) is False
    finally:
        probe.probe.eager = False
    assert wrapped(None, None) is True


def sample(turn: int, mode: str, cycles: list[float]) -> dict[str, Any]:
    parts = {"draft_decode": 1.0, "verify": 2.0, "draft_extend": 1.0, "host_gap": 0.5, "batch_size": 4}
    return {"round": turn, "batch_size": 4, "mode": mode, "cycles": [{**parts, "cycle": c} for c in cycles]}


def test_the_table_leaves_warm_up_out_and_puts_both_paths_side_by_side() -> None:
    samples = [sample(0, "graph", [99.0]), sample(1, "eager", [40.0]), sample(1, "graph", [4.0, 6.0, 5.0])]
    rows = run.summary(samples)
    assert [(row["mode"], row["cycles"], row["cycle"]) for row in rows] == [("graph", 3, 5.0), ("eager", 1, 40.0)]
    lines = run.table(rows, [{"batch_size": 4, "mode": "graph", "busy": 3.25}]).splitlines()
    assert lines[2] == "| 4 | graph | 1.00 | 2.00 | 1.00 | 0.50 | 5.00 | 4.20-5.80 | 3.25 | 3 |"
    assert "| - | 1 |" in lines[3]


def test_a_rank_has_an_eighth_of_the_published_model(tmp_path: Path) -> None:
    target, draft = (json.loads((place / "config.json").read_text()) for place in shard.write(tmp_path))
    assert target["num_attention_heads"] * shard.RANKS == 64
    assert target["moe_intermediate_size"] * shard.RANKS == 2048
    assert (target["n_routed_experts"], target["num_experts_per_tok"], target["kv_lora_rank"]) == (384, 8, 512)
    assert draft["hidden_size"] == target["hidden_size"] == 7168
    assert max(draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) < target["num_hidden_layers"]
