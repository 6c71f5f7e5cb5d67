"""Sampling on a CPU server, speculative or not, from exactly the distribution that a request asks for.

Upstream 0.5.23 commits the target's argmax at every EAGLE verify on a CPU (``speculative/eagle_utils.py``,
``_verify_uses_greedy``), applies penalties once per verify cycle and counts one token per cycle, and ignores seeds
unless the whole server is deterministic. Here every node of the verify tree gets a token *sampled* from the target's
distribution given the path to that node, and upstream's own walk then follows the drafts that equal those samples.
The token committed at a position is therefore the target's sample whatever was drafted, and a draft is accepted with
the target's probability of it, as in target-only tree sampling.

Each sample is the inverse of the cumulative distribution at one uniform number, a pure function of (seed of the
request, position of the token that was fed). Decode, prefill and verify use the same function, so a request with a
seed gets the same tokens with and without speculation, alone or in a batch.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_patches import lane

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator, _BatchedPenalizer
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

logger = logging.getLogger(__name__)

_UINT64 = 2**64 - 1


def request_seeds(reqs: Sequence[Req], device: str, upstream: torch.Tensor | None) -> torch.Tensor | None:
    """The seed of every request of a batch, int64 ``[requests]``; a request that named none gets a random one.

    ``upstream`` is returned as it is where it is set (a deterministic server) and on any other device than a CPU.
    """
    if upstream is not None or torch.device(device).type != "cpu":
        return upstream
    given = [req.sampling_params.sampling_seed for req in reqs]
    # From the global generator, which upstream seeds alike on all TP ranks: they must draw the same samples.
    drawn = torch.randint(-(2**63), 2**63 - 1, (len(given),), dtype=torch.int64)
    for row, seed in enumerate(given):
        if seed is not None:
            drawn[row] = seed
    return drawn


def seed_choice(request: TokenizedGenerateReqInput, choice: int) -> None:
    """Give choice ``choice`` of a request with ``n > 1`` and a seed its own seed; choice 0 keeps the one given."""
    seed = request.sampling_params.sampling_seed
    if seed is None or choice == 0:
        return
    request.sampling_params = copy.copy(request.sampling_params)
    mixed = np.random.SeedSequence(seed & _UINT64, spawn_key=(choice,)).generate_state(1, np.uint64)
    request.sampling_params.sampling_seed = int(mixed.view(np.int64)[0])


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each (seed, position), float64 ``[rows]``: Philox keyed by seed, counted by position."""
    drawn: dict[tuple[int, int], float] = {}
    keys = list(zip(seeds.tolist(), positions.tolist(), strict=True))
    for key in keys:
        if key not in drawn:
            seed, position = key
            drawn[key] = np.random.Generator(np.random.Philox(key=seed & _UINT64, counter=position)).random()
    return torch.tensor([drawn[key] for key in keys], dtype=torch.float64)


def filter_sorted(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that top-k, top-p and min-p leave, largest first, and the token ids they belong to.

    All three cut the *unfiltered* distribution, as upstream's ``pytorch`` and ``flashinfer`` samplers do (flashinfer
    calls it joint): rank < top_k, probability before this rank <= top_p, probability >= min_p * the largest.

    Args:
        probs: float ``[rows, vocab]``, each row summing to one.
        top_ks: int ``[rows]``, at least the vocabulary's size where off.
        top_ps: float ``[rows]``, 1 where off.
        min_ps: float ``[rows]``, 0 where off.

    Returns:
        float64 ``[rows, vocab]`` weights, not renormalised, and int64 ``[rows, vocab]`` token ids.
    """
    weights, ids = probs.double().sort(dim=-1, descending=True, stable=True)
    before = weights.cumsum(-1) - weights
    top_p = top_ps.double().view(-1, 1)
    keep = torch.arange(probs.shape[-1]).view(1, -1) < top_ks.view(-1, 1)
    # Float32 rows sum to one only roughly: with top_p off, no token may fall to the rounding.
    keep &= (before <= top_p) | (top_p >= 1)
    keep &= weights >= weights[:, :1] * min_ps.double().view(-1, 1)
    return weights.where(keep, 0.0), ids


def draw(weights: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """Sample one column of each row with probability proportional to its weight.

    Args:
        weights: ``[rows, columns]``, at least one positive in each row.
        seeds: int64 ``[rows]``, or None to draw from PyTorch's global generator.
        positions: int ``[rows]``, the position of the token each row was computed from; unused without seeds.

    Returns:
        int64 ``[rows]``, never a column of weight zero.
    """
    if seeds is None or positions is None:
        u = torch.rand(len(weights), dtype=torch.float64)
    else:
        u = uniforms(seeds, positions)
    cdf = weights.double().cumsum(-1)
    # Dividing by the last entry makes it exactly one, above every u; a zero weight leaves its entry equal to the
    # one before it, which the search never stops at.
    columns = torch.searchsorted(cdf / cdf[:, -1:], u.view(-1, 1), right=True).view(-1)
    # A row of NaN, from a model that overflows, has no such column: stay inside the vocabulary, for the next embedding
    # lookup would end the server.
    return columns.clamp_(max=weights.shape[-1] - 1)


def sample(probs: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """Sample a token of each row of ``probs`` (``[rows, vocab]``); int32 ``[rows]``. See :func:`draw`."""
    return draw(probs, seeds, positions).int()


def sample_filtered(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    return_filtered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample a token of each row after top-k, top-p and min-p; see :func:`filter_sorted` and :func:`draw`.

    Returns:
        int32 ``[rows]``; with ``return_filtered`` also what upstream's function of this contract gives: the sorted
        weights, their int32 token ids, and the weight of the sampled token.
    """
    weights, ids = filter_sorted(probs, top_ks, top_ps, min_ps)
    # In vocabulary order, where a row without filters reads the same numbers as in `sample`: what a seed yields must
    # not depend on the filters of the other rows of the batch.
    by_token = torch.zeros_like(weights).scatter_(-1, ids, weights)
    tokens = draw(by_token, seeds, positions)
    if not return_filtered:
        return tokens.int()
    chosen = by_token.gather(-1, tokens.view(-1, 1)).view(-1)
    return tokens.int(), weights.to(probs.dtype), ids.int(), chosen.to(probs.dtype)


