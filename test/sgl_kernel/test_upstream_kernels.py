"""Our functions against SGLang's own Triton kernels, run by Triton's interpreter, and through SGLang's call sites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("compare_with_upstream.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, SGLang's call sites use its CUDA kernels")
def test_equal_to_upstreams_kernels() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PATCHES": "none"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared 9 functions" in done.stdout
