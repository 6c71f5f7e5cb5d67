"""Does this draft fit this target? Asked of configurations and checkpoint headers, before weights are loaded.

A draft that does not fit mostly loads all the same, because upstream 0.5.23 skips what it does not know and leaves the
rest as it was allocated (``models/llama_eagle3.py``, ``load_weights``): such a server drafts noise and accepts nothing.

A rule refuses only what cannot work. What may work, or has been seen in a published draft, is told as a warning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_patches.draft import conventions, dtypes, roles, shapes, vocabulary
from sglang_patches.draft.checkpoint import Checkpoint, UnreadableCheckpoint
from sglang_patches.draft.shapes import LLAMA, MLA, value

# Embedding tables are padded to a multiple of this (upstream's layers/vocab_parallel_embedding.py).
_VOCAB_PADDING = 64
_INTEGERS = ("I64", "I32", "I16", "U32", "U16")


class Finding(NamedTuple):
    """One reason. `refuse`: it cannot work; else it may, and is only told."""

    refuse: bool
    text: str


@dataclass(frozen=True)
class Pair:
    """What is compared.

    Attributes:
        draft_path, target_path: as given to the server.
        draft: the draft's configuration.
        target: the text configuration of the target.
        checkpoint: headers of the draft's weights; None where they are not on this machine yet, or no safetensors.
        context_length: positions that the target is served with.
        draft_positions: positions that the draft's configuration allows, as upstream counts them.
        longer_allowed: whether upstream may override `draft_positions` (``SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN``).
        served_dtype, target_dtype: what the draft and the target are served in, such as ``bfloat16``; empty: not known.
        ids_settled: patch deepseek-v2-embedding-capture is on, which gives ids their meaning and checks them.
        conventions_read: `draft` is as `conventions.read_config` gives it, and patch llama-eagle3-draft-loading, which
            takes names and vocabularies in every convention known there and leaves out nothing, loads the weights.
    """

    draft_path: str
    target_path: str
    draft: Any
    target: Any
    checkpoint: Checkpoint | None
    context_length: int
    draft_positions: int
    longer_allowed: bool
    served_dtype: str
    target_dtype: str = ""
    ids_settled: bool = False
    conventions_read: bool = False

    @property
    def architecture(self) -> str:
        return (value(self.draft, "architectures") or [""])[0]

    @property
    def quantized(self) -> bool:
        """Whether names, shapes and dtypes of the weights are a quantization method's."""
        keys = ("quantization_config", "compression_config")
        beside = self.checkpoint is not None and (self.checkpoint.folder / "hf_quant_config.json").is_file()
        return beside or any(value(self.draft, key) is not None for key in keys)

    @property
    def shares_embedding(self) -> bool:
        """Upstream puts the target's embedding into the draft where their widths are equal (``set_embed``)."""
        sizes = shapes.Sizes.of(self.draft)
        return sizes.hidden == sizes.target_hidden

    @property
    def draft_vocab(self) -> int:
        """Rows of the draft's head."""
        return int(value(self.draft, "draft_vocab_size") or value(self.draft, "vocab_size"))

    def tensor(self, ending: str) -> str | None:
        """The name of the checkpoint's tensor that is called `ending`, whatever precedes it."""
        names = self.checkpoint.tensors if self.checkpoint else {}
        return next((name for name in names if name == ending or name.endswith(f".{ending}")), None)

    def where(self, name: str) -> str:
        """A tensor of the checkpoint, for messages."""
        assert self.checkpoint is not None
        return f"tensor {name} of {self.checkpoint.tensors[name].file.name}"


def check(pair: Pair) -> list[Finding]:
    """Every reason why the draft does not fit, in the order of the rules; empty for a draft that fits.

    Raises `UnreadableCheckpoint`.
    """
    # Nothing else of them is worth comparing then.
    found = [Finding(True, text) for text in roles.misplaced(pair.target, pair.draft, not pair.conventions_read)]
    for rule in () if found else _RULES:
        try:
            found.extend(rule(pair))
        except UnreadableCheckpoint:
            raise
        except Exception as error:  # a class of draft that spells its configuration in a way not known here
            what = rule.__name__.strip("_")
            found.append(
                Finding(
                    False,
                    f"config.json (architectures {pair.architecture or 'none'}) does not say what rule '{what}' reads, "
                    f"which was not checked ({type(error).__name__}: {error})",
                )
            )
    return found


