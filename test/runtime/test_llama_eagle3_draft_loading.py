"""llama-eagle3-draft-loading: one trained draft in every convention drafts the same tokens, or is refused by name."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_reference
import pytest
import torch
from drafts import DRAFT, REMOVED, TARGET, Tensors, mla_draft, renamed, setting, without, write_draft
from safetensors.torch import load_file

from sglang_patches.draft.check import inspect

HERE = Path(__file__).parent
Draft = Callable[[Path], Path]
_SMALL = torch.Generator().manual_seed(3)


@functools.cache
def of_target(ending: str) -> torch.Tensor:
    tensors = load_file(TARGET / "model.safetensors")
    return next(tensor for name, tensor in tensors.items() if name.endswith(ending))


def made(config: dict[str, Any] | None = None, *edits: Callable[[Tensors], None]) -> Draft:
    """The bundled draft with keys of its configuration and its tensors changed."""

    def edit(tensors: Tensors) -> None:
        for one in edits:
            one(tensors)

    return lambda folder: write_draft(folder, config, edit)


def noise(*shape: int, scale: float = 0.05) -> torch.Tensor:
    return (torch.randn(shape, generator=_SMALL) * scale).to(torch.bfloat16)


def near_one(size: int = 256) -> torch.Tensor:
    return (1 + noise(size, scale=0.3).float()).to(torch.bfloat16)


layers_0 = renamed(lambda name: name.replace("midlayer", "layers.0"))
prefixed = renamed(lambda name: f"model.{name}" if name.startswith(("layers", "fc", "norm")) else name)
with_target_embedding = setting(embed_tokens__weight=lambda tensors: of_target("embed_tokens.weight"))
OWN_EMBEDDING = noise(4096, 256, scale=1)
NORMS = [near_one() for _ in range(3)]
BEFORE = near_one(768)
SIX, ONE = noise(256, 6 * 256), noise(256, 256)
HEAD = noise(4096, 256)


def speculators(config: dict[str, Any] | None = None, *edits: Callable[[Tensors], None]) -> Draft:
    """As speculators save it: sizes in ``transformer_layer_config``, the rest at top level."""
    flat = json.loads((DRAFT / "config.json").read_text())
    layer = {key: flat[key] for key in flat if key not in ("architectures", "draft_vocab_size", "eagle_config")}
    # Left out where it is LlamaConfig's default.
    del layer["rms_norm_eps"], layer["hidden_act"], layer["target_hidden_size"]
    settings = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": 3072, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "transformer_layer_config": layer, "speculators_config": {"algorithm": "eagle3"}, **(config or {}),
    }  # fmt: skip

    def write(folder: Path) -> Path:
        made({}, layers_0, with_target_embedding, *edits)(folder)
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return write


def of_ids(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(3072)


def fused(tensors: Tensors) -> None:
    for whole, parts in (("self_attn.qkv_proj", "self_attn.{}_proj:qkv"), ("mlp.gate_up_proj", "mlp.{}_proj:gate up")):
        name, _, each = parts.partition(":")
        found = each.split() if " " in each else list(each)
        both = [tensors.pop(f"layers.0.{name.format(part)}.weight") for part in found]
        tensors[f"layers.0.{whole}.weight"] = torch.cat(both)


def second_layer(tensors: Tensors) -> None:
    for name, shape in (("q", (256, 256)), ("k", (128, 256)), ("v", (128, 256)), ("o", (256, 256))):
        tensors[f"layers.1.self_attn.{name}_proj.weight"] = SECOND[name][: shape[0], : shape[1]].clone()
    tensors["layers.1.mlp.gate_proj.weight"], tensors["layers.1.mlp.up_proj.weight"] = SECOND["gate"], SECOND["up"]
    tensors["layers.1.mlp.down_proj.weight"] = SECOND["down"]
    tensors["layers.1.hidden_norm.weight"], tensors["layers.1.post_attention_layernorm.weight"] = NORMS[:2]


SECOND = {name: noise(256, 256) for name in "qkvo"}
SECOND |= {"gate": noise(768, 256), "up": noise(768, 256), "down": noise(256, 768)}
norm_as_llama = renamed(lambda name: name.replace("layers.1.hidden_norm", "layers.1.input_layernorm"))
# Upstream's class has this parameter and does not compute with it.
unused_norm = setting(layers__1__input_layernorm__weight=NORMS[2])
O_BIAS, OUT_BIAS = "layers__0__self_attn__o_proj__bias", noise(256, scale=1)
as_midlayers = renamed(lambda name: name.replace("layers.", "midlayer."))


def eight_bits(scale_of: Callable[[torch.Tensor], tuple[str, torch.Tensor]]) -> Callable[[Tensors], None]:
    """Every projection in FP8 with its scale beside it."""

    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight") or n == "fc.weight"]:
            weight = tensors[name].float()
            end, scale = scale_of(weight)
            spread = scale
            if scale.dim() == 2 and scale.shape[1] > 1:
                spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + end] = scale

    return edit


def by_tensor(weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return "weight_scale", weight.abs().max() / 448


def by_row(weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return "weight_scale", weight.abs().amax(1, keepdim=True) / 448


def by_block(weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    rows, columns = -(-len(weight) // 128), -(-weight.shape[1] // 128)
    blocks = weight.unfold(0, 128, 128).unfold(1, 128, 128).abs().amax((2, 3))
    assert blocks.shape == (rows, columns)
    return "weight_scale_inv", blocks / 448


def ids(*numbers: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(numbers), "use_aux_hidden_state": True}}


NO_MAPS = without("lm_head.weight", "d2t", "t2d")
# All of these are the bundled draft, so they must draft as it does.
SAME: dict[str, Draft] = {
    "specforge": made(),
    "modelopt": made({}, layers_0, without("t2d")),
    "automodel": made({}, layers_0, prefixed),
    "speculators": speculators(),
    "speculators-verifier": speculators({}, setting(verifier_norm__weight=torch.ones(256))),
    "angelslim": made(
        {"architectures": ["Eagle3LlamaForCausalLM"], "eagle_config": REMOVED}, with_target_embedding,
    ),
    "eagle": made({"architectures": ["LlamaForCausalLM"], "eagle_config": REMOVED}),
    "ids": made({}, of_ids),
    "ids-no-t2d": made({}, of_ids, without("t2d")),
    "t2d-alone": made({}, without("d2t")),
    "no-size": made({"draft_vocab_size": REMOVED}),
    "fused": made({}, layers_0, fused),
}  # fmt: skip
# Others, each against the reference with the same tensors: (draft, tensors that change, reference's arguments).
OTHERS: dict[str, tuple[Draft, Callable[[Tensors], None], dict[str, Any]]] = {
    "one-state": (made(ids(5), setting(fc__weight=ONE)), setting(fc__weight=ONE), {"states": 1}),
    "six-states": (made(ids(1, 2, 3, 5, 7, 8), setting(fc__weight=SIX)), setting(fc__weight=SIX), {"states": 6}),
    "fc-norm": (
        made({"fc_norm": True}, setting(**{f"fc_norm__{i}__weight": norm for i, norm in enumerate(NORMS)})),
        setting(**{f"fc_norm__{i}__weight": norm for i, norm in enumerate(NORMS)}), {},
    ),
    "aux-norm": (
        made(
            {"use_aux_norm": True},
            setting(aux_norm_low__weight=NORMS[0], aux_norm_mid__weight=NORMS[1], aux_norm_high__weight=NORMS[2]),
        ),
        setting(**{f"fc_norm__{i}__weight": norm for i, norm in enumerate(NORMS)}), {},
    ),
    "norm-before-fc": (
        made({"norm_before_fc": True}, setting(input_norm__weight=BEFORE)), setting(input_norm__weight=BEFORE), {},
    ),
    "after-norm": (speculators({"norm_before_residual": True}), setting(), {"after_norm": True}),
    "no-states": (
        made(
            {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}},
            without("fc.weight", "midlayer.hidden_norm.weight"),
        ),
        setting(layers__0__hidden_norm__weight=torch.ones(256)), {"states": 1, "fused": False},
    ),
    "two-layers": (made({"num_hidden_layers": 2}, layers_0, second_layer), second_layer, {}),
    "two-layers-modelopt": (
        made({"num_hidden_layers": 2}, layers_0, second_layer, as_midlayers), second_layer, {},
    ),
    "two-layers-vllm": (
        made({"num_hidden_layers": 2}, layers_0, second_layer, norm_as_llama), second_layer, {},
    ),
    "two-layers-both-norms": (
        made({"num_hidden_layers": 2}, layers_0, second_layer, unused_norm), second_layer, {},
    ),
    "o-bias": (
        made({"attention_bias": True}, layers_0, setting(**{O_BIAS: OUT_BIAS})), setting(**{O_BIAS: OUT_BIAS}), {},
    ),
    "own-embedding": (made({}, setting(embed_tokens__weight=OWN_EMBEDDING)), setting(), {"embedding": OWN_EMBEDDING}),
    "own-embedding-target-head": (
        made({"draft_vocab_size": 4096}, NO_MAPS, setting(embed_tokens__weight=OWN_EMBEDDING)), NO_MAPS,
        {"embedding": OWN_EMBEDDING, "head": "target"},
    ),
    "tied": (
        made({"tie_word_embeddings": True, "draft_vocab_size": REMOVED}, NO_MAPS), NO_MAPS, {"head": "embedding"},
    ),
    "tied-own": (
        made(
            {"tie_word_embeddings": True, "draft_vocab_size": REMOVED}, NO_MAPS,
            setting(embed_tokens__weight=OWN_EMBEDDING),
        ),
        NO_MAPS, {"embedding": OWN_EMBEDDING, "head": "embedding"},
    ),
    "target-head": (made({"draft_vocab_size": 4096}, NO_MAPS), NO_MAPS, {"head": "target"}),
    "whole-vocabulary": (
        made({"draft_vocab_size": REMOVED}, NO_MAPS, setting(lm_head__weight=HEAD)), NO_MAPS, {"head": HEAD},
    ),
    "fp8-tensor": (made({}, layers_0, eight_bits(by_tensor)), eight_bits(by_tensor), {}),
    "fp8-row": (made({}, layers_0, eight_bits(by_row)), eight_bits(by_row), {}),
    "fp8-block": (made({}, layers_0, eight_bits(by_block)), eight_bits(by_block), {}),
}  # fmt: skip


def mla_fused(tensors: Tensors) -> None:
    both = [tensors.pop(f"layers.0.self_attn.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors["layers.0.self_attn.fused_qkv_a_proj.weight"] = torch.cat(both)


MLA: dict[str, Draft] = {
    "mla": mla_draft,
    "mla-prefixed": lambda f: mla_draft(f, {}, renamed(lambda n: n if "lm_head" in n else f"model.{n}")),
    "mla-midlayer": lambda f: mla_draft(
        f, {"architectures": ["DeepseekV3ForCausalLMEagle3"]}, renamed(lambda n: n.replace("layers.0", "midlayer"))
    ),
    "mla-fused": lambda f: mla_draft(f, {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, mla_fused),
}
REFUSED: dict[str, tuple[Draft, list[str]]] = {
    "x-no-norm": (made({}, without("norm.weight")), ["no tensor for 1 parameters", "norm.weight [256]"]),
    "x-no-k": (
        made({}, without("midlayer.self_attn.k_proj.weight")), ["layers.0.self_attn.k_proj.weight [128, 512]"],
    ),
    "x-fc": (
        made({}, setting(fc__weight=SIX)),
        ["tensor fc.weight", "has shape [256, 1536], expected [256, 768]"],
    ),
    "x-transposed": (
        made({}, setting(midlayer__mlp__up_proj__weight=lambda t: t["midlayer.mlp.up_proj.weight"].T.contiguous())),
        ["tensor midlayer.mlp.up_proj.weight", "has shape [256, 768]", "[768, 256]"],
    ),
    "x-extra": (
        made({}, setting(midlayer__self_attn__q_norm__weight=torch.ones(64))),
        ["midlayer.self_attn.q_norm.weight [64]"],
    ),
    "x-bias": (
        made({}, setting(midlayer__self_attn__q_proj__bias=torch.ones(256))), ["midlayer.self_attn.q_proj.bias [256]"],
    ),
    "x-no-o-bias": (made({"attention_bias": True}), ["layers.0.self_attn.o_proj.bias [256]"]),
    "x-size": (made({"draft_vocab_size": "3072"}), ["draft_vocab_size is '3072', expected an integer from 1 to"]),
    "mla-x-residual": (lambda f: mla_draft(f, {"norm_before_residual": True}), ["norm_before_residual is true"]),
    "x-twice": (
        made({}, setting(layers__0__hidden_norm__weight=torch.ones(256))),
        ["layers.0.hidden_norm.weight and midlayer.hidden_norm.weight", "are the same parameter"],
    ),
    "x-other-names": (
        made({}, renamed(lambda n: n.replace("midlayer", "decoder"))),
        ["decoder.hidden_norm.weight [256]", "layers.0.hidden_norm.weight [256]"],
    ),
    "x-no-maps": (made({}, without("d2t", "t2d")), ["no tensor d2t", "3072", "of the target's 4096"]),
    "x-float-maps": (
        made({}, setting(d2t=lambda t: t["d2t"].float())),
        ["tensor d2t", "shape [3072]", "integers"],
    ),
    "x-fp8": (
        made({}, setting(fc__weight=lambda t: t["fc.weight"].to(torch.float8_e4m3fn))),
        ["tensor fc.weight", "no weight_scale"],
    ),
    "x-states": (
        made({"eagle_config": REMOVED}, setting(fc__weight=SIX)),
        ["fc.weight has shape [256, 1536], which takes 6 captured states of 256", "no key of config.json names the"],
    ),
    "x-tied": (
        made({"tie_word_embeddings": True}, without("lm_head.weight")),
        ["tie_word_embeddings makes", "but draft_vocab_size is 3072"],
    ),
    "x-peagle": (speculators({"speculators_model_type": "peagle"}), ["speculators_model_type is 'peagle'"]),
    "x-torchspec": (
        lambda f: mla_draft(f, {"architectures": ["DeepSeekForCausalLMEagle3"]}), ["TorchSpec's format for training"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All drafts, loaded by a process with all patches on, so watched by kimi-k25-eagle3-delegation, too."""
    folder = tmp_path_factory.mktemp("drafts")
    for name, draft in (SAME | {name: case[0] for name, case in OTHERS.items()} | MLA).items():
        draft(folder / name)
    for name, (draft, _said) in REFUSED.items():
        draft(folder / name)
    made({}, without("norm.weight"))(folder / "z-warn")
    environ = {key: found for key, found in os.environ.items() if not key.startswith("SGLANG_PATCHES_")}
    environ |= {key: os.environ[key] for key in ("SGLANG_PATCHES_CACHE", "SGLANG_PATCHES_DIR") if key in os.environ}
    done = subprocess.run(
        [sys.executable, "draft_reading.py", str(folder)],
        cwd=HERE, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())[name]


