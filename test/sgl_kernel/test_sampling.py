"""Sampling along the draft tree: exact cases, and the distribution of what is emitted; top-k and top-p."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from draft_trees import Batch, batches, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import sgl_kernel_cpu as ops

VOCAB, LENGTH, SAMPLES = 4, 3, 10_000


def distinct_tokens(rng: random.Random, batch: Batch, vocab: int) -> list[list[int]]:
    """A token for each node; children of one node differ, as those of a draft's top-k do."""
    tokens = [[rng.randrange(vocab)] * batch.drafts for _ in batch.trees]
    for b, tree in enumerate(batch.trees):
        for node in tree:
            for child, token in zip(node.children, rng.sample(range(vocab), len(node.children)), strict=True):
                tokens[b][child.order] = token
    return tokens


def sample(
    batch: Batch, tokens: torch.Tensor, coins: torch.Tensor, final: torch.Tensor, probs: torch.Tensor, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bs, n = tokens.shape
    predicts = torch.full((bs * n,), -5, dtype=torch.int32)
    accept_index = torch.full((bs, batch.steps + 1), -9, dtype=torch.int32)
    accept_num = torch.full((bs,), -3, dtype=torch.int32)
    # All the trees of a batch may be one tree.
    _, child, sibling = (links.expand(bs, n) for links in batch.links())
    index = torch.arange(bs * n).reshape(bs, n)
    kwargs.setdefault("draft_probs", torch.zeros_like(probs))
    ops.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_num,
        candidates=tokens,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        uniform_samples=coins,
        uniform_samples_for_final_sampling=final,
        target_probs=probs,
        deterministic=True,
        **kwargs,  # type: ignore[arg-type]
    )
    return predicts, accept_index, accept_num


