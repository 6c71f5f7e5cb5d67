"""`bench compare-upstream`: the pristine interpreter for real, the command against servers that are slow by plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_patches import upstream
from sglang_patches.bench import compare_upstream, folder, pristine
from sglang_patches.bench.app import app
from sglang_patches.bench.model import Result, Turn
from sglang_patches.errors import PatchError

REPO = Path(__file__).resolve().parents[2]


def test_a_pristine_interpreter_runs_the_same_upstream_without_us(tmp_path: Path) -> None:
    python = pristine.make(tmp_path / "made")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"SGLANG_PATCHES": "all"}
    code = (
        "import sys, importlib.util as u, sglang, sglang.srt.server_args as a;"
        "print(sglang.__file__, a.__file__, 'sglang_patches' in sys.modules, u.find_spec('torch') is not None)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env, check=True)
    found = upstream.locate()
    assert found is not None
    package = Path(found.root) / "sglang"
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "srt/server_args.py"), "False", "True"]
    assert pristine.make(tmp_path / "made") == python


def test_an_interpreter_that_still_has_our_hook_is_refused(tmp_path: Path) -> None:
    python = pristine.make(tmp_path / "made")
    inside = next((tmp_path / "made/lib").glob("python*/site-packages"))
    (inside / "left.pth").write_text(f"{REPO / 'python'}\nimport sglang_patches.activate as a; a.install()\n")
    with pytest.raises(PatchError, match="does not run a pristine SGLang"):
        pristine.make(tmp_path / "made")
    assert python.exists()


def run(out: Path, fake: str, only: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable, "-m", "sglang_patches.cli", "bench", "compare-upstream", "--python", fake.partition(":")[2],
        "--only", only, "--out", str(out), "--model", str(REPO / "test/models/tiny-kimi"), "--draft", "",
        "--prompts", "2", "--output-tokens", "12", "--warm-up", "0", *more,
    ]  # fmt: skip
    return subprocess.run(line, capture_output=True, text=True, timeout=900, env=os.environ | env)


def test_arms_are_told_against_pristine(fake: str, tmp_path: Path) -> None:
    slow = f"{fake},env:FAKE_TOKEN_S=0.12"
    done = run(tmp_path / "out", fake, f"{fake} {slow}", "--rounds", "3", FAKE_TOKEN_S="0.04")
    assert done.returncode == 0, done.stderr
    result = folder.load(tmp_path / "out")
    assert result.kind == "compare-upstream"
    same, slower = fake.replace("/", "_"), slow.replace("/", "_")
    assert [turn.arm for turn in result.turns[:3]] == ["pristine", same, slower]
    assert [turn.arm for turn in result.turns[3:6]] == [slower, same, "pristine"]
    assert compare_upstream.verdict(result, slower) == "SLOWER"
    # Its verdict may be wrong one time in twenty.
    assert 0.7 < result.analysis["comparisons"][same]["tokens_per_s"]["ratio"] < 1.4
    assert "is SLOWER than pristine" in result.headline


@pytest.mark.parametrize(("found", "status"), [("SLOWER", 1), ("FASTER", 1), ("SAME", 0), ("AMBIGUOUS", 0)])
def test_none_that_differs_from_pristine_is_a_failure(
    found: str, status: int, tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"verdict": found, "ratio": 0.9, "low": 0.8, "high": 0.95, "smallest_detectable": 0.1}

    def measured(setup: Any, chosen: Any, *args: Any, **named: Any) -> Result:
        turns = [
            Turn(index=at, block=0, arm=arm.name, ready_s=1, figures={"tokens_per_s": 9.0}, output_sha256=None,
                 document=None)
            for at, arm in enumerate(chosen)
        ]  # fmt: skip
        analysis = {"primary": "tokens_per_s", "notes": [], "comparisons": {"none": {"tokens_per_s": said}}}
        return Result(kind="compare-upstream", name="x", headline="h", command=[], when="", arms=chosen, turns=turns,
                      analysis=analysis)  # fmt: skip

    monkeypatch.setattr(compare_upstream, "measure", measured)
    line = ["compare-upstream", "--python", fake.partition(":")[2], "--only", "none", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*line, "--model", str(REPO / "test/models/tiny-kimi"), "--draft", ""])
    assert done.exit_code == status, done.output
    assert found in done.output


def test_a_margin_that_makes_no_sense_is_told_before_anything_is_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare-upstream", "--margin", "5", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "margin is 5.0" in done.output
    assert not (tmp_path / "out").exists()


def test_a_pristine_arm_that_tells_patches_is_refused(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_patches.bench import arms, options
    from sglang_patches.document import collect

    series = options.installed_series()
    chosen = [arms.parse(name, fake, series) for name in ("pristine", "none")]
    setup: Any = type("Setup", (), {"folder": tmp_path, "workload": None})()

    def one(setup: Any, kind: str, arms: Any, schedule: Any, check: Any) -> list[Any]:
        told = Turn(index=0, block=0, arm="pristine", ready_s=1, figures={}, output_sha256=None,
                    document=collect.environment())  # fmt: skip
        check([told], None)
        return [told]

    monkeypatch.setattr(compare_upstream, "run_turns", one)
    with pytest.raises(PatchError, match="so it is not pristine"):
        compare_upstream.measure(setup, chosen, 1, series, margin=0.01, allow=(), seed=0)