def drafted(folder: Path, name: str) -> dict[str, Any]:
    found = result(folder, name)
    assert found["error"] is None
    return torch.load(folder / f"{name}.pt")


def reference(edit: Callable[[Tensors], None], **how: Any) -> Tensors:
    tensors = load_file(DRAFT / "model.safetensors")
    layers_0(tensors)
    edit(tensors)
    for name in [n for n in tensors if tensors[n].dtype == torch.float8_e4m3fn]:
        stem = name.removesuffix("weight")
        scale = (
            tensors[stem + "weight_scale"] if stem + "weight_scale" in tensors else tensors[stem + "weight_scale_inv"]
        )
        if "weight_scale_inv" not in stem and stem + "weight_scale_inv" in tensors:
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        tensors[name] = (tensors[name].float() * scale).to(torch.bfloat16)
    head, embedding = how.pop("head", None), how.pop("embedding", of_target("embed_tokens.weight"))
    if isinstance(head, torch.Tensor):
        tensors["lm_head.weight"] = head
    elif head == "embedding":
        tensors["lm_head.weight"] = embedding
    elif head == "target":
        tensors["lm_head.weight"] = of_target("lm_head.weight")
    return draft_reference.logits(tensors, embedding, how.pop("states", 3), **how)


def test_upstream_drafts_as_the_reference_does(folder: Path) -> None:
    found, wanted = drafted(folder, "specforge"), reference(setting())
    torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
    offsets = load_file(DRAFT / "model.safetensors")["d2t"]
    assert torch.equal(found["tokens"], wanted["best"] + offsets[wanted["best"]])
    assert result(folder, "specforge")["outcome"]["result"] == "not needed"


