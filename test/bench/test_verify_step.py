"""bench/verify_step: bytes and floors worked by hand, the grid, the journal that continues, and what is written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.bench.verify_step import (
    arguments,
    command,
    floor,
    grid,
    journal,
    plot,
    reading,
    render,
    rows,
    workers,
)
from sglang_patches.errors import PatchError

TARGET = {
    "dense": 1000, "captured_states": 0, "embedding_row": 10, "experts": {"1": 100, "2": 200},
    "kv_token": 6, "vocabulary": 50,
}  # fmt: skip
DRAFT = {"dense": 70, "captured_states": 30, "embedding_row": 10, "experts": {}, "kv_token": 2, "vocabulary": 40}
MODELS = {"target": TARGET, "draft": DRAFT}
EXPERTS = {"verify": {"1": 5.5, "2": 3.0}}


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


def made_grid(**named: Any) -> grid.Grid:
    given: dict[str, Any] = {"batch_sizes": [1, 8], "contexts": [1024, 32768], "modes": ["graph", "eager"]}
    return grid.Grid(**{**given, "rounds": 2, "tokens": 32, **named})


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


def cycles(engine: int, run: str, mode: str, values: list[float], turn: int = 1) -> dict[str, Any]:
    parts = {"decode": 0.75} if engine == 0 else {"draft_decode": 0.25, "verify": 0.5, "draft_extend": 0.25}
    fixed = {**parts, "sampling": 0.125, "host_gap": 0.0625}
    ms = {**{name: [value] * len(values) for name, value in fixed.items()}, "cycle": values}
    cell = {"batch_size": 2, "context": 100, "mode": mode, "round": turn}
    return {
        "record": "cycles",
        "engine": engine,
        "run": run,
        **cell,
        "prefilled": 1,
        "ms": ms,
        "graphs": {"Runner": [int(mode == "graph"), 1]},
    }


def records(engine: int, run: str, values: list[float], done: bool = True) -> list[dict[str, Any]]:
    key = "verify" if engine else "decode"
    facts = {"models": MODELS, "device": "a device", "copy": {"gb_per_s": 0.001, "copied_mib": 64}}
    common = {"engine": engine, "run": run}
    command = ["sglang-patches", "bench", "verify-step", "--out", "a b"]
    head = {
        "arguments": ["--some"],
        "command": command,
        "start_seconds": 1.5,
        "facts": facts,
        "document": None,
        "no_document": "a test",
    }
    routing = {"experts": {key: EXPERTS["verify"]}, "forwards": {key: 3}, "failed": "", "contexts": [100, 112]}
    made = [
        {"record": "engine", **common, **head},
        {"record": "routing", **common, "batch_size": 2, "context": 100, **routing},
        cycles(engine, run, "graph", values),
        cycles(engine, run, "graph", [values[0]], turn=2),
        cycles(engine, run, "eager", [40.0]),
    ]
    return [*made, {"record": "done", **common}] if done else made


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


def write(folder: Path, of: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    for record in of:
        journal.append(folder, record)


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


def test_a_folder_of_other_code_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    chosen = arguments.Chosen(tmp_path, tmp_path, dummy=False, cuda=False, grid=made_grid())
    of = records(4, "b", [2.0])
    of[0]["arguments"] = chosen.shown(4)
    command._check_same(of, chosen, [2, 4])
    of[0]["document"] = {"code": {"id": "0123456789ab"}}
    with pytest.raises(PatchError, match=r"another patch set \(4 tokens\)\n +there +0123456789ab"):
        command._check_same(of, chosen, [2, 4])
    of[0] |= {"document": None, "arguments": ["--other"]}
    with pytest.raises(PatchError, match="another server arguments"):
        command._check_same(of, chosen, [4])
    command._check_same(of, chosen, [2])  # that engine is not asked for
    of[0] |= {"arguments": chosen.shown(4), "share": "12 layers, bf16, dummy routers"}
    with pytest.raises(PatchError, match=r"another model .*\n +there +12 layers, bf16, dummy routers\n +now +a folder"):
        command._check_same(of, chosen, [2])


def test_what_cannot_be_served_here_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No share of Kimi-K2.5 without a GPU, and no folder that holds no model: told before a folder is made."""
    monkeypatch.setattr(command.selection, "has_gpu", lambda: False)
    out = tmp_path / "result"
    for model, draft, said in (
        ("", "", "--model test/models/tiny-kimi"),
        (str(tmp_path), str(tmp_path), "config.json"),
    ):
        with pytest.raises(PatchError, match=re.escape(said)):
            command.verify_step(out, model=model, draft=draft)
    assert not out.exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"contexts": "32,4001"}, r"--contexts 4001: .* 96 tokens .* 4097 .*\n.*--model .*tiny-kimi allows 4096"),
        ({"contexts": "4000", "tokens": 33}, "remedy     --contexts of at most 3999"),
        (
            {"contexts": "32", "server": ["--context-length", "5000"]},
            "--context-length 5000: --model .* 4096 positions",
        ),
        ({"contexts": "41000", "model": "", "draft": ""}, "the share allows 40960"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_contexts_beyond_a_models_positions_are_refused_before_any_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str
) -> None:
    models = Path(__file__).parents[1] / "models"
    pair = {"model": str(models / "tiny-kimi"), "draft": str(models / "tiny-kimi-eagle3")}
    monkeypatch.setattr(command.selection, "has_gpu", lambda: True)
    monkeypatch.setattr(workers, "measure", None)
    with pytest.raises(PatchError, match=said):
        command.verify_step(tmp_path / "result", **{**pair, **asked})
    assert not (tmp_path / "result").exists()


