"""Loads drafts with upstream's own `ModelRunner` on the CPU and tells what came of each; see
`test_kimi_k25_eagle3_delegation_loading.py`, which starts it. A process of its own: upstream publishes its arguments
and its parallel groups once a process.

    python draft_loading.py FOLDER       (FOLDER/NAME: one draft each; writes FOLDER/results.json)

For every draft: ``error`` (class and text, or null), ``outcome`` (the patch's entry), ``finite`` (all parameters are),
``same`` (those called as in the checkpoint are equal to it), and the target's own answers under ``target``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import runners  # first: it sets what upstream reads as it is imported
import torch
from ranks import free_port
from safetensors.torch import load_file

PATCH = "kimi-k25-eagle3-delegation"


def load(arguments: Any, folder: Path) -> dict[str, Any]:
    """Load one draft as upstream's draft worker does."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_patches.runtime import _outcome

    os.environ["SGLANG_PATCHES_DRAFT_CONTRACT"] = "warn" if folder.name.endswith("-warn") else "refuse"
    config = ModelConfig.from_server_args(arguments, model_path=str(folder), is_draft_model=True)
    result: dict[str, Any] = {"error": None}
    try:
        model = runners.runner(arguments, config, is_draft_worker=True).model
    except Exception as error:
        result["error"] = [type(error).__name__, str(error)]
    else:
        parameters = dict(model.named_parameters())
        stored = load_file(folder / "model.safetensors")
        both = {name: name if name in parameters else f"model.{name}" for name in stored}
        result["finite"] = all(bool(torch.isfinite(tensor).all()) for tensor in parameters.values())
        result["same"] = [
            name for name, inside in both.items()
            if inside in parameters and torch.equal(parameters[inside].data, stored[name].to(parameters[inside].dtype))
        ]  # fmt: skip
    result["outcome"] = _outcome.outcomes().get(PATCH)
    return result


def ask(wrapper: Any) -> dict[str, Any]:
    """What the target's wrapper answers to those who ask it, also without its vision tower."""
    from sglang_patches.runtime import kimi_k25_eagle3_delegation as delegation

    inner = wrapper.language_model
    del wrapper.vision_tower, wrapper.mm_projector
    wrapper.set_eagle3_layers_to_capture([1, 5, 8])
    before = wrapper.capture_aux_hidden_states
    wrapper.capture_aux_hidden_states = not before
    embed, head = wrapper.get_embed_and_head()
    answers = {
        "captures": before is True,
        "written through": inner.capture_aux_hidden_states is not before,
        "pp_group": wrapper.pp_group is inner.pp_group and wrapper.pp_group.is_last_rank,
        "logits_processor": wrapper.logits_processor is inner.logits_processor,
        "lm_head": wrapper.lm_head is inner.lm_head and head is inner.lm_head.weight,
        "embedding": wrapper.get_input_embeddings().weight is embed,
        "no new names": not [name for name, _ in wrapper.named_parameters() if not name.startswith("language_model.")],
        "body": delegation.owner_of_body(wrapper) is inner and delegation.owner_of_body(inner) is inner,
    }
    config = copy.deepcopy(wrapper.config)
    config.encoder_only = True
    refusals: dict[str, str] = {}
    answers["refusals"] = refusals
    if runners.RELEASE == "0.5.9":  # knows no encoder node of this model
        return answers
    encoder = type(wrapper)(config)
    arguments: dict[str, list[Any]] = {"set_eagle3_layers_to_capture": [[1]]}
    for name in (
        "capture_aux_hidden_states", "pp_group", "logits_processor", "lm_head", "get_embed_and_head",
        "get_input_embeddings", "set_eagle3_layers_to_capture", "no_such_thing",
    ):  # fmt: skip
        try:
            getattr(encoder, name)(*arguments.get(name, []))
            refusals[name] = "answered"
        except AttributeError as error:
            refusals[name] = str(error)
    answers["hasattr"] = [hasattr(encoder, name) for name in ("pp_group", "lm_head")]
    return answers


def main(folder: Path) -> None:
    from sglang_patches.runtime import _outcome

    arguments, runner = runners.start(free_port())
    results: dict[str, Any] = {"checked": _outcome.outcomes().get(PATCH)}
    for draft in sorted(path for path in folder.iterdir() if path.is_dir()):
        results[draft.name] = load(arguments, draft)
    results["target"] = ask(runner.model)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
