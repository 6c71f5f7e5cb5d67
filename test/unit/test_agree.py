"""benchmark.tiny_kimi.agree: a token that rounding cannot explain is told, and ends it with 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
KEPT = REPO / "benchmark/tiny_kimi/results/tp2-2xh200.json"


def agree(folder: Path, result: dict[str, Any], prompts: int) -> subprocess.CompletedProcess[str]:
    given = folder / "given.json"
    given.write_text(json.dumps(result | {"prompts": result["prompts"][:prompts]}))
    line = [sys.executable, "-m", "benchmark.tiny_kimi.agree", "--a", str(given), "--b", str(given)]
    line += ["--prompts", str(prompts), "--out", str(folder / "out.json")]
    return subprocess.run(line, capture_output=True, text=True, cwd=REPO, timeout=150)


def test_the_kept_answers_of_two_gpus_differ_from_one_gpus_by_rounding_alone(tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text())
    done = agree(tmp_path, kept, 3)
    assert done.returncode == 0, done.stderr
    # Another processor sums in another order, also in bfloat16.
    found = json.loads((tmp_path / "out.json").read_text())["differences"]
    assert found == [pytest.approx(difference, abs=0.01) for difference in kept["differences"][:3]]


def test_a_wrong_token_is_not_rounding(tmp_path: Path) -> None:
    kept = json.loads(KEPT.read_text())
    kept["b"]["output_ids"] = [list(row) for row in kept["a"]["output_ids"]]
    kept["b"]["output_ids"][1][20] = (kept["a"]["output_ids"][1][20] + 7) % 256
    done = agree(tmp_path, kept, 2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "prompt 1 differs from token 20" in done.stdout
    assert "NOT EXPLAINED\n1 of 2 answers equal, 1 not explained by rounding" in done.stdout
