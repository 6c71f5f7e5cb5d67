"""deepseek-v2-embedding-capture: who says which layers, in which convention, and what cannot be right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from layer_id_keys import CONVENTION, HOW, IDS, KEY, SPECULATORS

from sglang_patches.runtime.deepseek_v2_embedding_capture.layer_ids import LayerIdError, Request, read_request, resolve


def draft(nested: Any = None, **top: Any) -> SimpleNamespace:
    return SimpleNamespace(**({} if nested is None else {"eagle_config": nested}), **top)


def read(config: Any, environ: dict[str, str] | None = None, **override: Any) -> Any:
    return resolve(read_request(config, override, environ or {}), 12)


@pytest.mark.parametrize(
    ("config", "environ", "override", "layers", "convention", "guessed"),
    [
        # Nobody says the convention: upstream's rule, as a guess.
        (draft({KEY: [1, 5, 8]}), {}, {}, (2, 6, 9), "layer-output", True),
        (draft({KEY: [2, 6, 9]}), {}, {}, (2, 6, 9), "layer-input", True),
        (draft({KEY: [0, 5, 8]}), {}, {}, (0, 5, 8), "layer-input", True),
        (draft(**{KEY: [2, 6, 9]}), {}, {}, (2, 6, 9), "layer-input", True),
        (draft({KEY: [2, 6, 9]}, **{KEY: [2, 6, 9]}), {}, {}, (2, 6, 9), "layer-input", True),
        # No ids: upstream's default layers.
        (draft(), {}, {}, (2, 6, 9), "layer-input", False),
        # The draft says it.
        (draft({KEY: [2, 5, 8], HOW: "layer-output"}), {}, {}, (3, 6, 9), "layer-output", False),
        (draft({KEY: [1, 5, 8], HOW: "layer-input"}), {}, {}, (1, 5, 8), "layer-input", False),
        (draft({KEY: [1, 5, 8]}, **{HOW: "layer-input"}), {}, {}, (1, 5, 8), "layer-input", False),
        (draft({KEY: [-1, 5, 8]}), {}, {}, (0, 6, 9), "layer-output", False),
        (draft(**{KEY: [2, 6, 9]}, **SPECULATORS), {}, {}, (2, 6, 9), "layer-input", False),
        # A converted draft keeps its numbers, so the format says nothing here.
        (draft(**{KEY: [1, 5, 8]}, **SPECULATORS), {}, {}, (2, 6, 9), "layer-output", True),
        # The operator says it, the environment before the override, both before the draft.
        (draft({KEY: [1, 5, 8]}), {CONVENTION: "layer-input"}, {}, (1, 5, 8), "layer-input", False),
        (draft({KEY: [2, 6, 9]}), {IDS: "-1,5,8"}, {}, (0, 6, 9), "layer-output", False),
        (draft({KEY: [2, 6, 9]}), {IDS: "[0, 6, 9]", CONVENTION: "layer-input"}, {}, (0, 6, 9), "layer-input", False),
        (draft({KEY: [2, 6, 9]}), {}, {KEY: [-1, 1, 2]}, (0, 2, 3), "layer-output", False),
        (draft({KEY: [2, 6, 9]}), {}, {"eagle_config": {KEY: [-1, 1, 2]}}, (0, 2, 3), "layer-output", False),
        (draft({KEY: [2, 6, 9]}), {IDS: "3,4,5"}, {KEY: [-1, 1, 2]}, (3, 4, 5), "layer-input", True),
        (draft({KEY: [2, 6, 9]}), {CONVENTION: "auto"}, {HOW: "layer-output"}, (3, 7, 10), "layer-output", False),
        (
            draft({KEY: [2, 6, 9], HOW: "layer-output"}),
            {CONVENTION: "auto"},
            {},
            (3, 7, 10),
            "layer-output",
            False,
        ),
        (
            draft({KEY: [2, 6, 9], HOW: "layer-output"}),
            {CONVENTION: "layer-input"},
            {},
            (2, 6, 9),
            "layer-input",
            False,
        ),
        # Order and repeats stay.
        (draft({KEY: [8, -1, 8, 0]}), {}, {}, (9, 0, 9, 1), "layer-output", False),
        # Two keys that differ: the operator decides.
        (draft({KEY: [1, 5, 8]}, **{KEY: [2, 6, 9]}), {IDS: "2,6,9"}, {}, (2, 6, 9), "layer-input", True),
        # Published for both engines: the top-level key is one higher, which proves how the nested one counts.
        (draft({KEY: [1, 5, 8]}, **{KEY: [2, 6, 9]}), {}, {}, (2, 6, 9), "layer-output", False),
        (draft({KEY: [2, 5, 8]}, **{KEY: [3, 6, 9]}), {}, {}, (3, 6, 9), "layer-output", False),
        (draft({KEY: [2, 5, 8], HOW: "layer-input"}, **{KEY: [3, 6, 9]}), {}, {}, (2, 5, 8), "layer-input", False),
        # Two keys that differ otherwise: the nested one, as upstream.
        (draft({KEY: [1, 5, 8]}, **{KEY: [2, 6, 8]}), {}, {}, (2, 6, 9), "layer-output", True),
        (draft({KEY: [2, 6, 9]}, **{KEY: [1, 5, 8]}), {}, {}, (2, 6, 9), "layer-input", True),
    ],
)
def test_ids_mean_what_is_said(
    config: Any,
    environ: dict[str, str],
    override: dict[str, Any],
    layers: tuple[int, ...],
    convention: str,
    guessed: bool,
) -> None:
    resolved = read(config, environ, **override)
    assert (resolved.layers, resolved.convention, resolved.guessed) == (layers, convention, guessed)


@pytest.mark.parametrize("layers", [4, 12, 61])
def test_defaults_of_both_conventions_are_the_same_states(layers: int) -> None:
    """What trainers on either side use when nobody chooses, and upstream's own default."""
    outputs = Request((1, layers // 2 - 1, layers - 4), "", "layer-output")
    if layers > 4:
        assert resolve(outputs, layers).layers == resolve(Request(None, ""), layers).layers


@pytest.mark.parametrize(
    ("config", "environ", "told"),
    [
        (draft({KEY: [1, 5, 12]}), {}, r"layer id 12 of \[1, 5, 12\] .*no layer of the target, which has 12"),
        (draft({KEY: [1, 5, 11]}), {}, r"layer id 11 .*output of the last layer \(11\), which cannot be captured"),
        (
            draft({KEY: [1, 5, 11]}),
            {},
            r"from -1 \(the embedding\) to 10\. Read as layer-input .*CONVENTION=layer-input",
        ),
        (draft({KEY: [2, 6, 12]}), {}, r"layer id 12 .*In layer-input numbers the ids go from 0 .* to 11"),
        (draft({KEY: [-1, 5]}), {CONVENTION: "layer-input"}, r"layer id -1 .*no layer .*Read as layer-output"),
        (draft({KEY: [-2, 5]}), {}, r"layer id -2 .*no layer of the target"),
        (
            draft({KEY: [1, 5]}, **{KEY: [2, 6, 9]}),
            {},
            rf"eagle_config.{KEY} is \[1, 5\] but .* is \[2, 6, 9\].*Set {IDS}",
        ),
        (draft({KEY: []}), {}, r"is \[\], expected a list of one or more"),
        (draft({KEY: [True, 2]}), {}, r"is \[True, 2\], expected a list"),
        (draft({KEY: 5}), {}, r"is 5, expected a list"),
        (draft(), {IDS: "one,2"}, rf"environment variable {IDS} is 'one,2', expected a list"),
        (draft(), {IDS: ","}, r"expected a list"),
        (draft(), {CONVENTION: "outputs"}, rf"{CONVENTION} is 'outputs', expected auto, layer-output"),
        (draft({KEY: [1], HOW: "input"}), {}, rf"eagle_config.{HOW} is 'input', expected auto"),
    ],
)
def test_what_cannot_be_right_is_refused(config: Any, environ: dict[str, str], told: str) -> None:
    with pytest.raises(LayerIdError, match=told):
        read(config, environ)


def test_a_target_too_small_for_upstreams_default_is_refused() -> None:
    with pytest.raises(
        LayerIdError, match=r"layer id 2 of \[2, 1, -1\] \(the draft names no layers; .*: upstream's default\)"
    ):
        resolve(Request(None, ""), 2)
