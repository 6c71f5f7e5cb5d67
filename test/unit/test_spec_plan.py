"""spec plan: tokens of a cycle, times of a verify-step result, the choice, and how upstream reads it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_patches.errors import PatchError
from sglang_patches.spec import acceptance, costs, plan
from sglang_patches.spec.app import app
from sglang_patches.spec.costs import PLAIN, Cell, Costs

REPO = Path(__file__).parents[2]
H200 = REPO / "benchmark/results/h200-verify-step"
CONFIG = "--speculative-adaptive-config "


def cell(ms: float, target: float | None = None, extend: float = 0.5) -> Cell:
    return Cell(ms, ms, ms, ms if target is None else target, extend)


def costs_of(cycles: dict[int, float], batch: int = 1, context: int = 1000) -> Costs:
    return Costs({(steps, batch, context): cell(ms) for steps, ms in cycles.items()})


def rates(*by_position: float) -> acceptance.Acceptance:
    return acceptance.Acceptance(by_position, "")


def test_tokens_of_a_cycle() -> None:
    known = acceptance.by_position("80%, 0.5,25%")
    assert known.by_position == (0.8, 0.5, 0.25)
    assert [known.tokens(steps) for steps in range(4)] == pytest.approx([1, 1.8, 2.3, 2.55])
    with pytest.raises(ValueError, match="4 steps"):
        known.tokens(4)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no rate"), ("0.5,x", "'x' is no rate"), ("1.2", "'1.2'"), ("0.5,0.6", "running products"), ("nan", "'nan'")],
)
def test_what_is_no_rate_is_named(text: str, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        acceptance.by_position(text)


@given(st.floats(1, 4))
def test_a_length_is_spread_so_that_it_comes_out_again(length: float) -> None:
    assert acceptance.from_length(length, 3).tokens(3) == pytest.approx(length, abs=1e-9)


@pytest.mark.parametrize(("length", "steps"), [(0.9, 3), (4.1, 3), (1.0, 0)])
def test_a_length_that_no_chain_has(length: float, steps: int) -> None:
    with pytest.raises(PatchError, match="cannot come from"):
        acceptance.from_length(length, steps)


def test_times_between_and_beyond_the_measured_ones() -> None:
    times = Costs({(3, b, c): cell(b * 10 + c / 100) for b in (1, 4, 8) for c in (1000, 3000)})
    # A batch of 2 runs in the graph of 4; a context between two lies on the line through them.
    assert times.milliseconds(3, 2, 1000) == 50
    assert times.milliseconds(3, 4, 2500) == 65
    assert times.milliseconds(1, 4, 1000) is None
    with pytest.raises(PatchError, match=r"batch size 9 .*up to 8"):
        times.milliseconds(3, 9, 1000)
    for context in (999, 3001):
        with pytest.raises(PatchError, match=r"1000 to 3000"):
            times.milliseconds(3, 1, context)


def test_drafting_nothing_is_measured_or_reckoned() -> None:
    cells = {(PLAIN, 1, 1): cell(2.0), (3, 1, 1): cell(4.0, extend=0.5), (1, 1, 1): cell(3.0, extend=0.25)}
    reckoned = Costs(cells)
    assert (reckoned.zero_is_estimated, reckoned.milliseconds(0, 1, 1)) == (True, 2.25)
    measured = Costs({**cells, (0, 1, 1): cell(2.75)})
    assert (measured.zero_is_estimated, measured.milliseconds(0, 1, 1)) == (False, 2.75)


def test_a_shard_speaks_for_a_whole_model() -> None:
    cells = {(PLAIN, 1, 1): cell(2.0, target=1.5), (3, 1, 1): cell(4.0, target=3.0)}
    whole = Costs(cells, layers=61 / 12)
    assert whole.milliseconds(PLAIN, 1, 1) == pytest.approx(0.5 + 1.5 * 61 / 12)
    assert whole.milliseconds(3, 1, 1) == pytest.approx(1.0 + 3.0 * 61 / 12)


def test_the_choice_worked_by_hand() -> None:
    # Tokens by steps: 1.8, 2.3, 2.55. Decode 2 ms: gains 1.8 * 2 / 3 = 1.2, 2.3 * 2 / 4 = 1.15, 2.55 * 2 / 4.2 = 1.214.
    times = costs_of({PLAIN: 2, 0: 2.5, 1: 3, 2: 4, 3: 4.2})
    known = rates(0.8, 0.5, 0.25)
    (choice,) = plan.make(times, known, [1], 1000, margin=0.0).choices
    assert choice.gain == pytest.approx({0: 0.8, 1: 1.2, 2: 1.15, 3: 2.55 * 2 / 4.2})
    assert (choice.best, choice.steps, choice.adaptive, choice.break_even) == (3, 3, 3, pytest.approx(2.1))
    # 1.2 % more are not worth two more steps where 2 % are asked for.
    (choice,) = plan.make(times, known, [1], 1000, margin=0.02).choices
    assert (choice.steps, choice.break_even) == (1, 1.5)
    # Nothing pays by 25 %; a server that speculates all the same is better off drafting than drafting nothing.
    made = plan.make(times, known, [1], 1000, margin=0.25)
    assert (made.choices[0].steps, made.choices[0].adaptive, made.fixed, made.pays()) == (0, 1, 0, False)


def test_positions_that_are_not_known_are_not_planned() -> None:
    times = costs_of({PLAIN: 2, 1: 3, 7: 3.1})
    (choice,) = plan.make(times, rates(0.9), [1], 1000, 0.0).choices
    assert set(choice.gain) == {0, 1}
    with pytest.raises(PatchError, match=r"only \[7\] draft steps"):
        plan.make(costs_of({PLAIN: 2, 7: 3.1}), rates(0.9), [1], 1000, 0.0)


def test_a_cell_that_was_not_measured_is_named() -> None:
    times = Costs({(PLAIN, 1, 9): cell(2.0), (3, 1, 9): cell(4.0), (3, 8, 9): cell(4.0)})
    with pytest.raises(PatchError, match=r"not measured at batch 8, context 9"):
        plan.make(times, rates(0.9, 0.8, 0.7), [5], 9, 0.0)


def test_one_setting_for_all_loses_least() -> None:
    cells = {
        (PLAIN, 1, 9): 2.0, (1, 1, 9): 3.0, (3, 1, 9): 3.2,  # gains 1.2 and 1.594
        (PLAIN, 8, 9): 3.0, (1, 8, 9): 5.0, (3, 8, 9): 9.0,  # gains 1.08 and 0.85
    }  # fmt: skip
    times = Costs({key: cell(ms) for key, ms in cells.items()})
    made = plan.make(times, rates(0.8, 0.5, 0.25), range(1, 9), 9, 0.02)
    assert [choice.steps for choice in made.choices] == [3] + [1] * 7
    # 3 steps lose 21 % at 8 requests, 1 step 25 % at one.
    assert made.fixed == 3
    assert made.ranges(lambda one: one.steps) == [(1, 1, 3), (2, 8, 1)]


@st.composite
def measured(draw: st.DrawFn) -> Costs:
    times = st.floats(0.1, 100)
    return Costs(
        {(steps, batch, 1): cell(draw(times), extend=0.1) for steps in (PLAIN, 1, 2, 3) for batch in (1, 2, 4, 8, 16)}
    )


@given(
    measured(),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.floats(0, 0.1),
    st.sampled_from([None, [1, 2, 4, 8, 16]]),
)
@settings(max_examples=60, deadline=None)
def test_upstream_takes_the_plans_steps_at_every_batch_size(
    times: Costs, drawn: list[float], margin: float, captured: list[int] | None
) -> None:
    """Upstream's own policy, reading the file that is written."""
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    made = plan.make(times, rates(*sorted(drawn, reverse=True)), range(1, 17), 1, margin)
    for choice in made.choices:
        assert choice.gain[choice.best] >= max(gain for at, gain in choice.gain.items() if at) / (1 + margin) ** 2
        assert choice.gain[choice.adaptive] >= choice.gain[0]
        assert bool(choice.steps) == (choice.gain[choice.best] > 1 + margin)
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(made.adaptive_config("a test"), file)
        file.flush()
        policy = AdaptiveSpeculativeParams(initial_steps=3, cfg_path=file.name)
    # As it is without --cuda-graph-bs-decode, and with a list that has the plan's sizes.
    policy.set_cuda_graph_bs(captured)
    for choice in made.choices:
        # The steps stay, whatever is accepted.
        for _ in range(40):
            policy.on_verify_complete([0] * choice.batch_size, choice.batch_size)
        assert policy.get_steps_for_batch(choice.batch_size) == choice.adaptive


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_the_measured_h200_by_command(tmp_path: Path) -> None:
    """As it stands: it pays at 1,024 tokens of context with a good draft, and at 8,192 with none."""
    code, said = run("--costs", str(H200), "--accept-length", "3.2", "--json")
    assert code == 0
    by_context = {one["context"]: one for one in json.loads(said)["plans"]}
    assert by_context.keys() == {1024, 8192, 32768}
    cells = {(r["draft_tokens"], r["batch_size"]): r["cycle"] for r in rows() if r["context"] == 8192}
    first = by_context[8192]["choices"][0]
    assert first["gain"]["3"] == pytest.approx(3.2 * cells[0, 1] / cells[4, 1])
    assert all(choice["steps"] == 0 for choice in by_context[8192]["choices"])
    assert by_context[1024]["choices"][0]["steps"] == 3

    out = tmp_path / "adaptive.json"
    code, said = run("--costs", str(H200), "--accept-length", "3.2", "--context", "1024", "--write", str(out))
    assert code == 0
    assert f"--speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-adaptive {CONFIG}{out}" in said
    assert json.loads(out.read_text())["1"] == {"candidate_steps": [3]}
    assert "was not measured; it is reckoned" in said

    code, said = run("--costs", str(H200), "--accept-length", "2.69", "--context", "8192", "--write", str(out) + "2")
    assert (code, Path(str(out) + "2").exists()) == (1, False)
    assert "gains no 2% at any of these batch sizes: serve without it" in said


