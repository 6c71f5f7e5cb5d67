"""A draft's tensors, by the names and in the forms that upstream's two classes load, and an account of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_patches.draft import conventions, shapes, vocabulary
from sglang_patches.draft.shapes import value

Named = tuple[str, torch.Tensor]

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = 128  # rows and columns of a ``weight_scale_inv`` block, DeepSeek's
_FUSED_A = "self_attn.fused_qkv_a_proj_with_mqa.weight"


class Loading:
    """Of one draft. Use: ``model.load_weights(loading.given(weights))``, then `reasons` and `told`.

    Attributes:
        model: a ``LlamaForCausalLMEagle3`` or ``Eagle3DeepseekV2ForCausalLM`` of upstream.
        stored: canonical name (`conventions.canonical`) -> the name in the file, of each tensor given to upstream.
        told: what was read in another way than upstream alone would.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.kind = model, type(model).__name__
        self.quantized = getattr(model, "quant_config", None) is not None
        self.stored: dict[str, str] = {}
        self.told: list[str] = []
        self._table = self._expected()
        self._unfit: list[str] = []
        self._not_missing: set[str] = set()
        self._unknown: list[str] = []
        self._maps: dict[str, torch.Tensor] = {}
        self._later: dict[str, Named] = {}
        self._eight_bits: dict[str, Named] = {}
        self._scales: dict[str, Named] = {}
        self._renamed = 0

    def _expected(self) -> shapes.Shapes:
        config = self.model.config
        table = dict(shapes.expected(config, self.kind) or {})
        hidden = shapes.Sizes.of(config).hidden
        if not value(config, "tie_word_embeddings", False):
            table["lm_head.weight"] = (self._size(), hidden)
        table["embed_tokens.weight"] = (int(value(config, "vocab_size")), hidden)
        return table

    def _size(self) -> int:
        return int(value(self.model.config, "draft_vocab_size") or value(self.model.config, "vocab_size"))

    def given(self, weights: Iterable[Named]) -> Iterator[Named]:
        """The same tensors as upstream's loader takes them; those that it cannot take stay out."""
        for stored, tensor in weights:
            name = conventions.canonical(stored)
            last = name.rpartition(".")[2]
            if last in ("d2t", "t2d"):
                # Copied by an operation, so that whoever watches reads sees it, and to where upstream adds to it.
                self._maps[last] = tensor.to("cpu", copy=True)
            elif shapes.idle(name):
                continue
            elif conventions.later_norm(name):
                self._later[name] = stored, tensor
            elif tensor.dtype in _EIGHT_BITS and not self._takes_eight_bits(name):
                self._eight_bits[name] = stored, tensor
            elif (weight := conventions.scaled(name)) is not None and not self._takes_eight_bits(weight):
                self._scales[name] = stored, tensor
            else:
                yield from self._checked(name, stored, tensor)
        for name, (stored, tensor) in self._later.items():
            norm = conventions.later_norm(name)
            assert norm is not None
            yield from self._checked(name if norm in self.stored else norm, stored, tensor)
        yield from self._dequantized()
        yield from self._vocabulary()
        if self._renamed:
            self.told.append(f"{self._renamed} tensors by other names")

    def _checked(self, name: str, stored: str, tensor: torch.Tensor) -> Iterator[Named]:
        shape = tuple(tensor.shape)
        wanted = self._table.get(name) or shapes.as_stored(self._table, {name}).get(name)
        if name in self.stored:
            self._unfit.append(f"tensors {self.stored[name]} and {stored} are the same parameter")
        elif wanted is None and not self._belongs_to_quantization(name):
            # A second or later layer's norm of the embedding, which it has no input of, is a parameter all the same.
            if conventions.later_norm(name) is None:
                self._unknown.append(f"{stored} {list(shape)}")
            elif shape == self._table.get("norm.weight"):
                yield name, tensor  # so that whoever watches reads sees it taken
        elif wanted is not None and shape != wanted and (tensor.is_floating_point() or not self.quantized):
            self._unfit.append(f"tensor {stored} has shape {list(shape)}, expected {list(wanted)}")
            self._not_missing.add(name)
        else:
            self.stored[name] = stored
            self._renamed += shapes.canonical(stored, self.kind) != name
            if self.kind == shapes.MLA and name.endswith(_FUSED_A):
                # Upstream's loader takes the whole for one half and waits for the other.
                stem, ranks = name.removesuffix(_FUSED_A), int(value(self.model.config, "q_lora_rank"))
                yield f"{stem}self_attn.q_a_proj.weight", tensor[:ranks]
                yield f"{stem}self_attn.kv_a_proj_with_mqa.weight", tensor[ranks:]
                self.told.append("two projections stored as one")
            else:
                yield name, tensor

    def _belongs_to_quantization(self, name: str) -> bool:
        if not self.quantized:
            return False
        weight = f"{name.rpartition('.')[0]}.weight"
        return "scale" in name or "zero_point" in name or weight in shapes.as_stored(self._table, {weight})

    def _takes_eight_bits(self, name: str) -> bool:
        """Whether upstream's quantization loads this weight and its scale; what it keeps in floats it would fill with
        the bare 8-bit numbers."""
        if not self.quantized:
            return False
        inside = "model." + name if name != "lm_head.weight" else name
        for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            for part in parts:
                inside = inside.replace(f".{part}_proj.", f".{whole}.")
        if self.kind == shapes.MLA:
            inside = inside.replace("model.layers.0.", "model.midlayer.")
            for part in ("q_a_proj.", "kv_a_proj_with_mqa."):
                inside = inside.replace(f".{part}", ".fused_qkv_a_proj_with_mqa.")
        parameter = dict(self.model.named_parameters()).get(inside)
        return parameter is not None and parameter.dtype in (*_EIGHT_BITS, torch.int8)

    def _dequantized(self) -> Iterator[Named]:
        for name, (stored, tensor) in self._eight_bits.items():
            stem = name.removesuffix(".weight")
            found = self._scales.get(f"{stem}.weight_scale") or self._scales.get(f"{stem}.weight_scale_inv")
            full = None if found is None else _times(tensor, found[1])
            if full is None:
                scale = "no weight_scale beside it" if found is None else f"{found[0]} {list(found[1].shape)} beside it"
                self._unfit.append(
                    f"tensor {stored} {list(tensor.shape)} is {str(tensor.dtype).removeprefix('torch.')} with {scale}, "
                    f"expected one scale, one a row, or one a block of {_BLOCK} x {_BLOCK}"
                )
                self._not_missing.add(name)
                continue
            yield from self._checked(name, stored, full)
        if self._eight_bits:
            self.told.append(f"{len(self._eight_bits)} 8-bit tensors widened")
        for name, (stored, tensor) in self._scales.items():
            tensor.sum()  # taken: the scale of a weight that was widened, or of inputs that are not narrowed
            if conventions.scaled(name) not in self._eight_bits:
                self._unknown.append(f"{stored} {list(tensor.shape)}")

    def _vocabulary(self) -> Iterator[Named]:
        target, size = int(value(self.model.config, "vocab_size")), self._size()
        marks, stored = self._maps.get("t2d"), self._maps.get("d2t")
        filled = marks is not None and marks.dtype == torch.bool and bool(marks.any())
        mask = marks.flatten().numpy() if marks is not None and filled else None
        if stored is None:
            ids = vocabulary.by_mask(mask, size, target)
            if ids is not None and size < target:
                self.told.append("the vocabulary by t2d alone")
                yield "d2t", torch.from_numpy(ids) - torch.arange(size)
            elif size < target:
                self._unfit.append(
                    f"no tensor d2t [{size}] says which of the target's {target} tokens the draft's {size} are"
                )
            return
        if tuple(stored.shape) != (size,) or stored.is_floating_point():
            self._unfit.append(
                f"tensor d2t has shape {list(stored.shape)} and dtype {stored.dtype}, expected [{size}] "
                "(draft_vocab_size) and integers"
            )
            return
        numbers = stored.long().numpy()
        read_as = vocabulary.form(numbers, mask, target)
        found = vocabulary.findings(numbers, mask, target, "tensor d2t", read_as)
        wrong = [text for refuse, text in found if refuse]
        self._unfit.extend(wrong)
        if wrong:
            return
        if read_as == "token ids":
            self.told.append("d2t of token ids")
        yield "d2t", torch.from_numpy(vocabulary.ids(numbers, read_as)) - torch.arange(size)

    def reasons(self) -> list[str]:
        """Why the draft is not whole, each with names and shapes; empty if every parameter was filled."""
        config, size = self.model.config, self._size()
        there = {name.rpartition(".")[0] for name in self.stored} if self.quantized else set()
        # Quantized weights have names of their own (qweight, weight_packed), projections as one among them.
        table = shapes.as_stored(self._table, self.stored.keys() | {f"{stem}.weight" for stem in there})
        headless = "lm_head.weight" in table and "lm_head.weight" not in self.stored.keys() | self._not_missing
        headless = headless and "lm_head" not in there
        if headless and size == int(value(config, "vocab_size")):
            self.model.load_lm_head_from_target = True  # as upstream does where draft_vocab_size is null
            del table["lm_head.weight"]
        sizes = shapes.Sizes.of(config)
        if sizes.hidden == sizes.target_hidden:
            table.pop("embed_tokens.weight")
        missing = [
            f"{name} {list(shape)}"
            for name, shape in sorted(table.items())
            if name not in self.stored
            and name not in self._not_missing | shapes.optional(config)
            and name.rpartition(".")[0] not in there
        ]
        told = list(self._unfit)
        whole = int(value(config, "vocab_size"))
        if value(config, "tie_word_embeddings", False) and size != whole:
            told.append(
                f"config.json tie_word_embeddings makes embed_tokens.weight [{whole}, {sizes.hidden}] the head, but "
                f"draft_vocab_size is {size}"
            )
        if missing:
            told.append(f"no tensor for {len(missing)} parameters of {self.kind}: {', '.join(missing)}")
        if self._unknown:
            told.append(f"{self.kind} has no parameter for {len(self._unknown)} tensors: {', '.join(self._unknown)}")
        return told


def _times(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """``weight * scale`` in bfloat16; None where the scale's shape says nothing of this weight."""
    rows, columns = weight.shape[0], weight.shape[-1]
    blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
    if scale.numel() == 1:
        factor = scale.reshape(())
    elif scale.numel() == rows and scale.shape[0] == rows:
        factor = scale.reshape(rows, *[1] * (weight.dim() - 1))
    elif tuple(scale.shape) == blocks:
        factor = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:rows, :columns]
    else:
        return None
    return (weight.to(torch.float32) * factor.to(torch.float32)).to(torch.bfloat16)