def _hidden(pair: Pair) -> Iterator[Finding]:
    key = "target_hidden_size" if value(pair.draft, "target_hidden_size") else "hidden_size"
    said, real = int(value(pair.draft, key)), int(value(pair.target, "hidden_size"))
    if said != real:
        yield Finding(True, f"config.json {key} is {said}, but the target's hidden_size is {real}")


def _captured(pair: Pair) -> Iterator[Finding]:
    if not shapes.takes_states(pair.draft):
        return
    number, source = shapes.states(pair.draft)
    ids, key = shapes.layer_ids(pair.draft)
    layers = int(value(pair.target, "num_hidden_layers"))
    if ids is not None:
        outside = [i for i in ids if not -1 <= i <= layers]
        if outside:
            yield Finding(
                True,
                f"config.json {key} is {ids}, but {outside} are no layers of a target with num_hidden_layers {layers}",
            )
        if not pair.ids_settled:
            inputs = [i + 1 for i in ids] if ids[:1] == [1] else ids
            missed = [i for i, layer in zip(ids, inputs, strict=True) if not 0 <= layer < layers and i not in outside]
            if missed:
                yield Finding(
                    False,
                    f"config.json {key} is {ids}, of which upstream 0.5.23 alone captures {missed} at no layer of a "
                    f"target with num_hidden_layers {layers}, and stops at the first request; patch "
                    "deepseek-v2-embedding-capture reads -1 as the embedding's output",
                )
        if len(set(ids)) != len(ids) and not pair.ids_settled:
            yield Finding(
                False,
                f"config.json {key} is {ids}: upstream 0.5.23 captures a layer that is named twice once, and stops at "
                "the first request; patch deepseek-v2-embedding-capture repeats it",
            )
        if number != len(ids):
            yield Finding(
                True, f"config.json {source} is {number}, but {key} is {ids}, which is {len(ids)} states to capture"
            )
        if not key.startswith("eagle_config"):
            yield Finding(
                False,
                f"config.json names the layers {ids} at top level; upstream 0.5.23 captures by "
                "eagle_config.eagle_aux_hidden_state_layer_ids only, else layers of its own choice",
            )
    name = pair.tensor("fc.weight")
    if name and pair.checkpoint:
        sizes = shapes.Sizes.of(pair.draft)
        shape, wanted = pair.checkpoint.tensors[name].shape, (sizes.hidden, number * sizes.target_hidden)
        if shape != wanted and not pair.quantized:
            yield Finding(
                True,
                f"{pair.where(name)} has shape {list(shape)}, expected {list(wanted)}: hidden_size {sizes.hidden} x "
                f"({number} captured states by {source}, times target hidden size {sizes.target_hidden})",
            )


