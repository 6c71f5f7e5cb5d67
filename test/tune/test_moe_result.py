"""`tune moe`: what is told of samples: the result, its floors, the folder, and why there is no table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_made import (
    BOTH,
    COMMITTED,
    COMMITTED_TOKENS,
    FAST,
    FASTER,
    KIMI,
    OWN,
    SLOW,
    SLOWER,
    final,
    layers,
    measured_by_two,
    one_count,
)

from sglang_patches.tune.moe import journal, parent, report


@pytest.fixture
def measured(tmp_path: Path) -> parent.Request:
    return measured_by_two(tmp_path)


def test_the_result_of_two_gpus(measured: parent.Request) -> None:
    found = parent.result(measured)
    assert [line.tokens for line in found.lines] == [1, 8, 16]
    assert [line.tokens for line in found.better] == [1]
    # At 8 the layer is no faster, at 16 it was not reached: upstream's own stands there, and behind it.
    assert found.tables["gate_up"] == {1: FAST.entry(), **dict.fromkeys((8, 16, 18), OWN.entry()), 385: SLOW.entry()}
    assert found.failed == [f"down {SLOW}: out of shared memory"]
    # 12 us for gate_up of 16 tokens is faster than the copy's 4 TB/s.
    rate = KIMI.active(16) * KIMI.expert_bytes("gate_up") / 12e-6
    assert found.rate.bytes_a_second == pytest.approx(rate)
    assert found.rate.of == f"gate_up at 16 tokens, {FAST}"
    assert found.lines[0].floor_us == pytest.approx(8 * 3 * 256 * 7168 * 2 / rate * 1e6)
    assert found.broken_floors == []


def test_a_floor_above_a_measurement_is_told(measured: parent.Request) -> None:
    """Products alone took 19 us and the layer with ours 1: then bytes, experts or times are reckoned wrong."""
    file = measured.out / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"tuned":[', '"tuned":[0.'))
    found = parent.result(measured)
    assert found.broken_floors == [1]
    report.write(found, {})
    readme = (measured.out / "README.md").read_text()
    assert "At 1 tokens less than that was measured, so there it is no floor" in readme
    assert "| no floor: " in readme
    told = json.loads((measured.out / "tiles.json").read_text())
    assert [row["floor_holds"] for row in told["rows"]] == [False, True, True]


def test_a_copy_that_is_slower_than_reading_is_no_floor() -> None:
    """A run on an H200 noted 2.8 TB/s for a copy, and its own kernels read 4.5."""
    request = parent.Request(KIMI, COMMITTED_TOKENS, COMMITTED, ("0",))
    found = parent.result(request)
    copied = found.facts["bandwidth"]
    assert copied < 2.8e12
    assert 4.4e12 < found.rate.bytes_a_second < 4.8e12, "of the data sheet"
    assert found.broken_floors == []
    assert all(0.5 < line.floor_us / line.verdict.tuned < 1 for line in found.lines if line.verdict)
    by_copy = [replace(line, floor_us=line.floor_us * found.rate.bytes_a_second / copied) for line in found.lines]
    assert not any(line.floor_holds for line in by_copy)


def test_the_committed_result_is_what_its_samples_give(tmp_path: Path) -> None:
    for file in COMMITTED.glob("samples*.jsonl"):
        shutil.copy(file, tmp_path)
    written = json.loads((COMMITTED / "tiles.json").read_text())
    found = parent.result(parent.Request(KIMI, COMMITTED_TOKENS, tmp_path, ("0",)))
    for file in report.write(found, written["provenance"]):
        assert file.read_text() == (COMMITTED / file.relative_to(tmp_path)).read_text()
    assert json.loads((tmp_path / "tiles.json").read_text()) == written
    assert (COMMITTED / "README.md").read_text().startswith((tmp_path / "README.md").read_text())


def test_the_time_of_a_result_is_that_of_its_measuring(measured: parent.Request) -> None:
    """Of samples that tell no time, as those of earlier releases, what the result told before."""

    def written(time: str) -> str:
        report.write(parent.result(measured), {"time": time})
        return str(json.loads((measured.out / "tiles.json").read_text())["when"])

    assert [written(time) for time in ("2026-01-02", "2026-09-09")] == ["2026-01-02"] * 2
    first = measured.out / "samples-0.jsonl"
    late = final(1, gate_up={OWN: 20.0, FAST: 12.0}, down={OWN: 10.0, FAST: 7.0}) | {"at": "2026-02-03"}
    for record in (late, late | {"at": "2026-01-31"}, {"record": "done", "at": "2026-09-09"}):
        journal.append(first, record)
    assert written("2026-09-09") == "2026-02-03"
    for file in measured.out.glob("samples*.jsonl"):
        records = [record | {"at": "2026-01-01"} for record in journal.read(file)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert written("2026-09-09") == "2026-01-01", "what is measured tells it, whatever was told before"


def test_a_report_keeps_what_measured(measured: parent.Request) -> None:
    command = ["python", "-m", "sglang_patches.cli", "tune", "moe", "--out", "there"]
    report.write(parent.result(measured), {"command": command, "code": "x"})
    kept = report.measured_by(measured.out)
    assert kept is not None
    assert kept["code"] == "x"
    assert "    sglang-patches tune moe --out there\n" in (measured.out / "README.md").read_text()
    assert report.measured_by(measured.out / "configs") is None


def test_the_folder(measured: parent.Request) -> None:
    found = parent.result(measured)
    written = report.write(found, {"code": "x"})
    assert [file.name for file in written] == ["T.json", "T_down.json"]
    readme = (measured.out / "README.md").read_text()
    assert "0.75" in readme
    assert "| 16 | - | - | not reached |" in readme
    told = json.loads((measured.out / "tiles.json").read_text())
    assert [row["ours"] for row in told["rows"]] == [True, False, False]
    assert told["provenance"] == {"code": "x"}


def test_outputs_that_differ_keep_ours_out(measured: parent.Request) -> None:
    file = measured.out / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"differs":0.0', '"differs":0.05', 1))
    assert parent.result(measured).better == []


def test_without_a_gain_there_is_no_table(measured: parent.Request) -> None:
    (measured.out / "samples-0.jsonl").unlink()
    found = parent.result(measured)
    assert found.tables == {}
    assert report.write(found, {}) == []
    # One token count was compared and lost, the other was not reached: that is no finding yet.
    assert report.headline(found) == "Not measured far enough to tell at 16 tokens: there is no table yet."
    readme = (measured.out / "README.md").read_text()
    assert "## Why there is no table\n\n- at 16 tokens: ours is faster by its single products, and the whole" in readme
    assert "- at 8 tokens: the whole layer is not faster with ours beyond chance" in readme
    assert "larger `--seconds` than 240" in readme
    assert "the tables hold" not in readme


@pytest.mark.parametrize(
    ("us", "times", "differs", "headline", "said"),
    [
        ({}, [], 0.0, "Not measured far enough", "no pair of configurations was measured"),
        (SLOWER, [], 0.0, "not beaten", "upstream's own choice is the fastest that was found"),
        (FASTER, [(40, 30)], 0.0, "Not measured far enough", "the whole layer was not measured often enough"),
        (FASTER, [(40, 41), (40, 39), (40, 40)], 0.0, "not beaten", "do not name this one"),
        (FASTER, [(40, 30), (41, 31), (40, 30.1)], 0.5, "gives other outputs", "`outputs_differ` in tiles.json"),
    ],
)
def test_a_readme_without_a_table_says_why_and_what_to_do(
    tmp_path: Path, us: dict[str, Any], times: list[Any], differs: float, headline: str, said: str
) -> None:
    final_ = final(1, **us) if us else {"record": "begin", "gemm": "down", "tokens": 1, "config": str(FAST)}
    of_layer = [record | {"differs": differs} for record in layers(*times, pair=BOTH)] if times else []
    found = one_count(tmp_path, final_, *of_layer)
    assert report.write(found, {}) == []
    assert headline in report.headline(found)
    readme = (tmp_path / "README.md").read_text()
    assert "## Why there is no table" in readme
    assert said in readme
    assert ("goes on where it was" in readme) == ("far enough" in headline)


def test_a_table_that_later_samples_do_not_bear_is_removed(tmp_path: Path) -> None:
    first = one_count(tmp_path, final(1, **FASTER), *layers((40, 30), (41, 31), (40, 30.1), pair=BOTH))
    written = report.write(first, {})
    assert all(file.exists() for file in written)
    later = one_count(tmp_path, final(1, **FASTER), *layers((30, 40), (31, 41), pair=BOTH))
    assert report.write(later, {}) == []
    assert not any(file.exists() for file in written)
