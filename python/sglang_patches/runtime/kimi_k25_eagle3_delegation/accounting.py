"""Watches a draft being loaded: every parameter must be filled, every tensor of the checkpoint be taken.

Works on what happens, not on names: parameters are filled with a bit pattern before loading, and what still has it
afterwards was filled by nobody; a tensor that no operation read while it was on offer was taken by nobody.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_patches.draft import shapes
from sglang_patches.draft.shapes import value
from sglang_patches.runtime.kimi_k25_eagle3_delegation import startup

# Quiet NaNs with a payload no computation makes.
_PATTERNS = {
    torch.float32: (torch.int32, 0x7FE5A5A5),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7FA5),
}
# Parameters up to this many elements (norms, scales) get their default back where nothing filled them.
_SMALL = 1 << 20
# Rows compared at once, which bounds the memory that comparing takes.
_ROWS = 4096
_draft_path: ContextVar[str | None] = ContextVar("sglang_patches_draft_path", default=None)


class _Reads(TorchDispatchMode):
    """Forgets an offered tensor as soon as an operation of this thread takes it, or a view of it, as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.offered:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.is_meta]
            for name, tensor in list(self.offered.items()):
                if any(_overlaps(tensor, other) for other in read):
                    del self.offered[name]
        return func(*args, **(kwargs or {}))


def _overlaps(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor is other:
        return True
    begin, at = tensor.data_ptr(), other.data_ptr()
    return begin != 0 and begin <= at < begin + tensor.numel() * tensor.element_size()


class Account:
    """Of one draft being loaded. Use: plant, load from ``offer(weights)`` with ``reads`` entered, then ``unfilled``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.reads = _Reads()
        self.tensors = 0
        self._planted = False
        self._defaults: dict[str, torch.Tensor] = {}

    def plant(self) -> None:
        """Fill every floating-point parameter with its pattern."""
        self._planted = True
        made = dict(self.model.named_parameters())
        for name, bits, pattern in self._bits():
            # A projection is allocated and not initialised, and its memory may hold anything.
            if bits.numel() <= _SMALL and bool(torch.isfinite(made[name].data).all()):
                self._defaults[name] = bits.clone()
            bits.fill_(pattern)

    def offer(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, watched until they are read."""
        for name, tensor in weights:
            self.tensors += 1
            if tensor.numel():
                self.reads.offered[name] = tensor
            yield name, tensor

    def untaken(self) -> list[str]:
        """Names of tensors that nobody read, those aside that nobody needs.

        Nor those that the model does take: a rank whose share of one is all padding does not read it.
        """
        kind = type(self.model).__name__
        table = shapes.expected(self.model.config, kind) or {}
        return sorted(
            name for name in self.reads.offered if not shapes.idle(name) and shapes.canonical(name, kind) not in table
        )

    def unfilled(self) -> dict[str, float]:
        """Parameter -> share of it, 0 to 1, that no tensor filled, those aside that upstream replaces after loading.

        Wherever the pattern is left it gives way to what was there before, or, in a large parameter, to zero.
        """
        left: dict[str, float] = {}
        for name, bits, pattern in self._bits() if self._planted else ():
            parts = bits.split(_ROWS) if bits.dim() else (bits,)
            untouched = 0
            for part in parts:
                same = part == pattern
                untouched += int(same.sum())
                part.masked_fill_(same, 0)
            if untouched == bits.numel() and name in self._defaults:
                bits.copy_(self._defaults[name])
            if untouched and not _replaced_later(self.model, name):
                left[name] = untouched / bits.numel()
        return left

    def _bits(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        for name, parameter in self.model.named_parameters():
            if parameter.dtype in _PATTERNS and not parameter.is_meta and parameter.numel():
                integer, pattern = _PATTERNS[parameter.dtype]
                yield name, parameter.data.view(integer), pattern


def _replaced_later(model: Any, name: str) -> bool:
    """Whether upstream puts the target's tensor there once both are loaded (``EagleDraftWorker.init_lm_head``), or the
    parameter is in no computation (the second and later layers have no embedding input to normalise) or may be absent
    (`shapes.optional`)."""
    if name.removeprefix("model.").replace("midlayer.", "layers.0.") in shapes.optional(model.config):
        return True
    if name.endswith("embed_tokens.weight"):
        hidden = value(model.config, "hidden_size")
        return value(model.config, "target_hidden_size", hidden) == hidden
    if name == "lm_head.weight":
        return bool(getattr(model, "load_lm_head_from_target", False))
    return re.search(r"layers\.[1-9]\d*\.input_layernorm\.weight$", name) is not None


def watches_draft(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate upstream's ``load_model_with_memory_saver``: what it loads is a draft to account for, or is not."""

    @functools.wraps(load)
    def told(**kwargs: Any) -> Any:
        with _loads_draft(kwargs["is_draft_worker"], kwargs["model_config"]):
            return load(**kwargs)

    return told


def watches_runner(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same for upstream releases where ``ModelRunner.load_model(self)`` loads by itself."""

    @functools.wraps(load)
    def told(self: Any) -> None:
        with _loads_draft(self.is_draft_worker, self.model_config):
            load(self)

    return told


@contextmanager
def _loads_draft(is_draft_worker: bool, model_config: Any) -> Iterator[None]:
    draft = startup.checked()
    if not is_draft_worker or draft is None:
        yield
        return
    token = _draft_path.set(model_config.model_path)
    try:
        yield
    finally:
        _draft_path.reset(token)
    startup.check_what_was_fetched(draft)


def accounts_for_weights(load: Callable[..., None]) -> Callable[..., None]:
    """Decorate upstream's ``DefaultModelLoader.load_weights_only(model, weights, target_device)``.

    Raises DraftContractError naming parameters that no tensor filled and tensors that nobody took. For a quantized
    draft, whose method computes parameters itself, and for a class not known here, only tensors are watched and what
    is found is only logged.
    """

    @functools.wraps(load)
    def accounted(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], target_device: Any) -> None:
        path = _draft_path.get()
        if path is None:
            return load(model, weights, target_device)
        account = Account(model)
        if _whole(model):
            account.plant()
        with account.reads:
            load(model, account.offer(weights), target_device)
        _judge(account, path)
        return None

    return accounted


def _whole(model: Any) -> bool:
    """Whether every parameter of `model` must come from the checkpoint: a draft class known here, not quantized."""
    return type(model).__name__ in (shapes.LLAMA, shapes.MLA) and getattr(model, "quant_config", None) is None


def _judge(account: Account, path: str) -> None:
    unfilled, untaken = account.unfilled(), account.untaken()
    told = startup.checked()
    assert told is not None
    reasons = []
    if unfilled:
        names = ", ".join(f"{name} ({share:.0%} of it)" for name, share in unfilled.items())
        reasons.append(f"no tensor of the checkpoint filled {len(unfilled)} parameters: {names}")
    if untaken:
        reasons.append(
            f"{type(account.model).__name__} took none of these {len(untaken)} tensors of the checkpoint: "
            + ", ".join(untaken)
        )
    figures = {**told.figures, "tensors": account.tensors, "unfilled": sorted(unfilled), "untaken": untaken}
    if reasons and not _whole(account.model):
        startup.warn(f"draft {path}: {'; '.join(reasons)}")
        figures["warnings"] = [*figures["warnings"], *reasons]
    elif reasons:
        startup.refuse(path, told.pair.target_path, reasons)
        told.fits = False
        figures["warnings"] = [*figures["warnings"], *reasons]
    told.figures = figures
    whole = "the draft fits the target and was loaded whole"
    told.record("the draft was loaded, but not whole: see warnings" if reasons else whole)