@pytest.mark.parametrize("name", SAME)
def test_one_draft_in_every_convention_drafts_the_same(folder: Path, name: str) -> None:
    found, wanted = drafted(folder, name), drafted(folder, "specforge")
    assert torch.equal(found["logits"], wanted["logits"])
    assert torch.equal(found["tokens"], wanted["tokens"])


@pytest.mark.parametrize("name", OTHERS)
def test_variants_draft_as_the_reference_does(folder: Path, name: str) -> None:
    _draft, edit, how = OTHERS[name]
    found, wanted = drafted(folder, name), reference(edit, **how)
    torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-3, atol=1e-3)
    assert torch.equal(found["logits"].argmax(-1), wanted["best"])
    # The variant matters: without it another draft would have been made.
    if not name.startswith("fp8") and wanted["logits"].shape[-1] == 3072:
        assert not torch.allclose(wanted["logits"], drafted(folder, "specforge")["logits"], atol=0.1)


def test_one_state_is_projected_when_it_is_the_targets_only(folder: Path) -> None:
    found = drafted(folder, "one-state")
    wanted = reference(setting(fc__weight=ONE), states=1, fused=False)
    torch.testing.assert_close(found["decoded"], wanted["logits"], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(found["decoded"], found["logits"], atol=0.1)


@pytest.mark.parametrize("name", [name for name in MLA if name != "mla"])
def test_mla_drafts_fill_the_same_parameters(folder: Path, name: str) -> None:
    found, wanted = (drafted(folder, one)["parameters"] for one in (name, "mla"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_or_incomplete_draft_is_refused(folder: Path, name: str) -> None:
    kind, text = result(folder, name)["error"]
    assert kind == "DraftContractError"
    for part in REFUSED[name][1]:
        assert part in text


@pytest.mark.parametrize("name", [*SAME, *OTHERS, *MLA])
def test_draft_check_says_that_it_fits(folder: Path, name: str) -> None:
    report = inspect(str(TARGET), str(folder / name))
    assert report.refused == []
    assert bool(report.warnings) == (name == "no-states")  # its hidden_norm, applied with weight 1
    assert all(report.facts.values())


@pytest.mark.parametrize("name", REFUSED)
def test_draft_check_refuses_what_is_not_loaded(folder: Path, name: str) -> None:
    report = inspect(str(TARGET), str(folder / name))
    assert not report.fits
    for part in REFUSED[name][1]:
        assert part in "\n".join(report.refused)


def test_what_was_read_in_another_way_is_told(folder: Path) -> None:
    told = result(folder, "ids")["outcome"]
    assert (told["result"], told["read_as"]) == ("applied", ["d2t of token ids"])
    assert (told["embedding"], told["head"]) == ("target", "own")
    own = result(folder, "own-embedding")["outcome"]
    assert (own["result"], own["read_as"], own["embedding"]) == ("applied", ["its own embedding"], "own")
    one = result(folder, "one-state")["outcome"]
    assert (one["result"], one["read_as"]) == (
        "applied", ["captured states as wide as the draft's own, told apart by the forward"],
    )  # fmt: skip
    assert result(folder, "own-embedding-target-head")["outcome"]["embedding"] == "own"
    assert result(folder, "angelslim")["outcome"]["embedding"] == "target"
    assert result(folder, "target-head")["outcome"]["head"] == "target"
    assert result(folder, "tied")["outcome"]["head"] == "tied"


def test_updates_of_a_running_server_are_upstreams(folder: Path) -> None:
    """One piece of the target's weights, as upstream hands it to both models, and one tensor of the draft."""
    assert result(folder, "specforge")["updated"] is True


def test_it_is_served_when_asked_for(folder: Path) -> None:
    found = result(folder, "z-warn")
    assert found["error"] is None
    assert found["outcome"]["result"] == "failed"
