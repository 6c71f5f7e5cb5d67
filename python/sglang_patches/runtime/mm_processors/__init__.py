"""Multimodal processors, for `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=sglang_patches.runtime.mm_processors`.

Upstream imports every module of the package that this variable names before it makes the model's processor.
"""

from __future__ import annotations
