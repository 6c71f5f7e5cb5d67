"""The least time that a part of a cycle needs: the bytes it must read, over the bandwidth of a copy on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOGIT_BYTES = 4  # upstream's logits are float32


def part_bytes(
    models: Mapping[str, Any], experts: Mapping[str, Mapping[str, float]], batch_size: int, context: float, tokens: int
) -> dict[str, dict[str, int]]:
    """Bytes that each part of one cycle must read, by what is read.

    Args:
        models: as `reading.facts` tells them, by role.
        experts: different experts routed to in one forward, by part and layer.
        batch_size: requests.
        context: cached tokens of a request.
        tokens: draft tokens of a chain, its root included, which is one more than the draft's steps; 0: plain decode.

    Returns: by part, bytes by ``weights``, ``experts``, ``kv``, ``embedding`` or ``logits``. The host gap needs none.
    """
    target = models["target"]
    kv = int(batch_size * context)
    width = max(tokens, 1)

    def forward(model: Mapping[str, Any], part: str, rows: int, times: int = 1) -> dict[str, int]:
        routed = experts.get(part, {})
        return {
            "weights": times * model["dense"],
            "experts": int(times * sum(size * routed.get(layer, 0) for layer, size in model["experts"].items())),
            "kv": times * kv * model["kv_token"],
            "embedding": times * rows * model["embedding_row"],
        }

    rows = batch_size * width
    sampling = {"logits": rows * target["vocabulary"] * _LOGIT_BYTES}
    if not tokens:
        return {"decode": forward(target, "decode", rows), "sampling": sampling}
    draft = models["draft"]
    extend = forward(draft, "draft_extend", rows)
    extend["weights"] += draft["captured_states"]
    return {
        # The first drafted token comes from the former cycle's draft extend; the last one is not fed again.
        "draft_decode": forward(draft, "draft_decode", batch_size, times=max(tokens - 2, 0)),
        "verify": forward(target, "verify", rows),
        "sampling": sampling,
        "draft_extend": extend,
    }


def milliseconds(size: float, gb_per_s: float) -> float:
    """Time of reading `size` bytes at `gb_per_s` (10^9 bytes a second)."""
    return size / gb_per_s / 1e6
