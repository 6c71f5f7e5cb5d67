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

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

import lane_table
import torch
from drafts import DRAFT, TARGET
from ranks import free_port
from safetensors.torch import load_file

if lane_table.release() == "0.5.9":
    import target_0_5_9

PATCH = "kimi-k25-eagle3-delegation"


def start() -> tuple[Any, Any]:
    """Upstream's arguments, published, and the target's `ModelRunner`, as `sglang.benchmark.one_batch` makes it."""
    if lane_table.release() == "0.5.9":
        runner = target_0_5_9.make_runner(0, 1, free_port())
        return runner.server_args, runner
    from sglang.benchmark.one_batch import _init_process_global_configs
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(TARGET), device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        grammar_backend="none", dtype="float32", max_total_tokens=2048, speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(DRAFT), speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4, log_level="warning",
    )  # fmt: skip
    arguments.resolve_once()
    _set_envs_and_config(arguments)
    publish(
        arguments,
        role="scheduler",
        ranks=SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0),
    )
    _init_process_global_configs()
    config, port = ModelConfig.from_server_args(arguments), free_port()
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    runner = ModelRunner(model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=port, server_args=arguments)
    return arguments, runner


def load(arguments: Any, folder: Path) -> dict[str, Any]:
    """Load one draft as upstream's draft worker does."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_patches.runtime import _outcome

    os.environ["SGLANG_PATCHES_DRAFT_CONTRACT"] = "warn" if folder.name.endswith("-warn") else "refuse"
    config = ModelConfig.from_server_args(arguments, model_path=str(folder), is_draft_model=True)
    result: dict[str, Any] = {"error": None}
    try:
        more = target_0_5_9.ONE_RANK if lane_table.release() == "0.5.9" else {}
        model = ModelRunner(
            model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=0, server_args=arguments,
            is_draft_worker=True, **more,
        ).model  # fmt: skip
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
    if lane_table.release() == "0.5.9":  # knows no encoder node of this model
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

    arguments, runner = start()
    results: dict[str, Any] = {"checked": _outcome.outcomes().get(PATCH)}
    for draft in sorted(path for path in folder.iterdir() if path.is_dir()):
        results[draft.name] = load(arguments, draft)
    results["target"] = ask(runner.model)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