def test_the_drafts_positions_count_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"text_config": {"max_position_embeddings": 2000}}
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 1000}
    of = made_grid(contexts=[1000])
    arguments.check_positions(of, {"t": target}, [])
    with pytest.raises(PatchError, match=r"seen +d allows 1000(.|\n)*--contexts of at most 904"):
        arguments.check_positions(of, {"t": target, "d": draft}, [])
    with pytest.raises(PatchError, match="a model with more positions"):
        arguments.check_positions(of, {"t": {"max_position_embeddings": 50}}, [])
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    arguments.check_positions(of, {"t": target, "d": draft}, [])


@pytest.mark.parametrize(("option", "word"), [("weights", "fp4"), ("drawn", "trained")])
def test_an_unknown_share_is_refused_before_a_folder_is_made(tmp_path: Path, option: str, word: str) -> None:
    asked: dict[str, Any] = {option: word}
    with pytest.raises(PatchError, match=f"--{option} '{word}'\n +expected"):
        command.verify_step(tmp_path / "result", **asked)
    assert not (tmp_path / "result").exists()


def test_the_command_that_is_written_has_the_variables_that_steer_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Path(__file__).parents[1] / "models"
    asked: list[arguments.Chosen] = []
    monkeypatch.setattr(command.selection, "has_gpu", lambda: False)
    monkeypatch.setattr(workers, "measure", lambda left, chosen, *rest: asked.append(chosen))
    monkeypatch.setattr(render, "write", lambda folder: SimpleNamespace(headline="nothing"))
    monkeypatch.setattr(sys, "argv", ["sglang-patches", "bench", "verify-step", "--out", "x"])
    monkeypatch.setenv("SGLANG_PATCHES", "-mla-verify-split-kv")
    (tmp_path / "table.md").write_text("")
    command.verify_step(
        tmp_path, model=str(models / "tiny-kimi"), draft=str(models / "tiny-kimi-eagle3"), contexts="32"
    )
    words = asked[0].command
    assert words[0] == "env"
    assert "SGLANG_PATCHES=-mla-verify-split-kv" in words[: words.index("sglang-patches")]
    assert words[-4:] == ["bench", "verify-step", "--out", "x"]


@pytest.mark.parametrize("text", ["1,x", "0", "-3", "1.5"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PatchError, match="--batch-sizes"):
        command._numbers(text, "--batch-sizes")


def test_the_clock_tells_the_time_left() -> None:
    now = [0.0]
    clock = workers.Clock(3, now=lambda: now[0])
    assert clock.left() == ""
    now[0] = 40  # the start
    clock.at(0.0)
    clock.at(0.1)
    now[0] = 60
    clock.at(0.5)
    # 20 s for what is half by now: 20 s more here, and two engines of 80 s.
    assert clock.seconds() == pytest.approx(20 + 2 * 80, rel=0.2)
    now[0] = 80
    clock.next()
    assert clock.seconds() == pytest.approx(160)


FAKE_ENGINE = """
import json, os, sys, time
from pathlib import Path
spec = json.loads(Path(sys.argv[1]).read_text())
if spec["draft_tokens"] == 5:
    sys.exit("ImportError: planted")
sys.stdin.readline()
if spec["draft_tokens"] == 3:
    print("RuntimeError: planted")
    sys.exit(1)
Path(spec["folder"], f"pid-{spec['draft_tokens']}").write_text(str(os.getpid()))
os.write(spec["progress"], (json.dumps({"say": "half", "part": 0.5}) + "\\n").encode())
if spec["draft_tokens"] == 8:
    time.sleep(600)
os.write(spec["progress"], (json.dumps({"say": "done", "part": 1}) + "\\n").encode())
"""


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> arguments.Chosen:
    """Engines are a script that fails for 3 draft tokens, before it is let go for 5, and hangs for 8."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE_ENGINE)
    popen = workers.subprocess.Popen

    def start(words: list[str], **named: Any) -> Any:
        return popen([sys.executable, str(script), words[-1]], **named)

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    (tmp_path / "scratch").mkdir()
    return arguments.Chosen(tmp_path, tmp_path, dummy=False, cuda=True, grid=made_grid())


def test_an_engine_that_dies_is_told_and_the_others_are_measured(
    fake_engine: arguments.Chosen, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert workers.measure([2, 3, 4], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [3]
    assert (tmp_path / "pid-4").exists()
    said = capfd.readouterr()
    assert "2 tokens: done" in said.out
    assert "RuntimeError: planted" in said.err
    assert "RuntimeError: planted" in (tmp_path / "engine-3.log").read_text()


def test_an_engine_that_cannot_import_is_told(
    fake_engine: arguments.Chosen, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = workers.Worker.go

    def late(worker: workers.Worker) -> None:
        time.sleep(1)
        go(worker)

    monkeypatch.setattr(workers.Worker, "go", late)
    assert workers.measure([5, 4], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [5]
    assert "ImportError: planted" in capfd.readouterr().err


def test_an_interrupt_leaves_no_engine_behind(fake_engine: arguments.Chosen, tmp_path: Path) -> None:
    started = tmp_path / "pid-8"
    if os.fork() == 0:  # SIGTERM comes while this process waits for the engine
        while not started.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    with pytest.raises(KeyboardInterrupt):
        workers.measure([8, 2], fake_engine, tmp_path, tmp_path / "scratch", sweep=False)
    os.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_silent_engine_is_given_up(
    fake_engine: arguments.Chosen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SILENCE_S", 1.5)
    assert workers.measure([8], fake_engine, tmp_path, tmp_path / "scratch", sweep=False) == [8]


def test_an_engine_ends_with_its_starter() -> None:
    """Closing its standard input is what the death of the starter does."""
    code = "from sglang_patches.bench.verify_step import engine; engine._end_with_starter()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1)
    child.stdin.close()
    assert child.wait(30) == -signal.SIGKILL
