"""Which layers a draft asks for, and what its numbers mean. Standard library only.

Two ways of counting are in use for ``eagle_aux_hidden_state_layer_ids``, and no trainer writes down which it used:

- *layer output*: id ``i`` is what layer ``i`` (from 0) puts out. SpecForge's HF backend, AngelSlim and ModelOpt hook
  layers like that and default to ``[1, n // 2 - 1, n - 4]``. Here -1 is the embedding's output.
- *layer input*: id ``i`` is what layer ``i`` takes in, so 0 is the embedding's output. vLLM and speculators count so
  (default ``[2, n // 2, n - 3]``), and so do upstream's capture hooks.

Both defaults are the same states, and a list of another trainer's choice, such as [2, 30, 58], does not tell. Upstream
0.5.23 reads layer outputs if the first id is 1, else layer inputs (``models/deepseek_v2.py``; pull request 25454).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Convention = Literal["layer-output", "layer-input"]
CONVENTIONS = get_args(Convention)

ENV_IDS = "SGLANG_PATCHES_AUX_LAYER_IDS"
ENV_CONVENTION = "SGLANG_PATCHES_AUX_LAYER_CONVENTION"
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION_KEY = "eagle_aux_hidden_state_layer_convention"
OVERRIDE_ARGS = "--json-model-override-args"
EMBEDDING_OUTPUT = -1

_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version")


class LayerIdError(ValueError):
    """Ids of layers to capture that cannot be read or cannot be captured."""


@dataclass(frozen=True)
class Request:
    """The ids somebody asked for and who; ``ids`` None: nobody named any, ``convention`` None: nobody told it.

    Attributes:
        speculators: the draft's files look like speculators' (vLLM), whose ids are layer inputs.
        by_operator: ``ids`` are the operator's, not the draft's own.
        upstream_ids: what upstream alone hands to the target, the nested key; None where that key is absent.
        remark: what people should know of the choice; empty where there is nothing to say.
    """

    ids: tuple[int, ...] | None
    ids_from: str
    convention: Convention | None = None
    convention_from: str = ""
    speculators: bool = False
    by_operator: bool = False
    upstream_ids: tuple[int, ...] | None = None
    remark: str = ""


class LayerIds(list[int]):
    """The ids as upstream's code expects them, a list, with the `Request` they come from."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.ids or ())
        self.request = request


@dataclass(frozen=True)
class Resolved:
    """The layers to capture.

    Attributes:
        asked: the ids as given; None where nobody gave any.
        layers: in the draft's order, the layer whose *input* each captured state is; 0 is the embedding's output.
        convention: how ``asked`` was read.
        decided_by: who said so, or the guess.
        guessed: nobody said so.
        remark: that of the `Request`.
    """

    asked: tuple[int, ...] | None
    layers: tuple[int, ...]
    convention: Convention
    decided_by: str
    guessed: bool
    remark: str = ""

    def names(self) -> list[str]:
        """Each captured state by name, in the draft's order."""
        return [name(layer) for layer in self.layers]

    def other_reading(self) -> list[str] | None:
        """What the same ids would name in the other convention; None where nobody gave any."""
        if self.asked is None:
            return None
        return [name(layer) for layer in inputs(self.asked, other(self.convention))]


def name(layer: int) -> str:
    """What the input of ``layer`` is called."""
    if layer < 0:
        return "nothing"
    return "embedding output" if layer == 0 else f"output of layer {layer - 1}"


def other(convention: Convention) -> Convention:
    """The one of the two that is not ``convention``."""
    return "layer-input" if convention == "layer-output" else "layer-output"


def inputs(ids: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """``ids`` counted as upstream's capture hooks do: by the layer whose input it is."""
    return tuple(i + 1 for i in ids) if convention == "layer-output" else tuple(ids)


def _ids(value: Any, source: str) -> tuple[int, ...]:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text if text.startswith("[") else f"[{text}]")
        except json.JSONDecodeError:
            value = text
    if (
        not isinstance(value, list | tuple)
        or not value
        or any(not isinstance(i, int) or isinstance(i, bool) for i in value)
    ):
        raise LayerIdError(
            f"{source} is {value!r}, expected a list of one or more layer numbers, such as -1,30,57 or [2, 30, 58]"
        )
    return tuple(value)


def _convention(value: Any, source: str) -> Convention | None:
    if value in CONVENTIONS:
        return value
    if value in (None, "auto", ""):
        return None
    raise LayerIdError(
        f"{source} is {value!r}, expected auto, layer-output (-1 is the embedding) or layer-input (0 is the embedding)"
    )


def _own(config: Any, key: str) -> dict[str, Any]:
    """What the draft's configuration says for ``key``, by where it says it."""
    eagle = getattr(config, "eagle_config", None)
    said = {
        f"the draft's eagle_config.{key}": eagle.get(key) if isinstance(eagle, dict) else None,
        f"the draft's {key}": getattr(config, key, None),
    }
    return {source: value for source, value in said.items() if value is not None}


