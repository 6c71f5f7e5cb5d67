"""``KimiK25ForConditionalGeneration`` answers for its language model.

Upstream 0.5.9 delegates nothing, so that EAGLE-3 ends in an AttributeError at start. Upstream 0.5.23 delegates
embedding, head and layer setters (``models/kimi_k25.py``), but not what context-parallel and graph code read of a
target: ``capture_aux_hidden_states``, ``pp_group`` and ``logits_processor`` (``model_executor/runner/eager_runner.py``,
``layers/cp/bcg/bcg.py``). And on an encoder-only node, which has no language model, every one of them ends in an error
about something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Model = TypeVar("Model", bound=type)

# Read by context-parallel and graph code; the rest of what a target is asked for is in upstream's class already.
_ATTRIBUTES = ("capture_aux_hidden_states", "lm_head", "logits_processor", "pp_group")
# Upstream's own delegations, in the order of models/kimi_k25.py; `forward`, which no encoder node calls, stays bare.
_METHODS = (
    "prepare_context_parallel_metadata_for_dcp",
    "mutate_weight_preload",
    "custom_scale_remap",
    "set_eagle3_layers_to_capture",
    "set_dflash_layers_to_capture",
    "get_input_embeddings",
    "get_embed_and_head",
    "set_embed_and_head",
)
# What an EAGLE worker asks of its target; upstream's class has them since 0.5.10.
_ASKED = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head", "get_input_embeddings")
_MARK = "_sglang_patches_answers_as_target"


def _refusal(model: Any, name: str) -> AttributeError:
    """Why an encoder-only node has no `name`. An AttributeError, so that ``hasattr`` says no."""
    return AttributeError(
        f"{type(model).__name__}.{name}: this node was started with --encoder-only, so it holds the vision tower and "
        "no language model; speculative decoding, embedding, head and captured layers live on the language nodes. "
        "Start this node without --speculative-* arguments, or without --encoder-only."
    )


def _delegated(name: str) -> property:
    def read(self: Any) -> Any:
        if self.language_model is None:
            raise _refusal(self, name)  # lands in __getattr__, which tells it
        return getattr(self.language_model, name)

    def write(self: Any, value: Any) -> None:
        if self.language_model is None:
            raise _refusal(self, name)
        setattr(self.language_model, name, value)

    return property(read, write, doc=f"The language model's ``{name}``.")


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.language_model, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, f"The language model's ``{name}``."
    return method


def _needs_language_model(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.language_model is None:
            raise _refusal(self, method.__name__)
        return method(self, *args, **kwargs)

    return checked


def answers_as_target(wrapper: Model) -> Model:
    """Decorate upstream's wrapper class: everything a target model is asked for is the language model's.

    What the class has already stays its own. Nothing here touches the vision tower, so a language-only node answers the
    same; an encoder-only node (``language_model`` is None) raises AttributeError naming the attribute and the remedy.
    """
    for name in _ATTRIBUTES:
        if not hasattr(wrapper, name):
            setattr(wrapper, name, _delegated(name))
    for name in _ASKED:
        if not hasattr(wrapper, name):
            setattr(wrapper, name, _handed_on(name))
    for name in _METHODS:
        if name in vars(wrapper):
            setattr(wrapper, name, _needs_language_model(vars(wrapper)[name]))
    torch_module: Any = wrapper
    lookup = torch_module.__getattr__

    def explain(self: Any, name: str) -> Any:
        # Where a property raises AttributeError Python asks __getattr__, and torch's answer would hide the reason.
        if name in _ATTRIBUTES and self.__dict__.get("language_model", name) is None:
            raise _refusal(self, name)
        return lookup(self, name)

    torch_module.__getattr__ = explain
    setattr(wrapper, _MARK, True)
    return wrapper


def owner_of_body(model: Any) -> Any:
    """The module whose ``.model`` is the decoder body: the language model of a decorated wrapper, else `model`.

    Context-parallel prefill (``eager_runner._execute_extend_cp``) calls ``model.model`` for hidden states and then
    ``model.logits_processor``; the wrapper's ``.model`` is the whole language model, whose output is logits already.
    """
    return model.language_model if getattr(type(model), _MARK, False) else model
