"""What upstream has taken over of a patch, in its own way: recorded as `Applied-Upstream`, gone from the lanes since
then, and still done there, by upstream alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lane_table
import pytest
import torch
from packaging.version import Version

from sglang_patches import series

HERE = Path(__file__).parent
LANES = series.releases(lane_table.REPO / "patches")

_DELEGATION = """
from types import SimpleNamespace
import torch
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as Wrapper
told = []
wrapper = Wrapper.__new__(Wrapper)
torch.nn.Module.__init__(wrapper)
wrapper.language_model = SimpleNamespace(
    set_eagle3_layers_to_capture=told.append, set_embed_and_head=lambda *both: told.append(both),
    get_embed_and_head=lambda: ("embedding", "head"),
)
wrapper.set_eagle3_layers_to_capture([1, 5, 8])
wrapper.set_embed_and_head(*wrapper.get_embed_and_head())
assert told == [[1, 5, 8], ("embedding", "head")], told
"""
_MASKS = """
from sglang.srt.constrained import xgrammar_backend
mask = xgrammar_backend._allocate_token_bitmask(65, 2)
assert mask.tolist() == [[-1, -1, -1]] * 2 and not mask.is_pinned()
"""
# Patch -> the first release that does it by itself, what it does, and how it ends without that. With a GPU driver a
# pinned mask is as good.
TAKEN_OVER = {
    "kimi-k25-eagle3-delegation": ("0.5.10", _DELEGATION, "has no attribute 'set_eagle3_layers_to_capture'"),
    "cpu-grammar": ("0.5.18", _MASKS, "RuntimeError"),
}


@pytest.mark.parametrize("release", LANES)
def test_every_lane_records_what_upstream_has_since_when(release: str) -> None:
    lane = series.load(release, lane_table.REPO / "patches")
    recorded = {
        patch.name: since[1]
        for patch in lane.patches
        if (since := re.fullmatch(r"in part, .+, since (\d+\.\d+\.\d+)", patch.field("Applied-Upstream")))
    }
    assert recorded == {name: since for name, (since, *_) in TAKEN_OVER.items() if name in lane.by_name}


@pytest.mark.parametrize("patch", TAKEN_OVER)
def test_upstream_does_it_by_itself_since_then_and_not_before(patch: str) -> None:
    since, code, without = TAKEN_OVER[patch]
    if not lane_table.has(patch):
        pytest.skip(f"lane {lane_table.release()} has no {patch}")
    if patch == "cpu-grammar" and torch.cuda.is_available():
        pytest.skip("memory can be pinned")
    environ = os.environ | {
        "SGLANG_PATCHES": f"-{patch}", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    if Version(lane_table.release()) >= Version(since):
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        assert without in done.stderr