def rows() -> list[dict[str, Any]]:
    result = json.loads((H200 / "result.json").read_text())
    return [row for row in result["analysis"]["rows"] if row["mode"] == "graph"]


def test_a_model_of_more_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 61}}')
    words = ["--costs", str(H200), "--accept-length", "3.2", "--context", "1024", "--target", str(tmp_path)]
    code, said = run(*words)
    assert code == 2
    assert "--layers-measured N" in said
    code, said = run(*words, "--layers-measured", "12", "--json")
    assert code == 0
    told = json.loads(said)
    assert "12 layers measured, reckoned for 61" in told["costs"]
    plain = next(row for row in rows() if (row["draft_tokens"], row["batch_size"], row["context"]) == (0, 1, 1024))
    assert told["plans"][0]["choices"][0]["plain_ms"] == pytest.approx(plain["cycle"] + plain["decode"] * 49 / 12)


def test_mistakes(tmp_path: Path) -> None:
    none, other = tmp_path / "none", tmp_path / "result.json"
    other.write_text('{"kind": "ab"}')
    good = ["--costs", str(H200)]
    for words, said in (
        ([*good], "acceptance is needed, once"),
        ([*good, "--accept-length", "2", "--accept-by-position", "0.5"], "acceptance is needed, once"),
        ([*good, "--accept-length", "2", "--write", "x"], "--write needs one context"),
        ([*good, "--accept-length", "2", "--max-batch-size", "64"], "batch size 17 is beyond what was measured"),
        ([*good, "--accept-length", "2", "--context", "9"], "context 9 is outside"),
        ([*good, "--accept-length", "2", "--target", str(tmp_path)], "that folder has no config.json"),
        (["--costs", str(none), "--accept-length", "2"], "none"),
        (["--costs", str(other), "--accept-length", "2"], "is no result of verify-step (it is: ab)"),
    ):
        code, output = run(*words)
        assert code == 2, words
        assert said in output, output


