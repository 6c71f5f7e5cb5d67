"""cpu-grammar: masks on CPU logits, rows that a mask leaves nothing of, and the status of a refused request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

from sglang_patches.runtime import cpu_grammar

INF = float("inf")


def packed(allowed: list[set[int]], vocab: int) -> torch.Tensor:
    """xgrammar's bit mask: bit ``token % 32`` of word ``token // 32``."""
    words = [[0] * ((vocab + 31) // 32) for _ in allowed]
    for row, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= 1 << (token % 32)
    return torch.tensor([[w - (1 << 32) if w >= 1 << 31 else w for w in row] for row in words], dtype=torch.int32)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 80), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_only_allowed_tokens_keep_their_logits(seed: int, vocab: int, rows: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(seed)
    allowed = [
        set(torch.randperm(vocab, generator=gen)[: 1 + int(torch.randint(vocab, (1,), generator=gen))].tolist())
        for _ in range(rows)
    ]
    logits = torch.randn(rows, vocab, generator=gen).to(dtype)
    masked = logits.clone()
    cpu_grammar.apply_mask(masked, packed(allowed, vocab))
    for row in range(rows):
        for token in range(vocab):
            assert masked[row, token] == (logits[row, token] if token in allowed[row] else -INF)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_a_mask_that_allows_everything_writes_nothing_beyond_its_row(vocab: int) -> None:
    buffer = torch.zeros(3, vocab)
    cpu_grammar.apply_mask(buffer[1:2], packed([set(range(vocab))], vocab))
    assert (buffer == 0).all()


def test_a_row_without_any_token_can_still_be_sampled_from() -> None:
    logits = torch.randn(3, 40)
    logits[2, :7] = -INF  # other parameters forbid what this row's grammar allows
    before = logits.clone()
    cpu_grammar.apply_mask(logits, packed([{1, 2}, set(), {3, 6}], 40))
    assert torch.equal(logits[0, 1:3], before[0, 1:3])
    assert (logits[0, 3:] == -INF).all()
    tokens = torch.multinomial(torch.softmax(logits[1:], -1), 1)
    assert tokens.shape == (2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
@pytest.mark.parametrize(("vocab", "words"), [(9, 1), (64, 2), (65, 3)])
def test_a_mask_made_without_a_driver_allows_every_token(vocab: int, words: int) -> None:
    mask = cpu_grammar.unpinned_mask(vocab, 2)
    assert mask is not None
    assert torch.equal(mask, torch.full((2, words), -1, dtype=torch.int32))


@pytest.fixture(scope="module")
def backend_class() -> Any:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    return XGrammarGrammarBackend


def grammar_backend(backend_class: Any) -> Any:
    """Upstream's backend over a vocabulary of single characters; token 0 ends the text."""
    info = TokenizerInfo(["</s>", *"abc0123 "], VocabType.RAW, stop_token_ids=[0])
    backend = backend_class.__new__(backend_class)
    backend.grammar_compiler, backend.vocab_size, backend.override_stop_tokens = GrammarCompiler(info), 9, None
    return backend


@pytest.mark.parametrize("which", ["grammar", "backend"])
def test_upstream_masks_cpu_logits_with_the_patch_on(backend_class: Any, which: str) -> None:
    """Both of upstream's functions, the grammar's and the backend's (strict thinking calls the latter)."""
    grammar = grammar_backend(backend_class).dispatch_regex("a[01]b")
    grammar.accept_token(1)
    mask = grammar.allocate_vocab_mask(9, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    logits = torch.zeros(1, 9)
    (grammar if which == "grammar" else backend_class).apply_vocab_mask(logits=logits, vocab_mask=mask)
    assert (logits[0] > -INF).nonzero().view(-1).tolist() == [4, 5]


def test_a_refused_token_is_the_clients_error() -> None:
    reason = cpu_grammar.refusal(ValueError("Tokens not accepted: 7")).to_json()
    assert reason["status_code"] == 400
    assert "Tokens not accepted: 7" in reason["message"]
