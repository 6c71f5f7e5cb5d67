"""In which dtypes a draft is stored and served, and whether upstream can compute so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sglang_patches.draft import conventions, shapes

if TYPE_CHECKING:
    from sglang_patches.draft.contract import Pair

# Bits of each, as safetensors spells them.
FLOATS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}
_NAMES = {"half": "float16", "float": "float32"}


def served(config: Mapping[str, Any], asked: str = "auto") -> str:
    """The dtype a model is served in, as upstream decides it (``_get_and_verify_dtype``), Gemma aside.

    Args:
        config: the model's ``config.json``.
        asked: the server's ``--dtype``.
    """
    if asked != "auto":
        return _NAMES.get(asked, asked)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if stored in ("float32", "float") else _NAMES.get(stored, stored)


def findings(pair: Pair) -> Iterator[tuple[bool, str]]:
    """What is wrong with a draft's dtypes; ``True``: it cannot work."""
    if pair.target_dtype and pair.served_dtype != pair.target_dtype:
        # `fc` gets the target's states as they are, and the embedding is the target's.
        yield (
            True,
            f"the draft is served in {pair.served_dtype} by config.json dtype (float32 or none is served in float16), "
            f"but the target in {pair.target_dtype}, and its states are not converted: start with --dtype "
            f"{pair.target_dtype}, or set dtype in the draft's config.json",
        )
    if pair.checkpoint is None or pair.quantized:
        return
    names = pair.checkpoint.tensors
    tensors = {
        name: info for name, info in names.items() if name.rpartition(".")[2] == "weight" and not shapes.idle(name)
    }
    odd = sorted(
        name
        for name, info in tensors.items()
        if info.dtype not in FLOATS
        and not (pair.conventions_read and info.dtype in conventions.EIGHT_BITS and conventions.has_scale(name, names))
    )
    if odd:
        yield (
            True,
            f"{pair.where(odd[0])} has dtype {tensors[odd[0]].dtype} ({len(odd)} such tensors), but config.json "
            "has no quantization_config that says how to read it"
            + (", and no weight_scale is beside it" if pair.conventions_read else ""),
        )
    kinds = sorted({info.dtype for info in tensors.values() if info.dtype in FLOATS})
    narrow = pair.served_dtype in ("bfloat16", "float16")
    if narrow and any(FLOATS[kind] > 16 or (kind, pair.served_dtype) == ("BF16", "float16") for kind in kinds):
        yield False, f"weights are {', '.join(kinds)} and served in {pair.served_dtype}, which rounds or overflows"