def test_a_result_must_have_what_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    row = {"mode": "graph", "batch_size": 1, "context": 1, "cycle": 1, "p10": 1, "p90": 1, "verify": 1, "decode": 1}
    for tokens, said in ((0, "no cycle with drafts"), (4, "lacks decode without speculation")):
        made = {"kind": "verify-step", "analysis": {"rows": [{**row, "draft_tokens": tokens}]}}
        file.write_text(json.dumps(made))
        with pytest.raises(PatchError, match=said):
            costs.read(tmp_path)


def test_scattered_cells_are_told() -> None:
    times = Costs({(PLAIN, 1, 9): Cell(2, 1, 3, 2, 0), (3, 1, 9): Cell(2, 2, 2.1, 2, 0)})
    assert times.noisy() == ["decode, batch 1, context 9: 1.00 to 3.00 ms"]


def test_upstream_drafts_nothing_by_the_file_of_verify_step(tmp_path: Path) -> None:
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    from sglang_patches.bench.verify_step import arguments, grid

    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    cells = grid.Grid(batch_sizes=[1], contexts=[32], modes=["graph"], rounds=1, tokens=8)
    words = arguments.Chosen(tmp_path, tmp_path, dummy=False, cuda=True, grid=cells).arguments(1)
    assert resolve_candidate_steps_from_config(words[words.index("--speculative-adaptive-config") + 1]) == [0]
    assert words[words.index("--speculative-num-steps") + 1] == "0"
    assert "--speculative-adaptive" not in arguments.Chosen(
        tmp_path, tmp_path, dummy=False, cuda=True, grid=cells
    ).arguments(2)


def test_a_bare_name_is_that_of_a_result_as_bench_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert costs.read(Path(H200.name)).told == costs.read(H200).told
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PatchError, match=rf"--costs benchmark/results/{H200.name} is not there; already benchmark is"):
        costs.read(Path(H200.name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(PatchError, match="--costs empty has no result"):
        costs.read(Path("empty"))
