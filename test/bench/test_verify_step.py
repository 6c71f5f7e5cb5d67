"""bench/verify_step: bytes and floors worked by hand, the grid, the journal that continues, and what is written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_patches.bench import findings
from sglang_patches.bench.verify_step import arguments, floor, journal, plot, reading, render, rows
from sglang_patches.errors import PatchError

from .cycles_made import EXPERTS, MODELS, TARGET, made_grid, records, write


def test_bytes_of_a_cycle_worked_by_hand() -> None:
    """Batch 2 at context 100, chains of 4 tokens: 2 forwards of the draft, 8 rows in verify."""
    told = floor.part_bytes(MODELS, EXPERTS, batch_size=2, context=100, tokens=4)
    assert told == {
        "draft_decode": {"weights": 140, "experts": 0, "kv": 2 * 2 * 100 * 2, "embedding": 2 * 2 * 10},
        "verify": {"weights": 1000, "experts": 550 + 600, "kv": 2 * 100 * 6, "embedding": 8 * 10},
        "sampling": {"logits": 8 * 50 * 4},
        "draft_extend": {"weights": 100, "experts": 0, "kv": 2 * 100 * 2, "embedding": 8 * 10},
    }


def test_a_chain_of_two_needs_no_draft_forward_and_decode_reads_one_row() -> None:
    assert sum(floor.part_bytes(MODELS, EXPERTS, 2, 100, tokens=2)["draft_decode"].values()) == 0
    plain = floor.part_bytes({"target": TARGET}, {"decode": {"1": 2, "2": 1}}, 3, 10, tokens=0)
    assert plain == {
        "decode": {"weights": 1000, "experts": 400, "kv": 180, "embedding": 30},
        "sampling": {"logits": 3 * 50 * 4},
    }


def test_a_floor_is_bytes_over_bandwidth() -> None:
    assert floor.milliseconds(4.2e9, 4200) == pytest.approx(1)


class Pool:
    """A KV pool as upstream's: rows of slots."""

    def __init__(self, **buffers: list[torch.Tensor]) -> None:
        self.__dict__.update(buffers)


def test_a_token_s_bytes_come_from_the_pool_s_buffers() -> None:
    """MLA of Kimi-K2.5: 576 numbers of 2 bytes a layer; ordinary attention: keys and values."""
    mla = [torch.zeros(11, 1, 576, dtype=torch.bfloat16)] * 12
    assert reading.kv_token_bytes(Pool(kv_buffer=mla)) == 12 * 576 * 2
    keys = [torch.zeros(7, 2, 64)]
    assert reading.kv_token_bytes(Pool(k_buffer=keys, v_buffer=keys)) == 2 * 2 * 64 * 4
    with pytest.raises(ValueError, match="Pool"):
        reading.kv_token_bytes(Pool())


def test_a_copy_is_counted_read_and_written() -> None:
    told = reading.copy_bandwidth(torch.device("cpu"))
    assert told["copied_mib"] == 64
    assert 0.1 < told["gb_per_s"] < 5000


def test_turns_leave_slow_cells_out_and_let_modes_change_places() -> None:
    turns = list(made_grid().turns())
    assert [(t.batch_size, t.mode) for t in turns if t.round == 0 and t.context == 1024] == [
        (1, "graph"), (1, "eager"), (8, "graph"), (8, "eager"),
    ]  # fmt: skip
    assert [(t.batch_size, t.mode) for t in turns if t.round == 1 and t.context == 32768] == [
        (1, "eager"), (1, "graph"), (8, "graph"),
    ]  # fmt: skip
    assert any(t.batch_size == 8 and t.context == 32768 and t.mode == "eager" for t in made_grid(
        eager_everywhere=True).turns())  # fmt: skip
    assert {t.tokens for t in turns if t.round == 0} == {8}
    # On a CPU there is nothing but eager, so nothing is left out.
    assert len(list(made_grid(modes=["eager"], rounds=1).turns())) == 8


def test_the_pool_holds_every_longest_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    chosen = arguments.Chosen(tmp_path, tmp_path, dummy=True, cuda=True, grid=made_grid(batch_sizes=[1, 16]))
    words = chosen.arguments(8)
    value = {word: words[at + 1] for at, word in enumerate(words) if word.startswith("--") and at + 1 < len(words)}
    assert int(value["--max-total-tokens"]) >= 16 * (32768 + 32 + 8)
    assert int(value["--context-length"]) >= 32768 + 32 + 8
    assert (value["--speculative-num-steps"], value["--speculative-num-draft-tokens"]) == ("7", "8")
    assert chosen.vocabulary() == 77
    assert not any("speculative" in word for word in chosen.arguments(0))
    assert str(tmp_path.parent) not in " ".join(chosen.shown(8))