def _vocabulary(pair: Pair) -> Iterator[Finding]:
    draft, target = int(value(pair.draft, "vocab_size")), int(value(pair.target, "vocab_size"))
    if draft != target:
        padded = [-(-size // _VOCAB_PADDING) for size in (draft, target)]
        # With rows of its own or on several ranks another table size reads other rows.
        refuse = padded[0] != padded[1] or not pair.shares_embedding
        yield Finding(
            refuse,
            f"config.json vocab_size is {draft}, but the target's is {target}: made for another tokenizer",
        )
    size = value(pair.draft, "draft_vocab_size")
    tied = value(pair.draft, "tie_word_embeddings", False)
    unsaid = value(pair.draft, "text_config") is None and not hasattr(pair.draft, "draft_vocab_size")
    if pair.architecture == LLAMA and not tied and unsaid and not pair.conventions_read:
        yield Finding(
            True,
            f"config.json has no draft_vocab_size, which upstream's {LLAMA} reads: add the rows of the draft's "
            "lm_head, or null for a draft that uses the target's",
        )
    if tied and size is not None and int(size) != draft:
        yield Finding(
            True,
            f"config.json tie_word_embeddings makes the embedding of {draft} rows (vocab_size) the head, but "
            f"draft_vocab_size is {size}",
        )
    if size is not None and int(size) > target:
        yield Finding(True, f"config.json draft_vocab_size is {size}, but the target's vocab_size is {target}")
    head = pair.tensor("lm_head.weight")
    if head and pair.checkpoint and not pair.quantized:
        rows = (pair.checkpoint.tensors[head].shape or (0,))[0]
        if rows != pair.draft_vocab and not tied:
            said = (
                f"draft_vocab_size is {size}" if size is not None else f"vocab_size is {draft} and no draft_vocab_size"
            )
            yield Finding(True, f"{pair.where(head)} has {rows} rows, but config.json {said}")


def _maps(pair: Pair) -> Iterator[Finding]:
    if pair.checkpoint is None:
        return
    target, size = int(value(pair.target, "vocab_size")), pair.draft_vocab
    name = pair.tensor("d2t")
    if name is None:
        if size < target and not (
            pair.conventions_read and vocabulary.by_mask(mask_of(pair), size, target) is not None
        ):
            yield Finding(
                True,
                f"config.json draft_vocab_size is {size} of the target's {target}, but no tensor d2t in "
                f"{pair.checkpoint.folder} says which tokens those are",
            )
        return
    info = pair.checkpoint.tensors[name]
    if info.dtype not in _INTEGERS or info.shape != (size,):
        yield Finding(
            True,
            f"{pair.where(name)} has dtype {info.dtype} and shape {list(info.shape)}, expected integers (I64) of "
            f"shape [{size}] (draft_vocab_size)",
        )
        return
    stored, mask = pair.checkpoint.read(name).astype("int64").reshape(-1), mask_of(pair)
    read_as: vocabulary.Form = vocabulary.form(stored, mask, target) if pair.conventions_read else "offsets"
    for refuse, text in vocabulary.findings(stored, mask, target, pair.where(name), read_as):
        yield Finding(refuse, text)


def mask_of(pair: Pair) -> Any:
    """``t2d`` as bool ``[target vocabulary]``; None where absent, of another kind, or all false (never filled in)."""
    name = pair.tensor("t2d")
    if name is None or pair.checkpoint is None or pair.checkpoint.tensors[name].dtype != "BOOL":
        return None
    mask = pair.checkpoint.read(name).reshape(-1).astype(bool)
    return mask if bool(mask.any()) else None


def _tensors(pair: Pair) -> Iterator[Finding]:
    """Layer count, missing tensors and shapes."""
    layers = int(value(pair.draft, "num_hidden_layers"))
    if pair.architecture == MLA and layers != 1:
        yield Finding(True, f"config.json num_hidden_layers is {layers}, but upstream's {MLA} has 1")
        return
    table = shapes.expected(pair.draft, pair.architecture)
    if pair.checkpoint is None or table is None or pair.quantized:
        return
    if pair.conventions_read:
        there = conventions.view(pair.checkpoint.tensors)
        table = shapes.as_stored(table, there)
        for twins in conventions.twice(pair.checkpoint.tensors):
            yield Finding(True, f"{twins} of {pair.checkpoint.folder} are the same parameter")
    else:
        there = {shapes.canonical(name, pair.architecture): name for name in pair.checkpoint.tensors}
    found = shapes.layers_in(list(there))
    if found != set(range(layers)) and (found or not pair.conventions_read):
        yield Finding(
            True,
            f"config.json num_hidden_layers is {layers}, but {pair.checkpoint.folder} has tensors of layers "
            f"{sorted(found) or 'none'}",
        )
        return
    if not value(pair.draft, "tie_word_embeddings", False) and value(pair.draft, "draft_vocab_size") is not None:
        table["lm_head.weight"] = (pair.draft_vocab, shapes.Sizes.of(pair.draft).hidden)
    if not pair.shares_embedding:
        table["embed_tokens.weight"] = (int(value(pair.draft, "vocab_size")), shapes.Sizes.of(pair.draft).hidden)
    fused = any("qkv_proj" in name or "gate_up_proj" in name for name in there)
    lacking = {name for name in table if name not in there}
    missing = sorted(lacking - shapes.optional(pair.draft))
    if "layers.0.hidden_norm.weight" in lacking and not missing:
        yield Finding(
            False,
            f"{pair.checkpoint.folder} has no layers.0.hidden_norm.weight; upstream's {pair.architecture} normalises "
            "the target's hidden state all the same, with weight 1",
        )
    if missing and (pair.conventions_read or not fused):
        moe = any(".experts." in name for name in there)
        kind = " (the draft is a mixture of experts, which upstream's draft classes are not)" if moe else ""
        yield Finding(
            True,
            f"{pair.checkpoint.folder} has no tensor for {len(missing)} parameters{kind}: "
            + ", ".join(f"{name} {list(table[name])}" if pair.conventions_read else name for name in missing),
        )
    unknown = sorted(name for name in there if name not in table and not _known(pair, name, table))
    if unknown and (pair.conventions_read or not missing):
        told = [
            f"{there[name]} {list(pair.checkpoint.tensors[there[name]].shape)}"
            if pair.conventions_read
            else there[name]
            for name in unknown
        ]
        yield Finding(
            pair.conventions_read,
            f"upstream's {pair.architecture} knows no {', '.join(told)}; a tensor that it does not take ends the "
            "start when the draft is loaded",
        )
    for canonical, wanted in table.items():
        if canonical in ("fc.weight", "lm_head.weight") or canonical not in there:
            continue  # these two have rules of their own
        info = pair.checkpoint.tensors[there[canonical]]
        if info.dtype in (*dtypes.FLOATS, *conventions.EIGHT_BITS) and info.shape != wanted:
            yield Finding(
                True,
                f"{pair.where(there[canonical])} has shape {list(info.shape)}, config.json makes it {list(wanted)}",
            )


def _known(pair: Pair, name: str, table: shapes.Shapes) -> bool:
    """Whether somebody takes the tensor of this canonical name, which no parameter of `table` is, or none needs to."""
    if not pair.conventions_read:
        return shapes.taken_or_idle(name)
    return shapes.taken_or_idle(name, biases=False) or conventions.scaled(name) in table


def _positions(pair: Pair) -> Iterator[Finding]:
    if pair.draft_positions < pair.context_length:
        yield Finding(
            not pair.longer_allowed,
            f"config.json max_position_embeddings allows {pair.draft_positions} positions, but the target is served "
            f"with {pair.context_length}: give --context-length {pair.draft_positions}, or set "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 to stretch the draft's rotary table at your own risk",
        )
    rope = value(pair.draft, "rope_parameters") or value(pair.draft, "rope_scaling") or {}
    of_target = value(pair.target, "rope_parameters") or value(pair.target, "rope_scaling") or {}
    if "mrope_section" in rope and "mrope_section" not in of_target:
        yield Finding(
            True,
            f"config.json rope_scaling has mrope_section {rope['mrope_section']}, but the target has plain positions",
        )


def _dtypes(pair: Pair) -> Iterator[Finding]:
    for refuse, text in dtypes.findings(pair):
        yield Finding(refuse, text)


def _tokenizers(pair: Pair) -> Iterator[Finding]:
    for name in ("tokenizer.json", "tiktoken.model"):
        files = [Path(path) / name for path in (pair.draft_path, pair.target_path)]
        if all(file.is_file() for file in files):
            hashes = [hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files]
            if hashes[0] != hashes[1]:
                yield Finding(False, f"{files[0]} (sha256 {hashes[0]}) is not the target's {name} ({hashes[1]})")


def _unread(pair: Pair) -> Iterator[Finding]:
    if pair.conventions_read:
        return
    if pair.architecture == LLAMA and value(pair.draft, "norm_before_residual", False):
        yield Finding(
            False, f"config.json norm_before_residual is true, but upstream's {LLAMA} adds the residual before the norm"
        )


_RULES: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _hidden, _captured, _vocabulary, _maps, _tensors, _positions, _dtypes, _tokenizers, _unread,
)  # fmt: skip
