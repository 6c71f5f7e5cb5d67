"""Loads drafts with upstream's own `ModelRunner` on the CPU and drafts with each of them from the same captured states;
see `test_llama_eagle3_draft_loading.py`, which starts it, in a process of its own as `draft_loading.py` says.

    python draft_reading.py FOLDER       (FOLDER/NAME: one draft each; writes FOLDER/results.json, FOLDER/NAME.pt)

The draft's forward is upstream's; only its attention (which wants pools and a backend) is plain causal attention here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import runners
import torch
from draft_reference import inputs
from ranks import free_port

from sglang_patches.draft import shapes

PATCH = "llama-eagle3-draft-loading"


def attend(layer: Any) -> Any:
    """Causal attention of one request, in the place of `RadixAttention.forward`."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
        q, k, v = (t.view(len(t), n, dim).transpose(0, 1) for t, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scaling)
        return out.transpose(0, 1).reshape(out.shape[1], -1)

    return forward


def drafted(model: Any, states: int, decode: bool = False) -> dict[str, torch.Tensor]:
    """``logits`` float ``[tokens, draft vocabulary]`` and ``tokens``, the target's ids of the best, from `inputs`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for layer in model.model.layers:
        layer.self_attn.attn.forward = attend(layer.self_attn.attn)
    ids, hidden = inputs(states)
    batch = SimpleNamespace(
        mm_input_embeds=None,
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        contains_mm_inputs=lambda: False,
        spec_info=SimpleNamespace(hidden_states=hidden),
    )
    out, _aux = model.model(ids, torch.arange(len(ids)), batch)
    logits = out @ model.lm_head.weight.T[:, : model.config.draft_vocab_size]
    best = logits.argmax(-1)
    return {"logits": logits, "tokens": best if model.hot_token_id is None else model.hot_token_id[best]}


def updated(model: Any) -> bool | str:
    """Whether an update in a running server takes what the draft has of it, and passes over the target's."""
    piece = {
        "language_model.model.layers.3.mlp.up_proj.weight": torch.zeros(8, 4),
        "norm.weight": torch.full((256,), 2),
    }
    try:
        model.load_weights(piece.items())
    except ValueError as error:
        return str(error)
    return bool((model.model.norm.weight == 2).all())


def load(arguments: Any, target: Any, folder: Path) -> dict[str, Any]:
    """Load one draft and join it to the target as upstream's draft worker does (``EagleDraftWorker.init_lm_head``)."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_patches.runtime import _outcome

    os.environ["SGLANG_PATCHES_DRAFT_CONTRACT"] = "warn" if folder.name.endswith("-warn") else "refuse"
    try:
        config = ModelConfig.from_server_args(arguments, model_path=str(folder), is_draft_model=True)
        model = runners.runner(arguments, config, is_draft_worker=True).model
    except Exception as error:
        return {"error": [type(error).__name__, str(error)]}
    kept: dict[str, Any] = {}
    if folder.name.startswith("mla"):  # whose class takes the target's embedding with CUDA only
        kept["parameters"] = {name: t.data for name, t in model.named_parameters() if "embed_tokens" not in name}
    else:
        embed, head = target.get_embed_and_head()
        if model.load_lm_head_from_target:
            model.set_embed_and_head(embed, head)
        else:
            model.set_embed(embed)
        with torch.no_grad():
            states = model.model.num_aux_hidden_states if shapes.takes_states(model.config) else 1
            kept |= drafted(model, states)
            if folder.name == "one-state":
                kept["decoded"] = drafted(model, states, decode=True)["logits"]
    torch.save(kept, folder.with_suffix(".pt"))
    result: dict[str, Any] = {"error": None, "outcome": _outcome.outcomes().get(PATCH)}
    if folder.name == "specforge":
        result["updated"] = updated(model)
    return result


def main(folder: Path) -> None:
    arguments, runner = runners.start(free_port())
    drafts = sorted(path for path in folder.iterdir() if path.is_dir())
    results = {draft.name: load(arguments, runner.model.language_model, draft) for draft in drafts}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