def test_rows_have_medians_floors_and_decode_steps() -> None:
    made = rows.rows({0: records(0, "a", [1.0, 1.0]), 4: records(4, "b", [2.0, 3.0, 4.0])})
    assert [(row["draft_tokens"], row["mode"], row["cycles"]) for row in made] == [
        (0, "graph", 3), (0, "eager", 1), (4, "graph", 4), (4, "eager", 1),
    ]  # fmt: skip
    cycle = made[2]["parts"]["cycle"]
    assert (cycle["ms"], made[2]["decode_steps"], made[0]["decode_steps"]) == (2.5, 2.5, None)
    # 1e6 bytes a second: 1000 weights + 1150 experts + 1200 KV + 80 embedding = 3.43 ms
    assert made[2]["parts"]["verify"] == {"ms": 0.5, "p10": 0.5, "p90": 0.5, "floor_ms": 3.43, "times_floor": 0.15}
    assert "floor_ms" not in made[2]["parts"]["host_gap"]
    assert made[2]["experts_per_layer"] == 4.2
    assert [row["graph_share"] for row in made] == [1, 0, 1, 0]
    assert rows.headline(made) == (
        "At batch 2 and 100 tokens of context an EAGLE-3 cycle of 4 tokens takes 2.50 ms from CUDA graphs, "
        "0.4 times what its bytes need (6.59 ms); that is 2.50 decode steps."
    )


def test_a_slow_host_is_told_beside_the_cycles_that_it_slowed(tmp_path: Path) -> None:
    """1.0 ms in every round of the first row; 1.0 and 3.0 in those of the second. Records of before have none."""
    plain, chain = records(0, "a", [1.0]), records(4, "b", [2.0])
    plain[2]["host_ms"] = plain[3]["host_ms"] = [0.9, 1.1]
    chain[2]["host_ms"], chain[3]["host_ms"] = [1.1, 0.9], [0.5, 5.5]
    made = rows.rows({0: plain, 4: chain})
    assert [(row["host_ms"], row["host_most_ms"]) for row in made] == [
        (1.0, 1.0), (None, None), (2.0, 3.0), (None, None),
    ]  # fmt: skip
    assert [rows.flat(row)["host_ms"] for row in made] == [1.0, None, 2.0, None]
    assert [line.split(" | ")[-1] for line in render.table(made).splitlines()] == [
        "host |", "--- |", "1.00x |", "- |", "2.00x |", "- |"
    ]  # fmt: skip
    assert "1.00 ms in the quickest cell and 3.00, 3.0 times as long, in a round of batch 2, context 100, 4 draft" in (
        rows.unsteady(made)
    )
    write(tmp_path, [*plain, *chain])
    result = render.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert rows.unsteady(made) in text
    assert "`host` is a fixed loop" in text
    (found, *_) = findings.tables(result)
    assert (found.columns[-1], [row[-1].text for row in found.rows]) == ("host loop", ["1.000", "-", "2.000", "-"])

    steady = rows.rows({0: plain, 4: [record for record in chain if record.get("round") != 2]})
    assert rows.unsteady(steady) == rows.unsteady(rows.rows({4: records(4, "b", [2.0])})) == ""
    write(tmp_path / "before", records(4, "b", [2.0]))
    before = render.write(tmp_path / "before")
    assert "host loop" not in findings.tables(before)[0].columns
    assert "fixed loop" not in (tmp_path / "before/README.md").read_text()


def test_a_path_that_was_not_taken_throughout_is_told() -> None:
    of = records(4, "b", [2.0])
    of[2]["graphs"]["Draft"] = [1, 4]
    (row, _) = rows.rows({4: of})
    assert "| graph (0.25) |" in render.table([row])
    assert "| graph (not counted) |" in render.table([row | {"graph_share": None}])


def test_no_floor_rather_than_one_without_its_experts() -> None:
    of = records(4, "b", [2.0])
    of[1]["experts"]["verify"].pop("2")
    (row, _) = rows.rows({4: of})
    assert row["bytes"] is None
    assert "floor_ms" not in row["parts"]["verify"]
    assert "| 0.50 |" in render.table([row])


def test_the_journal_counts_the_newest_whole_run_of_an_engine(tmp_path: Path) -> None:
    write(tmp_path, [*records(4, "whole", [2.0]), *records(4, "killed", [9.0], done=False)])
    write(tmp_path, records(2, "only", [5.0], done=False))
    with (tmp_path / journal.FILE).open("a") as file:
        file.write('{"record":"cyc')  # what a crash leaves
    read = journal.read(tmp_path)
    assert {engine: of[0]["run"] for engine, of in journal.current(read).items()} == {2: "only", 4: "whole"}
    assert journal.done(read) == {4}


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / journal.FILE).write_text('{"record": "done", "engine": 4, "run": "a"}\nnonsense\n{"record": 1}\n')
    with pytest.raises(PatchError, match=r"line 2: not a record.*nonsense"):
        journal.read(tmp_path)