def sample_tree(
    logits: torch.Tensor, argmax: torch.Tensor, info: SamplingBatchInfo, verify: EagleVerifyInput
) -> torch.Tensor:
    """The target's token at every node of the verify trees: the argmax for greedy requests, a sample for the others.

    Args:
        logits: ``[requests * nodes, vocab]``, with penalties, bias and grammar mask applied.
        argmax: int64 ``[requests * nodes]``, the argmax of each row.
        info: the batch's sampling parameters, one row a request.
        verify: the trees; ``positions`` int64 ``[requests * nodes]`` is each node's position in its sequence.

    Returns:
        int64 ``[requests * nodes]``.
    """
    if logits.device.type != "cpu" or info.is_all_greedy:
        return argmax
    _check_thresholds()
    of_request = torch.arange(len(info)).repeat_interleave(verify.draft_token_num)
    rows = (info.top_ks > 1)[of_request].nonzero().view(-1)
    of_request = of_request[rows]
    probs = torch.softmax(logits[rows].float() / info.temperatures[of_request], -1)
    seeds = None if info.sampling_seed is None else info.sampling_seed[of_request]
    positions = verify.positions[rows]
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        filters = (info.top_ks[of_request], info.top_ps[of_request], info.min_ps[of_request])
        tokens = sample_filtered(probs, *filters, seeds, positions)
        assert isinstance(tokens, torch.Tensor)
    else:
        tokens = sample(probs, seeds, positions)
    return argmax.index_copy(0, rows, tokens.long())


@functools.cache
def _check_thresholds() -> None:
    """Say once that lossy acceptance, which would leave the target's distribution, is not done here."""
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = getattr(lane.here().runtime_context().get_spec(), name)
        if value != 1.0:
            logger.warning(
                "--%s %s has no effect on a CPU: every token is a sample of the target's own distribution (1.0)",
                name.replace("_", "-"),
                value,
            )


def tree_paths(next_token: Sequence[int], next_sibling: Sequence[int]) -> torch.Tensor:
    """Which drafts lie on the way to each node: bool ``[nodes, nodes]``, row = node, column = draft.

    A node is on its own path; the root, which is committed already, is on none. ``next_token[i]`` is the first child
    of node ``i`` and ``next_sibling[i]`` its next sibling, -1 for none (upstream's ``retrieve_*`` arrays).
    """
    paths = torch.zeros(len(next_token), len(next_token), dtype=torch.bool)
    pending = [0]
    while pending:
        parent = pending.pop()
        child = next_token[parent]
        while child != -1:
            paths[child] = paths[parent]
            paths[child, child] = True
            pending.append(child)
            child = next_sibling[child]
    return paths


def _stop_ids(req: Req) -> list[int]:
    """Every token that ends the request, which min_new_tokens holds back."""
    tokenizer = req.tokenizer
    own: Iterable[int | None] = (req.sampling_params.stop_token_ids or set()) | (req.eos_token_ids or set())
    of_tokenizer = [*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id] if tokenizer else []
    return sorted({token for token in (*own, *of_tokenizer) if token is not None})


