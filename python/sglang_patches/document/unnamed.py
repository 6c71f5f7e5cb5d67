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
_DIGITS = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# No more than the digits, and what may stand beside a name in a file's: node_GPU-..., GPU-..._trace.json.
_WHOLE = re.compile(
    rf"(?<![0-9a-z])(?:MIG-GPU-{_DIGITS}(?:/\d+/\d+)?|(?:GPU|MIG)-{_DIGITS})(?![0-9a-f])", re.IGNORECASE | re.ASCII
)
# What is left: cut short, as CUDA accepts them, or run into other text. Too few digits for a hash to hide. Up to three
# stay, as in GPU-0 and MIG-1g.10gb: they tell no machine; and so do words, as in GPU-accelerated.
_LEFT = re.compile(
    r"(?:MIG-GPU|MIG|GPU)-[0-9a-f]{8}[0-9a-f-]*|(?<![0-9a-z])(?:MIG-GPU|MIG|GPU)-[0-9a-f]{4,7}(?![0-9a-z])",
    re.IGNORECASE | re.ASCII,
)


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
        return _LEFT.sub(MASK, _WHOLE.sub(lambda match: name(match[0]), value))
    if isinstance(value, (list, tuple)):
        mapped = [_without(entry) for entry in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return _fields(value) if isinstance(value, dict) else value


def _fields(value: dict[Any, Any]) -> dict[Any, Any]:
    """Keys too; two that become the same are numbered, so that none is lost."""
    found: dict[Any, Any] = {}
    for key, entry in value.items():
        told, number = (put := _without(key)), 1
        while told in found:
            number += 1
            told = f"{put} ({number})"
        found[told] = _without(entry)
    return found
