"""benchmark/spec_plan: rates are of what follows the first token, which an answer of one token right before tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark.spec_plan import engine, summary, tables

from sglang_patches.bench.report import speculation

TOKENS = 11


class Served:
    """An engine on a host that takes 70 ms for one prefill and more for the next, and 1 s for 10 tokens."""

    def __init__(self, decode_s: float = 1.0) -> None:
        self.asked: list[Any] = []
        self._decode_s = decode_s
        self._prefills = 0

    def ask(self, do: str, accept_length: float, token_mode: str) -> None:
        assert (do, token_mode) == ("pin", "real-draft-token")
        self.asked.append(accept_length)

    def generate(self, size: int, tokens: int) -> tuple[float, int]:
        self.asked.append((size, tokens))
        # A host that gets slower: a prefill is alike to the one before it only.
        self._prefills += tokens == 1
        return 0.07 * self._prefills + (tokens - 1) * self._decode_s / 10, tokens


class Turns:
    def __init__(self, served: Served) -> None:
        self._asked = served.asked

    def wait(self) -> None:
        self._asked.append("wait")

    def done(self) -> None:
        self._asked.append("done")


def measured(served: Served, *, speculates: bool) -> list[dict[str, Any]]:
    work = engine.Work(
        layers=1, weights="int4", model=None, draft=None, batch_sizes=[4], context=8, tokens=TOKENS, repeats=2,
        accept_lengths=[2.5, 3.5], answers=0, plan=None,
    )  # fmt: skip
    return engine._batches(served, work, speculates, Turns(served))  # type: ignore[arg-type]


def test_an_answer_of_one_token_comes_right_before_each_other_in_the_same_turn() -> None:
    served = Served()
    rows = measured(served, speculates=True)
    both = [(4, 1), (4, TOKENS)]
    turns = [["wait", a, *both, b, *both, "done"] for a, b in ((3.5, 2.5), (2.5, 3.5), (3.5, 2.5))]
    assert served.asked == [(4, 1), "done", *(step for turn in turns for step in turn)]
    # The first turn is warm-up, and the first prefill of all is nobody's: the fourth and the seventh are of 2.5.
    assert rows[0] == {
        "batch_size": 4, "accept_length": 2.5, "first_seconds": [0.28, 0.49], "seconds": [1.28, 1.49],
        "passes": [TOKENS, TOKENS],
    }  # fmt: skip
    assert [row["accept_length"] for row in rows] == [2.5, 3.5]


def test_a_rate_is_of_what_follows_the_first_token() -> None:
    engines = [
        {"arm": arm, "round": 0, "batches": measured(Served(decode_s), speculates=arm == "fixed"), "answers": []}
        for arm, decode_s in (("none", 1.0), ("fixed", 0.5))
    ]
    told = summary.of(engines, TOKENS)
    row = told["summary"][0]
    # 4 answers of 10 tokens more in 1 s and in 0.5 s, whatever their prefills took.
    assert (row["none"], row["fixed"]) == (pytest.approx(40), pytest.approx(80))
    assert row["fixed_over_none"]["ratio"] == pytest.approx(2)
    assert tables.lines(told)[0] == "Tokens per second of what follows the first token:"
    for one in engines:
        del one["batches"][0]["first_seconds"]  # type: ignore[index]
    with pytest.raises(ValueError, match="some batches have `first_seconds` and some have not"):
        summary.of(engines, TOKENS)


def test_by_host_a_slow_minute_is_in_both_and_leaves_the_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`fixed` takes half the time; its second engine and one answer of `none` met a host of half the speed."""

    def engine_of(arm: str, number: int, decode_s: float, slow: list[int]) -> dict[str, Any]:
        times = [{"first_seconds": 0.1 * by, "seconds": (0.1 + decode_s) * by} for by in slow]
        batch = {name: [one[name] for one in times] for name in ("first_seconds", "seconds")}
        row = {"batch_size": 4, "accept_length": 2.5 if arm == "fixed" else None, "passes": [TOKENS] * 3, **batch}
        return {"arm": arm, "round": number, "batches": [row], "answers": []}

    engines = [
        engine_of("none", 0, 1.0, [1, 2, 1]), engine_of("fixed", 0, 0.5, [1, 1, 1]),
        engine_of("none", 1, 1.0, [1, 1, 1]), engine_of("fixed", 1, 0.5, [2, 2, 2]),
    ]  # fmt: skip
    (plain,) = summary.speeds(engines, TOKENS)
    assert plain["fixed_over_none"]["verdict"] == "AMBIGUOUS"
    (row,) = summary.speeds(engines, TOKENS, by_host=True)
    # 40 tokens in ten prefills, and in five.
    assert (row["none"], row["fixed"]) == (pytest.approx(4), pytest.approx(8))
    assert (row["fixed_over_none"]["ratio"], row["fixed_over_none"]["verdict"]) == (pytest.approx(2), "FASTER")
    whole = {name: value for name, value in engines[0]["batches"][0].items() if name != "first_seconds"}
    with pytest.raises(ValueError, match="no `first_seconds`"):
        summary.speeds([{**engines[0], "batches": [whole]}], TOKENS, by_host=True)

    file = tmp_path / "tokens.json"
    work = {"layers": 1, "weights": "int4", "pair": None, "context": 8, "tokens": TOKENS}
    file.write_text(json.dumps({"work": work, "engines": engines}))
    monkeypatch.setattr(sys, "argv", ["summary.py", "--by-host", str(file)])
    assert summary.main() == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "Tokens per prefill of what follows the first token:"
    assert told[2].startswith("| batch | accept length | none, tok/prefill | fixed, tok/prefill | fixed / none")
    assert told[4].startswith("| 4 | 2.5 | 4 | 8 | 2.000 (2.000 to 2.000, 2) FASTER |")
    monkeypatch.setattr(sys, "argv", ["summary.py", "--by-host", str(file), str(file)])
    with pytest.raises(SystemExit):
        summary.main()
    assert "--by-host: of one file, not of 2" in capsys.readouterr().err


