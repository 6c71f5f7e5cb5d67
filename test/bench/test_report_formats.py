"""The report page shows every committed result, and what tools and benchmark scripts write in formats of their own."""

from __future__ import annotations

import json
from pathlib import Path

from bench.html_page import parsed
from sglang_patches.bench.report import page

ROOT = Path(__file__).parents[2]
COMMITTED = [ROOT / root for root in page.ROOTS]


def test_every_committed_result_is_shown() -> None:
    """Also of the formats from before result folders, by figures that lie in the files."""
    found = page.find(COMMITTED)
    assert not found.unread
    assert not found.skipped
    shown = {section.where.removeprefix(f"{ROOT}/"): section for section in found.sections}
    tune = shown["benchmark/allreduce/results/2xh200-nccl2.30.7/peer-access-on.json"]
    assert tune.headline.startswith("graphs-only takes 0.35 of the time")
    assert ["graphs-only", "0.3535"] in [[cell.text for cell in row[:2]] for row in tune.tables[0].rows]
    assert tune.plot
    assert "b9000baafe1c" in tune.code[0][2][0]
    step = shown["benchmark/results/verify_step/h200-2026-11-29.json"]
    assert step.headline == "a cycle of 16 requests: graph 4.51 ms, eager 32.21 ms"
    assert len(step.charts) == 1
    speed = shown["benchmark/tiny_kimi/results/speed-cpu.json"]
    assert [cell.text for cell in speed.tables[0].rows[0]][1:4] == ["87.23", "47.52", "1.836"]
    agree = shown["benchmark/tiny_kimi/results/tp2-2xh200.json"]
    assert agree.headline == "4 of 16 answers equal, 0 not explained by rounding"
    assert len(agree.tables[0].rows) == 12
    stress = shown["benchmark/allreduce/results/2xh200-stress/default-profile.json"]
    assert stress.headline == "0 wrong sums in 8,000 steps"
    again = {name: shown[f"benchmark/allreduce/results/2xh200-stress-2/{name}.json"] for name in ("broken", "mixing")}
    assert again["broken"].headline == "2 wrong sums in 50 steps (one was planted on purpose)"
    assert again["mixing"].headline == "time only: no sums were checked"
    assert again["mixing"].tables[0].columns[:3] == ["rank", "1 rows", "2 rows"]
    slices = shown["benchmark/results/h200-sliced-verify/shard.json"]
    assert slices.headline == "shard: slices up to 16 requests, faster than an eager pass at every measured size"
    times = next(table for table in slices.tables if table.title == "shard: ms, medians over cycles")
    assert [cell.text for cell in times.rows[-1]][:4] == ["16", "on", "60", "12.68"]
    tiles = shown["benchmark/results/h200-moe-tune/tiles.json"]
    assert (tiles.kind, tiles.when[:10], tiles.warnings) == ("tune moe", "2026-11-30", [])
    assert [cell.text for cell in tiles.tables[0].rows[0]][:4] == ["1", "58.2", "31.2", "0.535 (0.533 to 0.537)"]
    assert tiles.command.endswith("tune moe --out h200-moe-tune --seconds 94")
    quality = shown["benchmark/results/cpu-oea-quality/samples.json"]
    assert (quality.kind, quality.headline) == ("oea.quality", "21 rows")
    assert quality.tables[0].columns[:6] == ["phase", "requests", "tokens", "rule", "kl", "kl p99"]
    assert [cell.text for cell in quality.tables[0].rows[1]][:4] == ["verify", "1", "4", "k0=1"]
    assert "0.05096" in quality.tables[0].rows[1][4].text
    assert "04020aae8579" in quality.code[0][2][0]
    assert quality.command.startswith("python -m benchmark.oea.quality")
    load = shown["benchmark/results/cpu-endurance/load.json"]
    assert load.headline.startswith("1000 requests in ")
    kinds = next(table for table in load.tables if table.title == "kinds")
    assert [cell.text for cell in kinds.rows[0]][:2] == ["bad", "150"]
    assert load.command.startswith("python -m benchmark.endurance.run")
    assert load.machine
    decode = shown["benchmark/results/h200-spec-gain/decode.json"]
    assert decode.headline.startswith("upstream-none gives 1.002 (0.995 to 1.01) times the tokens/s of none at batch 1")
    first = [cell.text for cell in decode.tables[0].rows[0]]
    assert first == ["1", "-", "156.9", "157.3", "1.002", "0.9947 to 1.010 SAME", "4"]
    assert decode.tables[0].rows[0][5].tone == "same"
    assert [table.title for table in decode.tables] == [
        "tokens per second of a batch: whole answers",
        "greedy answers of two engines", "first differences from the first engine of none", "engines"
    ]  # fmt: skip
    assert [cell.text for cell in decode.tables[1].rows[0]][:3] == ["none and upstream-none", "16", "11 of 128"]
    gain = shown["benchmark/results/h200-spec-gain/tokens.json"]
    assert gain.tables[0].columns[-1] == "fixed breaks even"
    assert gain.tables[0].rows[0][-1].text == "below 2.69"
    host = shown["benchmark/results/h200-host-cycle/host.json"]
    assert host.headline == "of 3.13 ms a pass the scheduler waits for the GPU for 0.01"
    assert [cell.text for cell in host.tables[0].rows[0]] == ["waits for the GPU", "0.008600"]
    parsed(page.render(found))


def test_a_script_that_measures_is_shown_by_its_rows(tmp_path: Path) -> None:
    """As the scripts write that compare kernels: figures inside figures, and samples that stay in the file."""
    kernels = {"extend": {"median_us": 2.5, "samples": [1.0, 2.5, 3.0, 9.0]}, "split": {"failed": "no memory"}}
    cell = {"batch": 1, "kernels": kernels, "outcome": {"result": "applied"}}
    data = {"when": "2026-11-30", "command": ["python", "-m", "benchmark.x.run"], "code_state": {"id": "abc"},
            "seconds": 3.5, "cells": [cell], "left_out": {}}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(data))
    found = page.find([tmp_path])
    assert not found.unread + found.skipped
    (section,) = found.sections
    assert (section.kind, section.headline, section.when) == ("x.run", "1 cells", "2026-11-30")
    assert section.tables[0].columns == ["batch", "kernels extend median_us", "kernels split failed"]
    assert [cell.text for cell in section.tables[0].rows[0]] == ["1", "2.500", "no memory"]
    assert ("seconds", "3.500") in section.facts


def test_an_older_result_that_is_damaged_is_named(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    file.write_text(json.dumps({"ratio": 1, "interval_95": [1], "a": {}, "b": {}}))
    found = page.find([tmp_path])
    assert len(found.unread) == 1
    assert str(file) in found.unread[0]
    assert "benchmark.tiny_kimi.speed" in found.unread[0]