def _operator(key: str, env: str, override: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the operator says for ``key``, the strongest first."""
    nested = override.get("eagle_config")
    said = {
        f"environment variable {env}": environ.get(env) or None,
        f"{OVERRIDE_ARGS} {key}": override.get(key),
        f"{OVERRIDE_ARGS} eagle_config.{key}": nested.get(key) if isinstance(nested, dict) else None,
    }
    return {source: value for source, value in said.items() if value is not None}


def own_lists(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The lists of ids in the draft's configuration, with where each stands; `LayerIdError` if one is no list."""
    return [(source, _ids(value, source)) for source, value in _own(config, IDS_KEY).items()]


def read_request(config: Any, override: Mapping[str, Any], environ: Mapping[str, str]) -> Request:
    """What is asked for with the draft whose ``config.json`` is ``config`` (attributes; ``override`` already merged).

    The environment counts before ``--json-model-override-args``, and that before the draft's own files, where the
    nested key is SGLang's and SpecForge's and the top-level key is vLLM's and speculators'. A draft that is published
    for both has both; where every number at top level is one higher, the two are the same layers, counted both ways.

    Raises:
        LayerIdError: something that is said cannot be read, or the draft's two keys name different numbers of layers.
    """
    ids_from, ids, remark, both_ways = "", None, "", False
    operator = _operator(IDS_KEY, ENV_IDS, override, environ)
    if operator:
        ids_from, value = next(iter(operator.items()))
        ids = _ids(value, ids_from)
    elif own := own_lists(config):
        ids_from, ids = own[0]
        second_from, second = own[-1]
        if len(second) != len(ids):
            raise LayerIdError(
                f"{ids_from} is {list(ids)} but {second_from} is {list(second)}: which layers this draft was "
                f"trained on is not known. Set {ENV_IDS} to the right list."
            )
        both_ways = second == inputs(ids, "layer-output")
        if second != ids and not both_ways:
            remark = (
                f"{ids_from} is {list(ids)} but {second_from} is {list(second)}, other layers in either way of "
                f"counting; the first is used, as upstream does: set {ENV_IDS} if it is the wrong one"
            )
    convention: Convention | None = None
    convention_from = ""
    # "auto" says nothing, so the next one is asked.
    said = {**_operator(CONVENTION_KEY, ENV_CONVENTION, override, environ), **_own(config, CONVENTION_KEY)}
    for source, value in said.items():
        read = _convention(value, source)
        if convention is None and read is not None:
            convention, convention_from = read, source
    if both_ways and convention is None:
        convention, convention_from = "layer-output", "the draft's two keys, of which the top-level one is one higher"
    nested = _own(config, IDS_KEY).get(f"the draft's eagle_config.{IDS_KEY}")
    return Request(
        ids,
        ids_from,
        convention,
        convention_from,
        speculators=any(getattr(config, key, None) is not None for key in _SPECULATORS_KEYS),
        by_operator=bool(operator),
        upstream_ids=tuple(nested) if isinstance(nested, list | tuple) else None,
        remark=remark,
    )


def resolve(request: Request, num_layers: int) -> Resolved:
    """Turn ids into layers of a target of ``num_layers`` layers.

    Raises:
        LayerIdError: an id names no layer, or the last layer's output, which cannot be captured.
    """
    if request.ids is None:
        default = (2, num_layers // 2, num_layers - 3)
        resolved = Resolved(None, default, "layer-input", "upstream's default", False)
        source = "the draft names no layers"
    else:
        convention, decided_by, guessed = _decide(request)
        layers = inputs(request.ids, convention)
        resolved = Resolved(request.ids, layers, convention, decided_by, guessed, request.remark)
        source = request.ids_from
    bad = [place for place, layer in enumerate(resolved.layers) if not 0 <= layer < num_layers]
    if bad:
        raise LayerIdError(_refusal(resolved, bad[0], source, num_layers))
    return resolved


def _decide(request: Request) -> tuple[Convention, str, bool]:
    """Convention, who decided, and whether that is a guess."""
    assert request.ids is not None
    if request.convention is not None:
        return request.convention, request.convention_from, False
    if EMBEDDING_OUTPUT in request.ids:
        return "layer-output", "-1 among the ids, which only layer outputs have", False
    first = request.ids[0]
    if request.speculators and first != 1:
        return "layer-input", "speculators' format (vLLM's numbers)", False
    # A draft in speculators' format whose first id is 1 was probably converted from one counted in layer outputs
    # (the converter keeps the numbers), so its format says nothing.
    if first == 1:
        return "layer-output", "a guess by upstream's rule: the first id is 1", True
    return "layer-input", f"a guess by upstream's rule: the first id, {first}, is not 1", True


def _refusal(resolved: Resolved, place: int, source: str, num_layers: int) -> str:
    layer = resolved.layers[place]
    shift = 1 if resolved.convention == "layer-output" else 0
    asked = layer - shift
    if layer == num_layers:
        why = (
            f"is the output of the last layer ({num_layers - 1}), which cannot be captured: a state is read where the "
            "next layer takes it in"
        )
    else:
        why = f"is no layer of the target, which has {num_layers}"
    ids = resolved.layers if resolved.asked is None else resolved.asked
    told = (
        f"layer id {asked} of {list(ids)} ({source}; read as {resolved.convention}: {resolved.decided_by}) {why}. "
        f"In {resolved.convention} numbers the ids go from {-shift} (the embedding) to {num_layers - 1 - shift}."
    )
    turned = other(resolved.convention)
    if resolved.asked is not None and all(0 <= i < num_layers for i in inputs(resolved.asked, turned)):
        told += f" Read as {turned} all of them are in range: {ENV_CONVENTION}={turned}, if the draft was trained so."
    else:
        told += f" Set {ENV_IDS} and {ENV_CONVENTION} to what the draft was trained on, or use the draft's own target."
    return told
