"""``python -m sglang_patches.nccl``."""

from __future__ import annotations

from sglang_patches.nccl.app import app

if __name__ == "__main__":
    app(prog_name="sglang-patches nccl")