def test_each_repeat_has_its_own_first_token() -> None:
    """The median of the differences, not the difference of the medians: that would be 1.3 s less 0.3 s."""
    row = {"batch_size": 1, "accept_length": None, "first_seconds": [0.1, 0.9, 0.3], "seconds": [1.0, 1.3, 2.3]}
    engines: list[dict[str, Any]] = [{"arm": "none", "round": 0, "batches": [row], "answers": []}]
    assert summary.speeds(engines, TOKENS)[0]["none"] == pytest.approx(10 / 0.9)


def test_results_without_it_are_of_whole_answers() -> None:
    committed = Path(__file__).parents[2] / "benchmark/results/h200-spec-gain/tokens.json"
    result = json.loads(committed.read_text())
    told = summary.of(result["engines"], result["work"]["tokens"])
    assert json.loads(json.dumps(told["summary"])) == result["summary"]
    assert told["timed"] == "whole answers"
    for known in (result, told):
        assert tables.lines(known)[0] == "Tokens per second of whole answers:"
    assert speculation.tables(result)[0].title == "tokens per second of a batch: whole answers"
    again = speculation.tables({**result, "timed": "what follows the first token"})[0].title
    assert again == "tokens per second of a batch: what follows the first token"


def test_a_prefill_that_leaves_no_time_to_decode_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = r"batch size 4: the answers took 0.28 s and those of one token 0.28 s"
    with pytest.raises(ValueError, match=said):
        measured(Served(0.0), speculates=True)
    row = {
        "batch_size": 8,
        "accept_length": None,
        "first_seconds": [0.25, 0.5],
        "seconds": [1.0, 0.25],
        "passes": [2, 2],
    }
    work = {"layers": 1, "weights": "int4", "pair": None, "context": 8, "tokens": TOKENS}
    file = tmp_path / "tokens.json"
    engines = [{"arm": "none", "round": 0, "batches": [row], "answers": []}]
    file.write_text(json.dumps({"work": work, "engines": engines}))
    monkeypatch.setattr(sys, "argv", ["summary.py", str(file)])
    assert summary.main() == 2
    assert "summary: batch size 8: the answers took 0.25 s and those of one token 0.5 s" in capsys.readouterr().err
