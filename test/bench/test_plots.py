"""plot.png shows what the result says, whatever is open, missing or odd in it."""

from __future__ import annotations

import builtins
import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench import ab, factorial, plots
from sglang_patches.bench.design import fraction, order
from sglang_patches.bench.model import Arm, Result, Turn
from sglang_patches.bench.verify_step.plot import draw as verify_step
from sglang_patches.bench.verify_step.rows import rows as cycles
from sglang_patches.errors import PatchError

from .cycles_made import records

ODD = "env:PRICE=$5_{x$,<b>&\\frac"  # what a mathematical typesetter would read, and refuse


def turn(index: int, block: int, arm: str, tokens: float) -> Turn:
    figures = {"tokens_per_s": tokens, "verify_ms": 2000 / tokens * (1 + 0.01 * math.sin(index))}
    return Turn(index=index, block=block, arm=arm, ready_s=1, figures=figures, output_sha256="x", document=None)


def compared(rounds: int) -> Result:
    served = [(block, arm) for block in range(rounds) for arm in ("ab", "ba")[block % 2]]
    turns = [
        turn(at, block, arm, (80 if arm == "b" else 90) * (1 + 0.01 * math.cos(3 * at)))
        for at, (block, arm) in enumerate(served)
    ]
    arms = [Arm(name="a", spec=""), Arm(name="b", spec=ODD)]
    return ab.conclude(turns, arms, None, Path("result"), margin=0.01, seed=0)


def factored(names: tuple[str, ...], of: int) -> Result:
    design = fraction(names, of)
    arms = [Arm(name="".join("1" if level > 0 else "0" for level in levels), spec="") for levels in design.levels]
    served = [(block, run) for block, runs in enumerate(order(design, 2, 0)) for run in runs]
    turns = [
        turn(at, block, arms[run].name, (80 if design.levels[run][0] > 0 else 90) * (1 + 0.01 * math.cos(3 * at)))
        for at, (block, run) in enumerate(served)
    ]
    return factorial.conclude(
        turns, design, arms, None, Path("result"), base="default", margin=0.01, confidence=0.95, seed=0
    )


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    figure.canvas.draw()
    return [found.get_text() for found in figure.findobj(Text)]


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_an_ab_plot_has_a_row_for_every_figure_and_a_point_for_every_turn(rounds: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = compared(rounds)
    figure: Any = plots.of(result)
    words = texts(figure)
    assert {"tokens_per_s\n(higher is better)", "verify_ms\n(lower is better)"} <= set(words)
    verdict = result.analysis["comparisons"]["tokens_per_s"]["verdict"]
    assert verdict == ("SLOWER" if rounds == 4 else "AMBIGUOUS")
    assert verdict in words
    assert any("<b>&\\frac" in word and "$5_{x$" in word for word in words)
    left, right = figure.axes
    dots = [line for line in right.lines if line.get_marker() in ("o", "s")]
    assert sorted(x for line in dots for x in line.get_xdata()) == list(range(2 * rounds))
    low, high = left.get_xlim()
    assert low < result.analysis["comparisons"]["tokens_per_s"]["ratio"] < 1 < high < 10
    plots.draw(result, tmp_path)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bars_end_where_the_intervals_do() -> None:
    pytest.importorskip("matplotlib")
    result = compared(4)
    found = result.analysis["comparisons"]["tokens_per_s"]
    left: Any = plots.of(result).axes[0]
    bars = [list(line.get_xdata()) for line in left.lines]
    assert [found["low"], found["high"]] in bars
    factor = factored(("a", "b"), 1)
    effect = factor.analysis["effects"]["tokens_per_s"]["effects"][0]
    drawn: Any = plots.of(factor).axes[0]
    bars = [list(line.get_xdata()) for line in drawn.lines]
    assert [effect["low"], effect["high"]] in bars
    assert [effect["low_adjusted"], effect["high_adjusted"]] in bars


@pytest.mark.parametrize(
    ("ratio", "bounds", "arrows"),
    [
        (0.118, (0.1, 0.13), "<"),
        (40.0, (35.0, 45.0), ">"),
        (0.118, (0.01, None), "<>"),
        (1.1, (0.01, 30.0), "<>"),
        (1.1, (0.0, None), "<>"),
        (1.1, (1.05, 1.2), ""),
    ],
)
def test_no_row_is_empty_what_lies_beyond_the_axis_is_an_arrow(
    ratio: float, bounds: tuple[float, float | None], arrows: str
) -> None:
    pytest.importorskip("matplotlib")
    result = compared(4)
    of = result.analysis["comparisons"]
    of["ttft_ms_p50"] = {**of["verify_ms"], "ratio": ratio, "low": bounds[0], "high": bounds[1]}
    figure: Any = plots.of(result)
    left = figure.axes[0]
    row = list(of).index("ttft_ms_p50")
    marks = [line for line in left.lines if list(line.get_ydata()) == [row] and line.get_marker() != "None"]
    low, high = left.get_xlim()
    assert all(low <= x <= high for line in marks for x in line.get_xdata())
    shown = [str(line.get_marker()) for line in marks]
    inside = low <= ratio <= high
    assert sorted(shown) == sorted([*arrows, *("o" if inside else "")])
    assert inside or f"{ratio:.3g}" in texts(figure)


def test_a_factorial_plot_names_effects_with_their_aliases() -> None:
    pytest.importorskip("matplotlib")
    result = factored(("a", "b", "c", ODD), 2)
    figure: Any = plots.of(result)
    words = texts(figure)
    assert f"a x b\nor c x {ODD}" in words
    assert "SLOWER" in words
    assert {arm.name for arm in result.arms} <= set(words)
    dots = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in dots) == 16


def test_a_result_read_from_disk_is_drawn_too() -> None:
    pytest.importorskip("matplotlib")
    for result in (compared(1), factored(("a", "b"), 1)):
        assert len(plots.of(Result.model_validate_json(result.model_dump_json())).axes) == 2


def test_a_plot_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of replacement the former file is there and the new one whole; a full disk leaves the former."""
    pytest.importorskip("matplotlib")
    file, seen, true = tmp_path / "plot.png", [], os.replace

    def watched(new: str, old: Path) -> None:
        seen.append((Path(new).read_bytes()[-8:-4], Path(old).read_bytes()))
        true(new, old)

    def full(new: str, old: Path) -> None:
        raise OSError(errno.ENOSPC, "no space")

    rows_ = cycles({0: records(0, "a", [1.0]), 4: records(4, "b", [2.0])})
    for draw in (lambda: plots.draw(compared(2), tmp_path), lambda: verify_step(rows_, file)):
        file.write_bytes(b"former")
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space") as failed:
            draw()
        assert failed.value.filename == str(file)
        assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"plot.png": b"former"}
        monkeypatch.setattr(os, "replace", watched)
        draw()
    assert seen == [(b"IEND", b"former")] * 2


def test_without_matplotlib_the_extra_is_named_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    plots.draw(compared(2), tmp_path)
    assert "pip install 'sglang-patches[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_other_kinds_are_refused() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(
        PatchError, match="bisect have no plot of this sort; expected ab or compare-upstream or factorial"
    ):
        plots.of(compared(2).model_copy(update={"kind": "bisect"}))
