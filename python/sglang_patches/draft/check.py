"""Does this draft fit this target? Asked of two folders, offline: configurations, headers, and the two vocabulary maps.

As a server with patches ``llama-eagle3-draft-loading``, ``kimi-k25-eagle3-delegation`` and
``deepseek-v2-embedding-capture`` would read them, which are on by default.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_patches import named_model
from sglang_patches.draft import contract, conventions, dtypes, keys, roles, shapes, vocabulary
from sglang_patches.draft.checkpoint import Checkpoint, UnreadableCheckpoint, read_headers
from sglang_patches.draft.shapes import value
from sglang_patches.errors import PatchError

# Of either model; without them nothing can be compared.
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers")


@dataclass
class Report:
    """What `inspect` found.

    Attributes:
        told: what of the draft is read in another way than upstream alone would.
        facts: of the draft, for people.
        refused, warnings: as `contract.check` gives them; a draft fits if nothing is refused.
        remedy: what to do where the target is a draft itself.
    """

    target: str
    draft: str
    told: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    remedy: str = ""

    @property
    def fits(self) -> bool:
        return not self.refused


def inspect(target: str, draft: str, context_length: int | None = None, dtype: str = "auto") -> Report:
    """Compare two models, each a folder or the name of one in the hub's cache on this machine.

    Args:
        context_length: positions that the target will be served with; None: as many as its configuration allows.
        dtype: the server's ``--dtype``.

    Raises:
        PatchError: a model is not here, or its ``config.json`` cannot be read.
    """
    folders = [named_model.folder(what, name) for what, name in (("target", target), ("draft", draft))]
    of_target, raw = (config_of(folder) for folder in folders)
    report = Report(target, draft, refused=[f"target's {text}" for text in keys.malformed(of_target)])
    target_dtype = ""
    if not report.refused:
        report.refused = roles.misplaced(of_target, raw)
        report.remedy = roles.remedy(of_target, raw, target, draft)
    if not report.refused:
        outer = of_target
        of_target = of_target.get("text_config") or of_target
        report.refused = [f"target's {text}" for text in keys.absent(of_target, _NEEDED)]
        stored = of_target if value(of_target, "dtype") or value(of_target, "torch_dtype") else outer
        target_dtype = dtypes.served(stored, dtype)
    if report.refused:
        return report
    if conventions.architecture(raw) is None:
        known = ", ".join(conventions.ARCHITECTURES)
        report.refused.append(
            f"config.json architectures is {raw.get('architectures')}, no EAGLE-3 draft known here; known are {known}, "
            "and speculators' format"
        )
        return report
    try:
        checkpoint = read_headers(folders[1])
    except UnreadableCheckpoint as error:
        report.refused.append(str(error))
        return report
    if checkpoint is None:
        report.refused.append(f"{folders[1]} has no safetensors file, whose header would tell names and shapes")
        return report
    reading = conventions.read_config(raw, checkpoint.tensors)
    whole = reading.config | (reading.config.get("text_config") or {}) if not reading.refused else reading.config
    report.told, report.refused = reading.told, reading.refused or list(keys.absent(whole, _NEEDED))
    if not report.refused:
        served = dtypes.served(whole, dtype), target_dtype
        pair = _pair(target, draft, reading.config, of_target, checkpoint, context_length, served)
        try:
            found = contract.check(pair)
        except UnreadableCheckpoint as error:  # headers that are right before contents that are not
            report.refused.append(str(error))
            return report
        report.refused = [finding.text for finding in found if finding.refuse]
        report.warnings = [finding.text for finding in found if not finding.refuse]
        report.facts = facts(pair)
    return report


def _pair(
    target: str, draft: str, config: dict[str, Any], of_target: Any, checkpoint: Checkpoint, length: int | None,
    served: tuple[str, str],
) -> contract.Pair:  # fmt: skip
    ids, key = shapes.layer_ids(config)
    if ids and not key.startswith("eagle_config"):
        # Which patch deepseek-v2-embedding-capture does, too.
        config = {**config, "eagle_config": {**(value(config, "eagle_config") or {}), conventions.IDS: ids}}
    return contract.Pair(
        draft_path=draft,
        target_path=target,
        draft=config,
        target=of_target,
        checkpoint=checkpoint,
        context_length=length or positions(of_target),
        draft_positions=positions(config),
        longer_allowed=False,
        served_dtype=served[0],
        target_dtype=served[1],
        ids_settled=True,
        conventions_read=True,
    )


def positions(config: dict[str, Any]) -> int:
    """Positions that a configuration allows, as upstream counts them (``get_context_length``)."""
    rope = value(config, "rope_scaling") or value(config, "rope_parameters") or {}
    stretched = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
    factor = 1 if stretched else rope.get("factor") or 1
    return next((int(factor * config[key]) for key in keys.LENGTHS if config.get(key) is not None), 2048)


def facts(pair: contract.Pair) -> dict[str, str]:
    """What the draft is, by the name of each fact."""
    assert pair.checkpoint is not None
    config, tensors = pair.draft, pair.checkpoint.tensors
    names = conventions.view(tensors)
    renamed = sum(canonical != name for canonical, name in names.items())
    ids, key = shapes.layer_ids(config)
    if not shapes.takes_states(config):
        states = "none: the target's last hidden state"
    else:
        count, source = shapes.states(config)
        states = f"{count} of width {shapes.Sizes.of(config).target_hidden}, " + (
            f"layers {ids} by {key}" if ids else f"by {source}; no key names the layers"
        )
    dtypes = Counter(info.dtype for name, info in tensors.items() if name.endswith(".weight"))
    return {
        "architecture": pair.architecture,
        "layers": str(value(config, "num_hidden_layers")),
        "captured states": states,
        "norms before fc": _norms(config),
        "head": _head(pair, names),
        "embedding": _embedding(pair, names),
        "vocabulary": _vocabulary(pair),
        "tensors": f"{len(tensors)} ({', '.join(f'{n} {kind}' for kind, n in dtypes.items())}), {renamed} renamed",
    }


def _norms(config: dict[str, Any]) -> str:
    before = (value(config, "eagle_config") or {}).get("norm_before_fc", value(config, "norm_before_fc", False))
    each = value(config, "fc_norm") or value(config, "use_aux_norm", False)
    told = [
        word
        for word, said in (("one over all states (norm_before_fc)", before), ("one a state (fc_norm)", each))
        if said
    ]
    return " and ".join(told) or "none"


def _head(pair: contract.Pair, names: dict[str, str]) -> str:
    if value(pair.draft, "tie_word_embeddings", False):
        return "the embedding (tied)"
    if value(pair.draft, "draft_vocab_size") is None:
        return "the target's"
    assert pair.checkpoint is not None
    name = names.get("lm_head.weight")
    return f"its own, {list(pair.checkpoint.tensors[name].shape)}" if name else "none"


def _embedding(pair: contract.Pair, names: dict[str, str]) -> str:
    if "embed_tokens.weight" not in names:
        return "the target's" if pair.shares_embedding else "none"
    return "its own" + (", the target's where that is equal" if pair.shares_embedding else "")


def _vocabulary(pair: contract.Pair) -> str:
    assert pair.checkpoint is not None
    target, size = int(value(pair.target, "vocab_size")), pair.draft_vocab
    told = f"{size} of the target's {target} tokens"
    name = pair.tensor("d2t")
    if name is None:
        return told + (", by t2d alone" if size < target else ", no maps")
    try:
        stored = pair.checkpoint.read(name).astype("int64").reshape(-1)
        mask = contract.mask_of(pair)
        told += f", d2t in {vocabulary.form(stored, mask, target)}"
    except Exception:  # a tensor of another kind, which the contract refuses
        return f"{told}, d2t unreadable"
    return told + (" and t2d" if mask is not None else ", no t2d")


def config_of(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder. Raises PatchError where there is none, or no JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
        found = f"a JSON {type(config).__name__}"
    except OSError as error:
        found = str(error.strerror)
    except ValueError as error:
        found = str(error)
    raise PatchError(
        f"{file}: {found}\n  expected   a model's configuration, a JSON object\n  remedy     download it again"
    )
