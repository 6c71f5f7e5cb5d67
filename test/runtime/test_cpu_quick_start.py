"""cpu-quick-start: who imports FlashInfer, in fresh interpreters with the real upstream."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sglang_patches.runtime import cpu_quick_start

# Imports all of the files that the patch touches.
LOAD = (
    "import sys, sglang.srt.layers.moe.token_dispatcher.flashinfer as dispatcher;"
    "import sglang.srt.layers.quantization.modelopt_quant as modelopt;"
    "from sglang.srt.layers.quantization import fp4_utils;"
    "print('flashinfer' in sys.modules, dispatcher.use_flashinfer, modelopt.enable_flashinfer_fp4_gemm,"
    " fp4_utils.fp4_quantize is not None)"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer is of use here")
@pytest.mark.parametrize(("patches", "wanted"), [("default", "False False False False"), ("-cpu-quick-start", "True ")])
def test_flashinfer_is_left_out_only_with_the_patch(patches: str, wanted: str) -> None:
    environ = {**os.environ, "SGLANG_PATCHES": patches, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(wanted), done.stdout


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_wants_it(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if gpu:
        cpu_quick_start.wants_flashinfer()
    else:
        with pytest.raises(ImportError, match="no GPU"):
            cpu_quick_start.wants_flashinfer()