def penalize_tree(logits: torch.Tensor, verify: EagleVerifyInput, batch: ScheduleBatch) -> None:
    """Apply each request's penalties to its verify tree, in place: every node counts the drafts on its own path.

    Upstream's penalties, accumulated once a cycle, are taken out of ``batch.sampling_info``; the history is the
    request's own output, complete because this patch keeps the overlap schedule off on a CPU. As upstream does,
    output tokens count and prompt tokens do not, additive penalties come before scaling ones.

    Args:
        logits: float ``[requests * nodes, vocab]``.
        verify: the trees: ``draft_token`` ``[requests * nodes]``, ``retrieve_next_token`` and
            ``retrieve_next_sibling`` ``[requests, nodes]``.
        batch: the requests, in the order of the trees.
    """
    if logits.device.type != "cpu":
        return
    batch.sampling_info.acc_additive_penalties = batch.sampling_info.acc_scaling_penalties = None
    drafts = verify.draft_token.view(len(batch.reqs), -1)
    for row, req in enumerate(batch.reqs):
        params = req.sampling_params
        frequency, presence = params.frequency_penalty, params.presence_penalty
        repetition, min_new = params.repetition_penalty, params.min_new_tokens
        waits = len(req.output_ids) < min_new
        if not (frequency or presence or repetition != 1.0 or waits):
            continue
        paths = tree_paths(verify.retrieve_next_token[row].tolist(), verify.retrieve_next_sibling[row].tolist())
        block = logits.view(len(batch.reqs), -1, logits.shape[-1])[row]
        counts = torch.zeros_like(block, dtype=torch.float32)
        counts += torch.bincount(torch.tensor(list(req.output_ids), dtype=torch.int64), minlength=block.shape[-1])
        counts.index_add_(1, drafts[row].long(), paths.float())
        seen = counts > 0
        block -= frequency * counts + presence * seen
        if waits:
            early = len(req.output_ids) + paths.sum(-1) < min_new
            stop = torch.zeros(block.shape[-1], dtype=torch.bool)
            stop[_stop_ids(req)] = True
            block.masked_fill_(early[:, None] & stop, float("-inf"))
        if repetition != 1.0:
            block.copy_(torch.where(seen, torch.where(block < 0, block * repetition, block / repetition), block))


def apply_logit_processors(logits: torch.Tensor, info: SamplingBatchInfo) -> None:
    """Run the requests' custom logit processors on every node of the trees, in place; upstream's verify skips them."""
    if logits.device.type != "cpu" or not info.has_custom_logit_processor:
        return
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    apply_custom_logit_processor(logits, info, num_tokens_in_batch=len(logits) // len(info))


def ordered_penalizers(penalizers: Iterable[type[_BatchedPenalizer]]) -> list[type[_BatchedPenalizer]]:
    """Additive penalizers before scaling ones, as the verify step has them; upstream iterates over a set of classes."""
    return sorted(penalizers, key=lambda kind: (kind.is_multiplicative, kind.__name__))


def replay_output(orchestrator: BatchedPenalizerOrchestrator) -> None:
    """Count the tokens that requests have put out already in the penalizers of a new prefill batch.

    A retracted request comes back as a prefill, and upstream starts its penalties from nothing.
    """
    from sglang.srt.sampling import penaltylib

    if not orchestrator.is_required or torch.device(orchestrator.device).type != "cpu":
        return
    outputs = [list(req.output_ids) for req in orchestrator.reqs()]
    if not any(outputs):
        return
    counts = torch.stack(
        [torch.bincount(torch.tensor(out, dtype=torch.int64), minlength=orchestrator.vocab_size) for out in outputs]
    )
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        if isinstance(penalizer, penaltylib.BatchedFrequencyPenalizer):
            penalizer.cumulated_frequency_penalties = penalizer.frequency_penalties * counts
        elif isinstance(penalizer, penaltylib.BatchedPresencePenalizer):
            penalizer.cumulated_presence_penalties = penalizer.presence_penalties * (counts > 0)
        elif isinstance(penalizer, penaltylib.BatchedRepetitionPenalizer):
            penalizer.cumulated_repetition_penalties = torch.where(counts > 0, penalizer.repetition_penalties, 1.0)
        elif isinstance(penalizer, penaltylib.BatchedMinNewTokensPenalizer):
            penalizer.len_output_tokens = counts.sum(-1, keepdim=True, dtype=torch.int32)
        else:
            raise TypeError(
                f"unknown penalizer {type(penalizer).__name__}: cannot restore its state after a retraction"
            )
