"""Sampling from the target model's distribution, along a draft tree and with top-k and top-p."""

from __future__ import annotations

import numpy as np
import torch


def _draw(weights: np.ndarray, coin: float) -> int:
    """First index at which the running sum of ``weights`` exceeds ``coin`` times their total; -1 without any mass."""
    running = np.cumsum(weights, dtype=np.float64)
    total = running[-1]
    if not total > 0:
        return -1
    index = int(np.searchsorted(running, coin * total, side="right"))
    # coin == 1 would step past the end: take the last index that has mass.
    return index if index < len(running) else int(np.flatnonzero(weights)[-1])


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept draft tokens so that what is emitted follows the target's distribution, in place.

    At each node one coin chooses among its children: child k is accepted if the coin falls under the summed target
    probability of children 1..k and it has any mass. If none is, the next token is drawn from the target's
    distribution without the rejected children; after a full path, from the whole of it. With both thresholds 1.0
    and children of distinct tokens this emits every sequence with exactly its target probability, whatever the
    draft; lower thresholds accept more and give that up.

    Args:
        predicts: [bs * n] int32, changed at the accepted nodes (root included) to the token that follows there.
        accept_index: [bs, steps + 1] int32; first entries changed to the accepted nodes' flat indices, root first.
        accept_token_num: [bs] int32, changed: accepted draft tokens, without the root.
        candidates, retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64, as in
            `verify_tree_greedy_cpu`.
        uniform_samples: [bs, n] float32 in [0, 1); the coin used at each node.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1); for the token after the accepted path.
        target_probs: [bs, n, vocab] float32; each row sums to 1.
        draft_probs: [bs, n, vocab] float32; zeros on entry for exact results. Changed in the last accepted node's row,
            at its rejected children, to their target probability. None means zeros, and saves the memory.
        threshold_single: accept any child whose target probability reaches this.
        threshold_acc: divides the summed probability before it is compared with the coin; at least 1e-9 is used.
        deterministic: accepted for the call's sake; this implementation always is.

    A row without any probability mass (all NaN or zero) yields token ``vocab - 1``, as on CUDA.

    Source: upstream's CUDA kernel ``TreeSpeculativeSamplingTargetOnly`` for the meaning of the arguments.
    """
    bs, width = accept_index.shape
    vocab = target_probs.shape[-1]
    threshold_acc = max(threshold_acc, 1e-9)
    index, tokens = retrive_index.tolist(), candidates.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, final_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    target = target_probs.numpy()
    draft = None if draft_probs is None else draft_probs.numpy()
    out_predicts, out_index, out_num = predicts.numpy(), accept_index.numpy(), accept_token_num.numpy()
    for b in range(bs):
        node, path, emitted = 0, [index[b][0]], []
        rejected: list[int] = []
        while len(path) < width:
            probs, coin, mass, rejected = target[b, node], coins[b][node], 0.0, []
            current = child[b][node]
            while current != -1:
                p = float(probs[tokens[b][current]])
                mass += p
                if p > 0 and (coin < mass / threshold_acc or p >= threshold_single):
                    break
                rejected.append(tokens[b][current])
                current = sibling[b][current]
            if current == -1:
                break
            node = current
            path.append(index[b][node])
            emitted.append(tokens[b][node])
            rejected = []
        probs = weights = target[b, node]
        if draft is not None:
            draft[b, node, rejected] = probs[rejected]
            if len(path) < width:
                weights = np.maximum(probs - draft[b, node], 0)
        elif rejected:
            weights = probs.copy()
            weights[rejected] = 0
        token = _draw(weights, final_coins[b])
        if token == -1:  # rounding can reject every token that has mass
            token = _draw(probs, final_coins[b])
        emitted.append(token if token != -1 else vocab - 1)
        out_num[b] = len(path) - 1
        out_index[b, : len(path)] = path
        out_predicts[path] = emitted


def _column(value: torch.Tensor | float, probs: torch.Tensor) -> torch.Tensor:
    column = torch.as_tensor(value, device=probs.device)
    return column.reshape(-1, 1).expand(probs.shape[0], 1)


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keep each row's ``top_k`` largest probabilities (and ties with the last of them) and renormalize.

    Args:
        probs: [rows, vocab] float32; non-negative.
        top_k: [rows] integer or one int, at least 1; more than vocab keeps all.

    Returns:
        [rows, vocab] float32, rows summing to 1.
    """
    k = _column(top_k, probs).long().clamp(1, probs.shape[1])
    largest = torch.topk(probs, int(k.max()), dim=-1).values
    kept = torch.where(probs >= largest.gather(1, k - 1), probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Keep each row's smallest set of largest probabilities that sums to ``top_p`` (with ties) and renormalize.

    Args:
        probs: [rows, vocab] float32; rows sum to 1.
        top_p: [rows] float or one float, in (0, 1]; 1 keeps all.

    Returns:
        [rows, vocab] float32, rows summing to 1.
    """
    p = _column(top_p, probs).to(probs.dtype)
    ordered = probs.sort(dim=-1, descending=True).values
    # Mass before an entry below top_p: the entry is needed to reach it. The first one always is.
    needed = (ordered.cumsum(dim=-1) - ordered < p).sum(dim=-1, keepdim=True).clamp_(min=1)
    kept = torch.where((probs >= ordered.gather(1, needed - 1)) | (p >= 1), probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