def test_after_a_torn_line_the_next_record_is_whole(tmp_path: Path) -> None:
    (tmp_path / journal.FILE).write_text('{"record":"cyc')
    write(tmp_path, records(4, "b", [2.0]))
    assert journal.done(journal.read(tmp_path)) == {4}


def test_two_halves_are_put_together_once(tmp_path: Path) -> None:
    write(tmp_path / "a", records(0, "a", [1.0]))
    write(tmp_path / "b", records(4, "b", [2.0]))
    into = tmp_path / "both"
    into.mkdir()
    sources = [tmp_path / "a", tmp_path / "b"]
    assert journal.merge(sources, into) == 12
    assert journal.merge(sources, into) == 0
    result = render.write(into)
    assert [arm.name for arm in result.arms] == ["plain", "4 tokens"]
    assert {row["decode_steps"] for row in result.analysis["rows"]} == {None, 2.0, 1.0}
    with pytest.raises(PatchError, match=r"no samples\.jsonl"):
        journal.merge([tmp_path / "nowhere"], into)
    # Old records of a share say it by their arguments alone: those had upstream's own routers.
    other = records(4, "c", [2.0])
    other[0]["arguments"] = ["--model-path", "<shard>/target"]
    write(tmp_path / "c", other)
    with pytest.raises(PatchError, match=r"different models(.|\n)*12 layers, bf16, dummy routers"):
        journal.merge([tmp_path / "c"], into)
    assert len(journal.read(into)) == 12


def test_the_time_of_a_result_is_that_of_its_measuring(tmp_path: Path) -> None:
    def timed(of: list[dict[str, Any]], *at: str) -> list[dict[str, Any]]:
        return [record | {"at": time} for record, time in zip(of, [*at, *[at[-1]] * len(of)], strict=False)]

    early, late = "2026-01-02T03:04:05+00:00", "2026-01-03T00:00:00+00:00"
    a, b, old, both = (tmp_path / name for name in ("a", "b", "old", "both"))
    write(a, timed(records(0, "a", [1.0]), early))
    # One that was killed and measured again later does not count.
    write(b, [*timed(records(4, "b", [2.0]), early, late), *timed(records(4, "x", [9.0], done=False), "2026-09-09")])
    assert [render.write(place).when for place in (a, b, a)] == [early, late, early]
    for _ in range(2):
        both.mkdir(exist_ok=True)
        journal.merge([a, b], both)
        assert render.write(both, [a, b]).when == late
    assert "at" not in json.loads((both / "cells.json").read_text())["rows"][0]
    # Of records of earlier releases, that of their result; now, where there is none.
    write(old, records(2, "c", [3.0]))
    assert render.write(old).when > "2026-06"
    told = json.loads((old / "result.json").read_text()) | {"when": "2026-02-02T00:00:00+00:00"}
    (old / "result.json").write_text(json.dumps(told))
    assert render.write(old).when == told["when"]
    journal.merge([old], both)
    assert render.write(both, [old]).when == render.write(both).when == told["when"]


def test_the_folder_tells_what_is_not_complete_and_why_a_profile_is_missing(tmp_path: Path) -> None:
    broken = {"record": "kernels", "engine": 4, "run": "b", "batch_size": 2, "context": 100, "mode": "graph"}
    kernel = {"part": "verify", "name": "a|b" * 60, "launches": 2.0, "us": 12.5}
    whole = {**broken, "context": 200, "cycles": 5, "busy": 1.25, "operations": 7.0, "kernels": [kernel]}
    write(tmp_path, [*records(4, "b", [2.0], done=False), {**broken, "error": "OSError: no library"}, whole])
    render.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "**Not complete:** 4 tokens." in text
    assert "The profiler failed: OSError: no library" in text
    assert "--out 'a b'" in text
    assert re.search(r"\| verify \| 12\.5 \| 2\.0 \| `a\\\|ba", text)
    table = [line for line in text.splitlines() if line.startswith("| 4 |")]
    assert len(table) == 2
    assert json.loads((tmp_path / "result.json").read_text())["kind"] == "verify-step"


def test_a_plot_needs_matplotlib_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rows.rows({0: records(0, "a", [1.0]), 4: records(4, "b", [2.0])})
    assert not plot.draw([], tmp_path / "plot.png")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert not plot.draw(made, tmp_path / "plot.png")
    pytest.importorskip("matplotlib")
    made[0]["bytes"] = None
    assert plot.draw(made, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
