"""What a script of split kernels computes, in a process of its own whose patch is on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def written(script: str, patch: str, part: str, folder: Path) -> Any:
    """The tensors that ``script`` wrote for its ``part``."""
    file = folder / f"{part}.pt"
    environment = os.environ | {"SGLANG_PATCHES": f"+{patch}"}
    command = [sys.executable, str(HERE / script), part, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file, weights_only=False)
