"""GPUs by a digest in place of their UUID: in results, which are published, a UUID would say which machine it was.

The digest is the same for a GPU wherever it is made, so two results of one GPU can be told to be that.
``SGLANG_PATCHES_GPU_UUIDS=keep`` leaves UUIDs as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

from sglang_patches.document.secrets import MASK

VARIABLE, KEEP = "SGLANG_PATCHES_GPU_UUIDS", "keep"
# Whole ones, and cut short as `CUDA_VISIBLE_DEVICES` may have them: those have too few digits for a hash to hide.
_UUID = re.compile(r"\b(?:MIG-GPU|MIG|GPU)-[0-9a-f]{8}[0-9a-f/-]*(?!\w)", re.IGNORECASE)
_WHOLE = re.compile(r"(?:MIG-)?(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:/\d+/\d+)?", re.IGNORECASE)


def name(uuid: str) -> str:
    """What stands for a GPU's UUID: ``gpu:`` and 12 hexadecimal digits; a text that is no whole UUID stays as it is."""
    if not _WHOLE.fullmatch(uuid):
        return uuid
    return f"gpu:{hashlib.sha256(f'sglang-patches {uuid.lower()}'.encode()).hexdigest()[:12]}"


def unnamed(value: Any) -> Any:
    """JSON data with `name` of each UUID of a GPU, wherever it is in a text; ``***`` for one that is cut short.

    Raises:
        ValueError: ``SGLANG_PATCHES_GPU_UUIDS`` is neither empty nor ``keep``.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", KEEP):
        raise ValueError(f"{VARIABLE}={asked!r} is not known; it can be {KEEP}. Unset it to have digests in results.")
    return value if asked else _without(value)


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return _UUID.sub(lambda match: name(match[0]) if _WHOLE.fullmatch(match[0]) else MASK, value)
    if isinstance(value, list):
        return [_without(entry) for entry in value]
    return {key: _without(entry) for key, entry in value.items()} if isinstance(value, dict) else value
