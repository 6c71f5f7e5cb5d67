"""cpu-spec-sampling: penalties along the paths of a tree, and the distribution of what a verify cycle commits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_requests import OFF, filtered_reference, rejects, request

from sglang_patches.runtime import cpu_spec_sampling as css


def random_tree(rng: random.Random, nodes: int, vocab: int) -> tuple[list[int], list[int], list[int]]:
    """Parents (root first, -1), tokens distinct among siblings, in upstream's order: parents before children."""
    parents, tokens = [-1], [rng.randrange(vocab)]
    for _ in range(1, nodes):
        while True:
            parent, token = rng.randrange(len(parents)), rng.randrange(vocab)
            siblings = [tokens[i] for i, p in enumerate(parents) if p == parent]
            if token not in siblings:
                break
        parents.append(parent)
        tokens.append(token)
    return parents, tokens, depths(parents)


def depths(parents: list[int]) -> list[int]:
    out = [0]
    for parent in parents[1:]:
        out.append(out[parent] + 1)
    return out


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node."""
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        sibling[node], first[parents[node]] = first[parents[node]], node
    return first, sibling


def path_tokens(parents: list[int], tokens: list[int], node: int) -> list[int]:
    out: list[int] = []
    while node > 0:
        out.insert(0, tokens[node])
        node = parents[node]
    return out


def trees(rows: list[tuple[list[int], list[int], list[int]]], lengths: list[int]) -> SimpleNamespace:
    linked = [links(parents) for parents, _, _ in rows]
    return SimpleNamespace(
        draft_token=torch.tensor([t for _, tokens, _ in rows for t in tokens]),
        retrieve_next_token=torch.tensor([first for first, _ in linked]),
        retrieve_next_sibling=torch.tensor([sibling for _, sibling in linked]),
        positions=torch.tensor([n + d for n, (_, _, ds) in zip(lengths, rows, strict=True) for d in ds]),
        draft_token_num=len(rows[0][0]),
    )


def sampling_info(bs: int, **columns: Any) -> SimpleNamespace:
    info: dict[str, Any] = {
        "temperatures": torch.ones(bs, 1),
        "top_ks": torch.full((bs,), OFF, dtype=torch.int32),
        "top_ps": torch.ones(bs),
        "min_ps": torch.zeros(bs),
        "sampling_seed": None,
        **columns,
    }

    class Info(SimpleNamespace):
        def __len__(self) -> int:
            return bs

    return Info(
        **info,
        is_all_greedy=bool((info["top_ks"] <= 1).all()),
        need_top_k_sampling=bool((info["top_ks"] < OFF).any()),
        need_top_p_sampling=bool((info["top_ps"] < 1).any()),
        need_min_p_sampling=bool((info["min_ps"] > 0).any()),
    )


# --- trees ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12))
def test_tree_paths(seed: int, nodes: int) -> None:
    parents, _, _ = random_tree(random.Random(seed), nodes, 40)
    paths = css.tree_paths(*links(parents))
    for node in range(nodes):
        ancestors, at = set(), node
        while at > 0:
            ancestors.add(at)
            at = parents[at]
        assert set(paths[node].nonzero().view(-1).tolist()) == ancestors


def penalized(logits: list[float], output: list[int], p: SimpleNamespace) -> list[float]:
    """One row of logits after the penalties of one output, straight from their definitions."""
    out = list(logits)
    for token in range(len(out)):
        n = output.count(token)
        out[token] -= p.frequency_penalty * n + (p.presence_penalty if n else 0.0)
        if len(output) < p.min_new_tokens and token in ({0} | (p.stop_token_ids or set())):
            out[token] = float("-inf")
        if n and p.repetition_penalty != 1.0:
            out[token] = out[token] * p.repetition_penalty if out[token] < 0 else out[token] / p.repetition_penalty
    return out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 4))
def test_every_node_is_penalized_for_its_own_path(seed: int, nodes: int, bs: int) -> None:
    rng, vocab = random.Random(seed), 13
    reqs = []
    for _ in range(bs):
        chosen = {
            "frequency_penalty": rng.choice([0.0, 0.7, -1.1]),
            "presence_penalty": rng.choice([0.0, 0.4]),
            "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
            "min_new_tokens": rng.choice([0, 3, 9]),
            "stop_token_ids": rng.choice([None, {4, 6}]),
        }
        reqs.append(request([rng.randrange(vocab) for _ in range(rng.randrange(1, 6))], **chosen))
    rows = [random_tree(rng, nodes, vocab) for _ in range(bs)]
    logits = torch.randn(bs * nodes, vocab, generator=torch.Generator().manual_seed(seed))
    expected = [
        penalized(
            logits[i * nodes + node].tolist(),
            [*req.output_ids, *path_tokens(rows[i][0], rows[i][1], node)],
            req.sampling_params,
        )
        for i, req in enumerate(reqs)
        for node in range(nodes)
    ]
    info = SimpleNamespace(acc_additive_penalties=torch.ones(1), acc_scaling_penalties=torch.ones(1))
    batch: Any = SimpleNamespace(reqs=reqs, sampling_info=info)
    css.penalize_tree(logits, trees(rows, [5] * bs), batch)
    torch.testing.assert_close(logits, torch.tensor(expected))
    assert info.acc_additive_penalties is None
    assert info.acc_scaling_penalties is None


def walk(parents: list[int], tokens: list[int], predicted: list[int]) -> list[int]:
    """Follow the drafts that equal the target's token; what the last node predicts is the bonus."""
    node, out = 0, []
    while True:
        out.append(predicted[node])
        children = [i for i, p in enumerate(parents) if p == node and tokens[i] == predicted[node]]
        if not children:
            return out
        node = children[0]


