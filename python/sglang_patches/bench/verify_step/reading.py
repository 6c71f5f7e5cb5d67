"""Runs inside the scheduler process: what a forward must read, and how fast the device copies.

Counted are the parameters of the text models by module: an expert's weights by the experts really routed to (the ids
that upstream's ``TopK`` modules give out, counted in a pass of its own that is not timed), an embedding by rows, all
others once a forward. The KV cache is read once per request, whatever the number of its tokens in the forward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

#: Read by draft extend only: the projection of the captured states (llama_eagle3.LlamaModel.fc and its norms).
_CAPTURED_STATES = ("fc", "fc_norm")


def models(scheduler: Any) -> dict[str, Any]:
    """The model runners of a scheduler by role: target, and draft where there is one."""
    found = {"target": scheduler.tp_worker.model_runner}
    draft = getattr(scheduler, "draft_worker", None)
    if draft is not None:
        # EAGLEWorkerV2 holds an EagleDraftWorker, which holds the runner.
        found["draft"] = draft.draft_worker.draft_runner
    return found


def _text_model(runner: Any) -> torch.nn.Module:
    """Without a vision tower, which decoding does not read."""
    return getattr(runner.model, "language_model", runner.model)


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """Bytes of a model's parameters by how a forward reads them.

    Returns: ``dense`` (whole, every forward), ``captured_states`` (draft extend only), ``embedding_row`` (one token's
    row), ``experts`` (bytes of one expert by layer id).
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    out: dict[str, Any] = {"dense": 0, "captured_states": 0, "embedding_row": 0, "experts": {}}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.data_ptr() in seen or not parameter.numel():
                continue
            seen.add(parameter.data_ptr())
            size, rows = parameter.numel() * parameter.element_size(), parameter.shape[0] if parameter.dim() else 1
            if isinstance(module, FusedMoE) and rows == module.num_local_experts:
                layer = str(module.layer_id)
                out["experts"][layer] = out["experts"].get(layer, 0) + size // rows
            elif isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                out["embedding_row"] += size // rows
            elif any(part in _CAPTURED_STATES for part in name.split(".")):
                out["captured_states"] += size
            else:
                out["dense"] += size
    return out


def kv_token_bytes(pool: Any) -> int:
    """Bytes of one token in a KV pool, all layers: upstream's MHA and MLA pools.

    Raises ValueError for a pool with other buffers.
    """
    buffers = [
        buffer
        for name in ("kv_buffer", "k_buffer", "v_buffer")
        for buffer in getattr(pool, name, None) or ()
        if isinstance(buffer, torch.Tensor)
    ]
    if not buffers:
        raise ValueError(
            f"the KV pool is a {type(pool).__name__}, which has no kv_buffer or k_buffer and v_buffer of tensors: "
            "its bytes per token are not known"
        )
    return sum(buffer.numel() * buffer.element_size() // buffer.shape[0] for buffer in buffers)


def copy_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second that a large copy within the device's memory moves, read and written ones counted.

    Returns: ``gb_per_s`` (median of ten copies) and ``copied_mib``.
    """
    size = 64 << 20
    if device.type == "cuda":
        size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for turn in range(13):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            target.copy_(source)
            taken = time.perf_counter() - begun
        if turn >= 3:
            seconds.append(taken)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"gb_per_s": round(2 * size / sorted(seconds)[len(seconds) // 2] / 1e9, 1), "copied_mib": size / 2**20}


def facts(found: dict[str, Any]) -> dict[str, Any]:
    """Of each model: `weights`, ``kv_token`` (bytes), ``vocabulary`` (rows of its head) and ``layers``; and of the
    device."""
    told: dict[str, Any] = {}
    for role, runner in found.items():
        model = _text_model(runner)
        head = getattr(model, "lm_head", None)
        rows = 0 if head is None else int(head.weight.shape[0])
        told[role] = {
            **weights(model),
            "kv_token": kv_token_bytes(runner.token_to_kv_pool),
            "vocabulary": rows,
            "layers": runner.model_config.num_hidden_layers,
        }
    device = next(found["target"].model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"models": told, "device": name, "copy": copy_bandwidth(device)}


class Routing:
    """Counts, by part of the cycle and layer, the experts that forwards are routed to; and notes contexts."""

    def __init__(self, found: dict[str, Any]) -> None:
        from sglang.srt.layers.moe.topk import TopK

        self._part = ""
        self._size = 0
        self._counts: dict[tuple[str, int, str], list[int]] = defaultdict(list)
        self._contexts: dict[int, list[int]] = defaultdict(list)
        self._failed = ""
        self._hooks = [
            module.register_forward_hook(self._count)
            for runner in found.values()
            for module in _text_model(runner).modules()
            if isinstance(module, TopK)
        ]

    def enter(self, part: str, batch: Any) -> None:
        """A part begins. Waits for the device to tell the lengths, so this is for untimed passes."""
        self._part, self._size = part, len(batch.seq_lens)
        if part in ("verify", "decode"):
            self._contexts[self._size] += batch.seq_lens.tolist()

    def leave(self) -> None:
        """The part is over."""
        self._part = ""

    def _count(self, module: Any, _inputs: Any, output: Any) -> None:
        if not self._part:
            return
        ids = getattr(output, "topk_ids", None)
        if ids is None:
            self._failed = f"TopK gave out a {type(output).__name__} without ids"
            return
        chosen = torch.unique(ids)
        self._counts[self._part, self._size, str(module.layer_id)].append(int((chosen >= 0).sum()))

    def take(self, batch_size: int) -> dict[str, Any]:
        """Remove the hooks and tell of forwards of this batch size.

        Returns: ``experts`` (mean number of different experts by part and layer), ``forwards`` (counted ones by
        part), ``contexts`` (least and greatest number of cached tokens of a request when the target's forward began),
        ``failed`` (why experts are not known, or empty).
        """
        for hook in self._hooks:
            hook.remove()
        experts: dict[str, dict[str, float]] = {}
        forwards: dict[str, int] = {}
        for (part, size, layer), counts in self._counts.items():
            if size == batch_size:
                experts.setdefault(part, {})[layer] = round(sum(counts) / len(counts), 2)
                forwards[part] = len(counts)
        seen = self._contexts.get(batch_size, [])
        told = {"experts": experts, "forwards": forwards, "failed": self._failed}
        return {**told, "contexts": [min(seen), max(seen)] if seen else None}
