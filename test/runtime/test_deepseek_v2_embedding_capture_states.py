"""deepseek-v2-embedding-capture: every captured state equals transformers' hidden state of the same weights, float32.

`captured_states.py` runs the real target with upstream's `ModelRunner`; the reference reads layers of an independent
forward by hooks, never of upstream's code.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import lane_table
import pytest
import torch
from benchmark.tiny_kimi.draft import Capture
from benchmark.tiny_kimi.reference import load_text_model

HERE = Path(__file__).parent
LAYERS = 12
# In layer-output numbers; the last layer's output cannot be captured.
EVERY_LEGAL_ID = tuple(range(-1, LAYERS - 1))
OUT_OF_ORDER = (8, -1, 8, 0)
UPSTREAMS_OWN = (1, 5, 8)
KINDS = ["prefill", "chunked prefill", "cached prefix", "decode", "verify a chain", "verify a tree"]
# What `captured_states.py` says of upstream's path for fused all-reduce.
FUSED = ("fused", "fused calls", "alike", "parts")
States: TypeAlias = dict[str, tuple[list[list[int]], torch.Tensor]]


def captured(folder: Path, tp: int, *lists: tuple[int, ...]) -> list[dict[Any, Any]]:
    """By rank and list of ids: what `captured_states.py` found.

    With several ranks layers must have left their sums to the next: only then a partial sum could have been captured.
    """
    texts = [",".join(map(str, ids)) for ids in lists]
    command = [sys.executable, str(HERE / "captured_states.py"), str(tp), str(folder), *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(tp)]
    # 0.5.9 leaves none without fused all-reduce, which takes a GPU.
    assert all((found["deferred"] > 0) == (tp > 1 and lane_table.release() != "0.5.9") for found in ranks)
    told = [{ids: found[text] for ids, text in zip(lists, texts, strict=True)} for found in ranks]
    return [
        states | {name: found[name] for name in FUSED if name in found}
        for states, found in zip(told, ranks, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], States]:
    """One rank."""
    return captured(tmp_path_factory.mktemp("tp1"), 1, EVERY_LEGAL_ID, OUT_OF_ORDER, UPSTREAMS_OWN)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Two tensor-parallel ranks."""
    return captured(tmp_path_factory.mktemp("tp2"), 2, EVERY_LEGAL_ID)


class Reference:
    """transformers' forward: the state of a sequence's last token, for any list of layer outputs."""

    def __init__(self) -> None:
        self.model = load_text_model(HERE.parent / "models/tiny-kimi")
        self.capture = Capture(self.model, EVERY_LEGAL_ID)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, sequence: list[int], ids: tuple[int, ...]) -> torch.Tensor:
        """(K * hidden size,), the list's order and repeats kept."""
        key = tuple(sequence)
        if key not in self.known:
            states, _ = self.capture(torch.tensor([sequence]))
            # One causal forward gives every prefix's state.
            for end in range(1, len(sequence) + 1):
                self.known.setdefault(key[:end], states[0, end - 1])
        hidden = self.known[key].unflatten(0, (len(EVERY_LEGAL_ID), -1))
        return torch.cat([hidden[EVERY_LEGAL_ID.index(i)] for i in ids])


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def check(reference: Reference, states: States, kind: str, ids: tuple[int, ...]) -> None:
    sequences, found = states[kind]
    assert len(sequences) == len(found)
    wanted = torch.stack([reference.of(sequence, ids) for sequence in sequences])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [EVERY_LEGAL_ID, OUT_OF_ORDER, UPSTREAMS_OWN], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_equal_transformers(
    alone: dict[tuple[int, ...], States], reference: Reference, kind: str, ids: tuple[int, ...]
) -> None:
    check(reference, alone[ids], kind, ids)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_captures_a_partial_sum(
    pair: list[dict[tuple[int, ...], States]], reference: Reference, kind: str, rank: int
) -> None:
    """With two ranks each layer's attention and experts are sums over both, and so is the embedding."""
    check(reference, pair[rank][EVERY_LEGAL_ID], kind, EVERY_LEGAL_ID)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_captures_a_partial_sum_where_all_reduce_is_fused(
    pair: list[dict[Any, Any]], reference: Reference, kind: str, rank: int
) -> None:
    """Upstream's own path, whose kernel (here in torch) sums over the ranks after a layer has ended."""
    assert pair[rank]["fused calls"] > 2 * LAYERS
    check(reference, pair[rank]["fused"], kind, EVERY_LEGAL_ID)


def test_ranks_find_out_whether_they_captured_parts_of_sums(pair: list[dict[Any, Any]]) -> None:
    for rank in (0, 1):
        assert pair[rank]["alike"] == 0.0
        assert "captured hidden states are not whole sums" in pair[rank]["parts"]


def test_the_comparison_tells_neighbouring_layers_apart(
    alone: dict[tuple[int, ...], States], reference: Reference
) -> None:
    """What would pass if ids were off by one: nothing."""
    sequences, found = alone[EVERY_LEGAL_ID]["decode"]
    hidden = found.unflatten(1, (len(EVERY_LEGAL_ID), -1))
    wanted = torch.stack([reference.of(sequence, EVERY_LEGAL_ID) for sequence in sequences]).view_as(hidden)
    apart = (hidden[:, 1:] - wanted[:, :-1]).abs().amax(dim=(0, 2))
    assert apart.min() > 1e-2, apart