class Target:
    """A target model over five tokens whose next-token logits depend on the two tokens before."""

    def __init__(self, seed: int = 3) -> None:
        self.table = torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(seed)) * 1.5

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        return self.table[context[-2], context[-1]]

    def probs(self, context: Sequence[int], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
        kept = filtered_reference(
            torch.softmax(self.logits(context) / temperature, -1).double().tolist(), top_k, top_p, min_p
        )
        return [kept.get(i, 0.0) / sum(kept.values()) for i in range(5)]


SETTINGS = [(1.0, OFF, 1.0, 0.0), (0.7, OFF, 1.0, 0.0), (1.3, 3, 1.0, 0.0), (1.0, OFF, 0.7, 0.0), (1.2, 4, 0.9, 0.2)]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_what_verify_commits_follows_the_target(
    temperature: float, top_k: int, top_p: float, min_p: float, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two tokens after a context, from cycles over random trees, against the target's joint distribution."""
    target, n, context = Target(), 6000, [1, 2]
    rng = random.Random(11)
    rows = [random_tree(rng, 7, 5) for _ in range(n)]
    rows = [(parents, [context[-1], *tokens[1:]], ds) for parents, tokens, ds in rows]
    logits = torch.stack(
        [
            target.logits([*context, *path_tokens(parents, tokens, node)])
            for parents, tokens, _ in rows
            for node in range(7)
        ]
    )
    info: Any = sampling_info(
        n,
        temperatures=torch.full((n, 1), temperature),
        top_ks=torch.full((n,), top_k),
        top_ps=torch.full((n,), top_p),
        min_ps=torch.full((n,), min_p),
        sampling_seed=torch.arange(n) if seeded else None,
    )
    torch.manual_seed(0)
    monkeypatch.setattr(css, "_check_thresholds", lambda: None)
    tokens_at = css.sample_tree(logits, logits.argmax(-1), info, trees(rows, [2] * n)).view(n, 7).tolist()
    committed = [walk(parents, tokens, at) for (parents, tokens, _), at in zip(rows, tokens_at, strict=True)]
    assert sum(len(c) > 1 for c in committed) > n / 5, "too few accepted drafts to say anything"

    def marginals(t: float) -> tuple[dict[Any, float], dict[Any, float]]:
        first = target.probs(context, t, top_k, top_p, min_p)
        second = {
            (a, b): pa * pb
            for a, pa in enumerate(first)
            for b, pb in enumerate(target.probs([context[-1], a], t, top_k, top_p, min_p))
        }
        return dict(enumerate(first)), second

    firsts = Counter(c[0] for c in committed)
    # A cycle that commits one token says nothing of the second; given the first, whether it does depends on the
    # drafts alone, so the pairs are compared within each first token.
    right, wrong = marginals(temperature), marginals(temperature * 1.4)
    assert not rejects(firsts, right[0])
    assert rejects(firsts, wrong[0])
    for a in range(5):
        seconds = Counter(c[1] for c in committed if len(c) > 1 and c[0] == a)
        given_a = {b: right[1][a, b] / right[0][a] for b in range(5)} if right[0][a] else {}
        assert not seconds or not rejects(seconds, given_a)


def test_greedy_rows_stay_greedy_and_seeds_match_decoding_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(css, "_check_thresholds", lambda: None)
    target, rng, bs, nodes, prompt = Target(), random.Random(5), 40, 8, [0, 3]
    rows = [random_tree(rng, nodes, 5) for _ in range(bs)]
    rows = [(parents, [prompt[-1], *tokens[1:]], ds) for parents, tokens, ds in rows]
    logits = torch.stack(
        [target.logits([*prompt, *path_tokens(ps, ts, node)]) for ps, ts, _ in rows for node in range(nodes)]
    )
    top_ks = torch.tensor([1 if i % 3 == 0 else 4 if i % 3 == 1 else OFF for i in range(bs)])
    info: Any = sampling_info(bs, top_ks=top_ks, sampling_seed=torch.arange(bs) * 101)
    predicted = css.sample_tree(logits, logits.argmax(-1), info, trees(rows, [1] * bs)).view(bs, nodes).tolist()
    longest = 0
    for i, (parents, tokens, _) in enumerate(rows):
        committed = walk(parents, tokens, predicted[i])
        longest = max(longest, len(committed))
        context = list(prompt)
        for token in committed:
            row = target.logits(context)
            if i % 3 == 0:
                alone = int(row.argmax())
            else:
                one = css.sample_filtered(
                    torch.softmax(row, -1)[None],
                    top_ks[i : i + 1],
                    torch.ones(1),
                    torch.zeros(1),
                    torch.tensor([i * 101]),
                    torch.tensor([len(context) - 1]),
                )
                assert isinstance(one, torch.Tensor)
                alone = int(one)
            assert token == alone
            context.append(token)
    assert longest >= 3


# --- upstream's penalizers -----------------------------------------------------------------------------------------


def orchestrator(reqs: list[SimpleNamespace], vocab: int) -> Any:
    from sglang.srt.sampling import penaltylib

    batch: Any = type("Batch", (), {"device": "cpu", "reqs": reqs})()
    kinds = css.ordered_penalizers(
        {
            penaltylib.BatchedRepetitionPenalizer,
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
        }
    )
    assert [kind.is_multiplicative for kind in kinds] == [False, False, False, True]
    made = penaltylib.BatchedPenalizerOrchestrator(vocab, batch, kinds)  # type: ignore[arg-type]
    made.keep_batch = batch  # type: ignore[attr-defined]  # the orchestrator holds it weakly
    return made


@pytest.mark.parametrize(
    "only", [None, "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"]
)
def test_a_retracted_request_keeps_its_penalties(only: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    every = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.4, "min_new_tokens": 4}
    chosen = every if only is None else {only: every[only]}
    reqs = [request([3, 3, 5], **chosen), request([], **chosen), request([1, 2, 3, 4, 5, 6])]
    made = orchestrator(reqs, 8)
    css.replay_output(made)
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = [
        penalized(row.tolist(), list(req.output_ids), req.sampling_params)
        for row, req in zip(logits, reqs, strict=True)
    ]
    made.apply(logits)
    torch.testing.assert_close(logits, torch.tensor(expected))