@given(
    batches(max_drafts=16),
    st.integers(0, 2**32),
    st.sampled_from([(1.0, 1.0), (0.4, 1.0), (1.0, 0.5), (1.0, 0.0)]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_each_coin_decides_as_specified(
    batch: Batch, seed: int, thresholds: tuple[float, float], with_draft: bool
) -> None:
    """Against a walk over the linked nodes; some target probabilities are zero, as after top-k."""
    single, acc = thresholds
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    bs, n, vocab = len(batch.trees), batch.drafts, 20
    tokens = distinct_tokens(rng, batch, vocab)
    raw = torch.rand(bs, n, vocab, generator=gen) ** 3
    probs = raw * (torch.rand(bs, n, vocab, generator=gen) < 0.7)
    probs[..., 0] += 0.01
    probs /= probs.sum(-1, keepdim=True)
    coins, final = torch.rand(bs, n, generator=gen), torch.rand(bs, generator=gen)

    predicts, accept_index, accepted = [-5] * (bs * n), [[-9] * (batch.steps + 1) for _ in range(bs)], []
    for b, tree in enumerate(batch.trees):
        node, count, weights = tree[0], 0, []
        accept_index[b][0] = b * n
        while True:
            row = probs[b, node.order].tolist()
            weights = list(row)
            if count == batch.steps:
                break
            mass, taken = 0.0, None
            for child in node.children:
                token = tokens[b][child.order]
                mass += row[token]
                if row[token] > 0 and (float(coins[b, node.order]) < mass / max(acc, 1e-9) or row[token] >= single):
                    taken = child
                    break
                weights[token] = 0.0
            if taken is None:
                break
            count += 1
            predicts[b * n + node.order] = tokens[b][taken.order]
            accept_index[b][count] = b * n + taken.order
            node = taken
        accepted.append(count)
        running, coin = list(accumulate(weights)), float(final[b])
        predicts[b * n + node.order] = next(i for i, total in enumerate(running) if total > coin * running[-1])

    draft = torch.zeros_like(probs) if with_draft else None
    got = sample(
        batch, torch.tensor(tokens), coins, final, probs, draft_probs=draft, threshold_single=single, threshold_acc=acc
    )
    assert got[0].tolist() == predicts
    assert got[1].tolist() == accept_index
    assert got[2].tolist() == accepted


def target_table(seed: int) -> np.ndarray:
    """P(next token | tokens so far) for prefixes of up to LENGTH - 1 tokens: [level][prefix, token], one row zeroed."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(VOCAB, 0.6), size=(LENGTH, VOCAB**LENGTH)).astype(np.float32)
    table[0, 0, 3] = 0.0  # a token that the target never emits first
    return table / table.sum(-1, keepdims=True)


def emitted_sequences(
    seed: int, shape: tuple[int, int, int], samples: int, keep_rejected: bool = False, **thresholds: float
) -> tuple[np.ndarray, np.ndarray]:
    """Counts and probabilities of all sequences of LENGTH tokens: what one verify emits, completed by the target."""
    topk, steps, drafts = shape
    table, rng, gen = target_table(seed), random.Random(seed), torch.Generator().manual_seed(seed)
    one = make_batch(seed, 1, topk, steps, drafts)
    tree, tokens = one.trees[0], distinct_tokens(rng, one, VOCAB)[0]

    def row(prefix: tuple[int, ...]) -> np.ndarray:
        return table[len(prefix), sum(t * VOCAB**i for i, t in enumerate(prefix))]

    prefixes = [tuple(tokens[a.order] for a in reversed(node.path()[:-1])) for node in tree]
    probs = torch.from_numpy(np.stack([row(p) for p in prefixes])).expand(samples, drafts, VOCAB)
    coins, final = torch.rand(samples, drafts, generator=gen), torch.rand(samples, generator=gen)
    candidates = torch.tensor(tokens).expand(samples, drafts)
    predicts, index, num = sample(one, candidates, coins, final, probs, draft_probs=None, **thresholds)
    counts: Counter[tuple[int, ...]] = Counter()
    emitted = predicts.tolist()
    for path, accepted in zip(index.tolist(), num.tolist(), strict=True):
        sequence = tuple(emitted[i] for i in path[: accepted + 1])
        if keep_rejected:  # a wrong sampler: the last token from the whole distribution
            sequence = (*sequence[:-1], *rng.choices(range(VOCAB), row(sequence[:-1]).tolist()))
        while len(sequence) < LENGTH:
            sequence = (*sequence, *rng.choices(range(VOCAB), row(sequence).tolist()))
        counts[sequence] += 1
    everything = list(product(range(VOCAB), repeat=LENGTH))
    expected = np.array([np.prod([float(row(s[:i])[s[i]]) for i in range(LENGTH)]) for s in everything])
    return np.array([counts[s] for s in everything]), expected


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test that ``counts`` come from ``probabilities``; rare sequences are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = (expected < 10) & (expected > 0)
    observed = [*counts[expected >= 10], counts[rare].sum()]
    wanted = [*expected[expected >= 10], expected[rare].sum()]
    if wanted[-1] < 10:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    return float(chi2.sf(statistic, len(observed) - 1))


SHAPES = [(1, 2, 3), (2, 2, 6), (4, 2, 8), (3, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_emits_the_targets_distribution(shape: tuple[int, int, int], seed: int) -> None:
    assert p_value(*emitted_sequences(seed, shape, samples=SAMPLES)) > 1e-4


@pytest.mark.parametrize(
    "wrong",
    [{"threshold_acc": 0.8}, {"threshold_single": 0.3}, {"keep_rejected": True}],
    ids=str,
)
def test_the_test_sees_a_wrong_distribution(wrong: dict[str, float]) -> None:
    assert p_value(*emitted_sequences(1, (2, 2, 6), SAMPLES, **wrong)) < 1e-9  # type: ignore[arg-type]


def test_extreme_coins_never_emit_a_token_without_mass() -> None:
    batch = make_batch(0, 1, 2, 1, 3)
    tokens = torch.tensor([[9, 1, 2]])
    probs = torch.tensor([0.0, 0.5, 0.4999999, 0.0]).expand(1, 3, 4)
    high = 1.0 - 2**-24
    for coin in (0.0, high):
        for final in (0.0, high, 1.0):
            predicts, _, _ = sample(batch, tokens, torch.full((1, 3), coin), torch.tensor([final]), probs)
            assert set(predicts.tolist()) <= {1, 2, -5}


def test_a_row_without_mass_yields_the_last_token_as_on_cuda() -> None:
    batch = make_batch(0, 1, 1, 1, 2)
    probs = torch.full((1, 2, 7), float("nan"))
    predicts, index, num = sample(batch, torch.tensor([[0, 1]]), torch.zeros(1, 2), torch.zeros(1), probs)
    assert (predicts.tolist(), index.tolist(), num.tolist()) == ([6, -5], [[0, -9]], [0])


def rows_of(seed: int, rows: int, vocab: int, levels: int) -> torch.Tensor:
    """Distributions over ``vocab`` tokens whose weights take few values, so that ties are common."""
    gen = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, levels + 1, (rows, vocab), generator=gen).float()
    return weights / weights.sum(-1, keepdim=True)


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 30), st.sampled_from([3, 100_000]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_top_k(seed: int, rows: int, vocab: int, levels: int, one_k: bool) -> None:
    probs, rng = rows_of(seed, rows, vocab, levels), random.Random(seed)
    ks = [rng.choice([1, 2, vocab, 1 << 30, rng.randint(1, vocab)]) for _ in range(rows)]
    ks = [ks[0]] * rows if one_k else ks
    got = ops.top_k_renorm_prob(probs, ks[0] if one_k else torch.tensor(ks, dtype=torch.int32))
    for row, k, out in zip(probs.tolist(), ks, got.tolist(), strict=True):
        last = sorted(row, reverse=True)[min(k, vocab) - 1]
        total = sum(p for p in row if p >= last)
        assert out == pytest.approx([p / total if p >= last else 0.0 for p in row], rel=1e-5)


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 30), st.sampled_from([3, 100_000]))
@settings(max_examples=150, deadline=None)
def test_top_p(seed: int, rows: int, vocab: int, levels: int) -> None:
    probs, rng = rows_of(seed, rows, vocab, levels), random.Random(seed)
    ps = torch.tensor([rng.choice([1.0, 1e-6, rng.uniform(0.05, 0.99)]) for _ in range(rows)])
    got = ops.top_p_renorm_prob(probs, ps)
    for row, p, out in zip(probs.tolist(), ps.tolist(), got.tolist(), strict=True):
        kept = {i for i, value in enumerate(out) if value > 0}
        weakest, mass = min(row[i] for i in kept), sum(row[i] for i in kept)
        assert all(i in kept for i, value in enumerate(row) if value >= weakest)  # the largest, ties included
        assert mass >= p - 1e-5
        assert p == 1.0 or sum(value for value in row if value > weakest) < p + 1e-5  # none too many
        assert out == pytest.approx([value / mass if i in kept else 0.0 for i, value in enumerate(row)], rel=1e-4)


def test_top_p_of_one_keeps_everything() -> None:
    probs = torch.softmax(torch.linspace(-30, 0, 1000), 0)[None]
    assert (ops.top_p_renorm_prob(probs, 1.0) > 0).all()
