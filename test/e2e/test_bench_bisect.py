"""`bench bisect` on real servers: of three planted patches, one is slow alone and two are slow only together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_patches.bench import folder

from .plants import lane
from .server import REPO

# A plant makes a cycle take about 5 times as long; this is as far from that as from no difference.
THRESHOLD = "120%"
# A hang's, not a slow machine's: a server takes half a minute here, and several times that where others compute too.
SECONDS = 5400


@pytest.mark.alone
def test_both_plants_are_found(tmp_path: Path) -> None:
    patches, out = tmp_path / "patches", tmp_path / "result"
    lane.make(patches)
    command = [
        sys.executable, "-m", "sglang_patches.cli", "bench", "bisect", "--good", "default",
        "--bad", ",".join(f"+{name}" for name in lane.PLANTS), "--metric", "verify_ms", "--threshold", THRESHOLD,
        # Fewer servers for the price of less care about drift, which such plants can do without; and more of them for
        # an answer that noise keeps open, which is what a busy machine takes.
        "--anchor-every", "100", "--max-turns", "12",
        "--prompts", "4", "--output-tokens", "16", "--warm-up", "1", "--out", str(out), "--", "--skip-server-warmup",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(lane.__file__).parent)]))
    env = {**os.environ, "SGLANG_PATCHES_DIR": str(patches), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    print(done.stdout)

    result = folder.load(out)
    alone, together = result.analysis["suspects"]
    assert alone["changes"] == ["+plant-slow"]
    assert together["changes"] == ["+plant-left", "+plant-right"]
    for suspect in (alone, together):
        assert suspect["minimal"]
        assert suspect["only_one"]
        assert suspect["low"] > 2.2
    checks = [check for check in result.analysis["checks"] if check["from"] == "suspect"]
    assert [(check["without"], check["answer"]) for check in checks[1:]] == [
        ("+plant-left", "good"),
        ("+plant-right", "good"),
    ]
    assert "+plant-slow: verify_ms" in result.headline
    assert "+plant-left and +plant-right only together: verify_ms" in result.headline
    # As few sets as three changes need: the ends and 4 questions. Two servers of each end, one of each set, good once
    # more; how many again depends on the machine's noise (test_bisection.py has what a quiet one takes).
    assert len(result.analysis["steps"]) == 1 + 4
    assert len(result.turns) >= 9
    # The patches under test were really those, and all servers gave the same tokens.
    by_arm = {arm.name: arm for arm in result.arms}
    for turn in result.turns:
        assert turn.document is not None
        on = {patch.name for patch in turn.document.code.patches if patch.on}
        asked = set(by_arm[turn.arm].patches.replace("+", "").split(",")) - {""}
        assert on & set(lane.PLANTS) == asked
    assert len({turn.output_sha256 for turn in result.turns} - {None}) == 1
