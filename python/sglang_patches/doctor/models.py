"""What serving a checkpoint needs, from its ``config.json`` and the headers of its weight files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_patches import named_model, ports
from sglang_patches.doctor.host import Model, Serving
from sglang_patches.draft import check as draft_check
from sglang_patches.draft import roles
from sglang_patches.draft.checkpoint import UnreadableCheckpoint, local_config, read_headers
from sglang_patches.errors import PatchError

# What upstream's DeepSeek-V2/V3 and EAGLE-3 classes keep whole on every rank (ReplicatedLinear, norms, the router, the
# vision tower of kimi_k25 but for its attention); all other weights of 0.5.23's classes are divided among the ranks.
_WHOLE = re.compile(
    r"norm|\.gate\.|correction_bias|q_a_proj|kv_a_proj|vision_tower(?!.*\.(wqkv|wo)\.)|mm_projector"
    r"|(^|\.)(fc|d2t|t2d)(\.|$)|weight_shape"
)
# Formats of 4 bits are stored packed in whole integers, so the stored size is the served one.
_BITS = re.compile(r"\d+")
_BF16_BYTES = 2


def serving(
    model: str,
    draft: str,
    tp: int,
    port: int,
    memory_fraction: float = 0.9,
    context_length: int | None = None,
    base_gpu: int = 0,
    gpu_step: int = 1,
    environ: Mapping[str, str] | None = None,
    bind: str = ports.DEFAULT_HOST,
) -> Serving:
    """What is to be served, read from this machine.

    Args:
        model, draft: folder or hub name; empty for none.
        context_length: positions to serve; None: as many as the model allows.
        environ: of the server; None: this process's.
        bind: address or name at which the server will listen.
    """
    refusal = ports.refused(bind, port)
    target = read(model, context_length, environ) if model else None
    head = read(draft, context_length, environ) if draft else None
    refused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if target and head and target.here and head.here and not target.problem and not head.problem:
        try:
            report = draft_check.inspect(model, draft, context_length)
            refused, warnings = tuple(report.refused), tuple(report.warnings)
        except PatchError as error:
            refused = (str(error),)
    if target and target.here and not target.problem:
        target, head = _placed(target, head)
    return Serving(
        tp=tp,
        port=port,
        bind=bind,
        port_free=refusal is None,
        port_seen=refusal.seen if refusal else "",
        port_remedy=refusal.remedy if refusal else "",
        memory_fraction=memory_fraction,
        base_gpu=base_gpu,
        gpu_step=gpu_step,
        model=target,
        draft=head,
        draft_refused=refused,
        draft_warnings=warnings,
    )


def _placed(target: Model, head: Model | None) -> tuple[Model, Model | None]:
    """Both, with their problems where the target is a draft itself."""
    config, other = (local_config(one.path, None, None) if one else None for one in (target, head))
    problem = roles.no_target(config)
    if problem:
        remedy = roles.remedy(config, other, target.path, head.path if head else "")
        target = replace(target, problem=problem, remedy=remedy)
        if head and (wrong := roles.no_draft(other, config)):
            head = replace(head, problem=wrong, remedy=remedy)
    return target, head


def read(name: str, context_length: int | None = None, environ: Mapping[str, str] | None = None) -> Model:
    """One checkpoint; never raises for one that cannot be read, which is `Model.problem`.

    Args:
        environ: of the server; None: this process's.
    """
    missing = named_model.absence(name, environ)
    if missing is not None:
        problem = None if missing.fetched or missing.here else f"{name}: {missing.seen}"
        return Model(name, unread=missing.here, problem=problem, remedy=missing.remedy)
    folder = named_model.folder("model", name, environ)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"a JSON {type(raw).__name__} and not an object")
    except (OSError, ValueError) as error:
        return Model(name, here=True, problem=f"{folder / 'config.json'} cannot be read: {error}")
    config = raw.get("text_config") or raw
    try:
        split, whole = weights(folder)
        kv_split, kv_whole, kv_heads = kv_bytes(config)
        return Model(
            path=name,
            here=True,
            split=split,
            whole=whole,
            kv_split=kv_split,
            kv_whole=kv_whole,
            kv_heads=kv_heads,
            layers=int(config["num_hidden_layers"]),
            context_length=context_length or draft_check.positions(config),
        )
    except PatchError as error:
        if not named_model.is_path(name) and not named_model.offline(os.environ if environ is None else environ):
            return Model(name, remedy=f"hf download {name}")  # the server fetches the rest
        return Model(name, here=True, problem=str(error))
    except UnreadableCheckpoint as error:
        return Model(name, here=True, problem=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return Model(name, here=True, problem=f"{folder / 'config.json'} lacks or misstates {error}")


def weights(folder: Path) -> tuple[int, int]:
    """(bytes that tensor parallelism divides, bytes that every rank holds whole), as stored.

    Raises:
        UnreadableCheckpoint: a weight file is missing or broken.
        PatchError: there is none.
    """
    found = read_headers(folder)
    if found is None:
        raise PatchError(f"{folder} has no complete set of safetensors files: download the model again")
    split = whole = 0
    for name, info in found.tensors.items():
        bits = _BITS.search(info.dtype)
        size = math.prod(info.shape) * (int(bits[0]) if bits else 8) // 8  # BOOL has no number and a byte
        if _WHOLE.search(name):
            whole += size
        else:
            split += size
    return split, whole


def kv_bytes(config: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes of KV cache a token that tensor parallelism divides, bytes that are whole on every rank, key/value heads
    that the former are divided by at most), in bfloat16.

    MLA stores one latent of ``kv_lora_rank`` and one rotary key of ``qk_rope_head_dim`` a layer, shared by all heads
    (DeepSeek-V2, arXiv 2405.04434, section 2.1), so no rank can hold less than the whole.
    """
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        return 0, layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * _BF16_BYTES, 0
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return layers * 2 * kv_heads * head_dim * _BF16_BYTES, 0, kv_heads
