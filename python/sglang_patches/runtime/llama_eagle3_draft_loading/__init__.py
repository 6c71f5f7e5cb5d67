"""Patch ``llama-eagle3-draft-loading``: drafts in the conventions that are in use load right, or are refused by name.

`reading` says a draft's ``config.json`` in upstream's words (``get_config``), `loading` does so with its tensors and
accounts for each (``load_weights`` of the two draft classes), `model` adds what their forward lacks: the residual after
the norm, states as wide as the draft itself, an embedding of the draft's own. What is known of conventions is in
`sglang_patches.draft`. These names are what patched lines call.
"""

from __future__ import annotations

from sglang_patches.runtime.llama_eagle3_draft_loading.model import (
    projected,
    residual_of,
    takes_every_convention,
)
from sglang_patches.runtime.llama_eagle3_draft_loading.reading import reads_drafts

__all__ = ["projected", "reads_drafts", "residual_of", "takes_every_convention"]
