"""The draft tree: its links and attention mask, and its greedy verification."""

from __future__ import annotations

import numpy as np
import torch

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2


def _parents(parent_list: np.ndarray, selected: np.ndarray, topk: int) -> np.ndarray:
    """Parent node of each node: [bs, n] integer, 0 for the root itself; a node without one is its own parent."""
    bs, drafts = selected.shape
    parents = np.zeros((bs, drafts + 1), dtype=np.int64)
    group = selected // topk
    if not group.any():  # every draft token hangs from the root
        return parents
    parent_token = np.take_along_axis(parent_list, group, axis=1)
    match = parent_token[:, :, None] == selected[:, None, :]
    found = match.argmax(axis=2) + 1
    found = np.where(match.any(axis=2), found, np.arange(1, drafts + 1))
    parents[:, 1:] = np.where(group == 0, 0, found)
    return parents


def _ancestors(parents: np.ndarray, depth: int) -> np.ndarray:
    """[bs, n, n] bool: node i attends node j, its ancestor, itself or the root."""
    bs, n = parents.shape
    mask = np.zeros((bs, n, n), dtype=bool)
    mask[:, :, 0] = True
    nodes = np.arange(n)
    batch = np.arange(bs)[:, None]
    current = np.broadcast_to(nodes, (bs, n))
    for _ in range(depth):
        mask[batch, nodes, current] = True
        current = parents[batch, current]
    return mask


def _write_links(parents: np.ndarray, next_token: np.ndarray, next_sibling: np.ndarray) -> None:
    """Link each node to its first child and to its next sibling, in node order."""
    for b, row in enumerate(parents.tolist()):
        children: dict[int, int] = {}
        for node in range(len(row) - 1, 0, -1):
            parent = row[node]
            if parent == node:
                continue
            if parent in children:
                next_sibling[b, node] = children[parent]
            children[parent] = node
        next_token[b, list(children)] = list(children.values())


def _write_mask(mask: np.ndarray, seq_lens: list[int], tree_mask: torch.Tensor, mode: int) -> None:
    bs, n, _ = mask.shape
    out = tree_mask.numpy().view(np.uint8)
    if mode == QLEN_ONLY:
        out[: mask.size] = mask.reshape(-1)
    elif mode == FULL_MASK:
        offset = 0
        for b, seq_len in enumerate(seq_lens):
            end = offset + n * (seq_len + n)
            out[offset:end].reshape(n, seq_len + n)[:, seq_len:] = mask[b]
            offset = end
    else:
        item_bytes = 1 if n <= 8 else 2 if n <= 16 else 4
        bits = np.packbits(mask, axis=2, bitorder="little")
        out[: bs * n * item_bytes].reshape(bs, n, item_bytes)[:, :, : bits.shape[2]] |= bits


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build each request's draft tree of ``n = draft_token_num`` nodes, in place; node 0 is the verified token.

    The draft model makes ``topk`` tokens at its first step and ``topk * topk`` at each further one; they are numbered
    in that order. ``selected_index`` names the ones in the tree; token ``t`` belongs to group ``t // topk``, group 0
    hangs from the root, group g from the token numbered ``parent_list[g]``. A token whose parent was not selected
    (seen only with NaN scores) gets no links and attends the root and itself.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1] int64; [bs, 0] when depth is 1.
        selected_index: [bs, n - 1] int64, ascending.
        verified_seq_len: [bs] integer; tokens before node 0.
        tree_mask: flat, bool or uint8, changed. Mode 0 (FULL_MASK): for each request [n, seq_len + n], of which the
            first seq_len columns are left alone. Mode 1 (QLEN_ONLY): [bs, n, n]. Mode 2 (QLEN_ONLY_BITPACKING):
            [bs, n] of 1, 2 or 4 bytes for n up to 8, 16 or 32, bit j for node j, zero on entry.
        positions: [bs * n] int64, changed: verified_seq_len + depth in the tree.
        retrive_index: [bs, n] int64, changed: flat index ``b * n + i``.
        retrive_next_token, retrive_next_sibling: [bs, n] int64, -1 on entry; changed where a node has a child (the
            first in node order) or a later sibling.
        topk, depth: branching and number of draft steps.
        draft_token_num: n.
        tree_mask_mode: 0, 1 or 2.

    Raises:
        ValueError: an unknown mask mode, or more than 32 draft tokens in mode 2.
    """
    n, bs = draft_token_num, verified_seq_len.shape[0]
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING):
        raise ValueError(
            f"build_tree_kernel_efficient_cpu: tree_mask_mode {tree_mask_mode}, expected 0 (FULL_MASK), "
            f"1 (QLEN_ONLY) or 2 (QLEN_ONLY_BITPACKING)"
        )
    if tree_mask_mode == QLEN_ONLY_BITPACKING and n > 32:
        raise ValueError(f"build_tree_kernel_efficient_cpu: QLEN_ONLY_BITPACKING holds 32 draft tokens, not {n}")
    seq_lens = verified_seq_len.numpy()
    out_positions = positions.numpy().reshape(bs, n)
    next_token = retrive_next_token.numpy()
    retrive_index.numpy()[...] = np.arange(bs * n).reshape(bs, n)
    if topk == 1 and n == depth + 1:  # a chain: every draft token is in, each hangs from the one before it
        mask = np.broadcast_to(np.tri(n, dtype=bool), (bs, n, n))
        out_positions[...] = seq_lens[:, None] + np.arange(n)
        next_token[:, :-1] = np.arange(1, n)
    else:
        parents = _parents(parent_list.numpy(), selected_index.numpy(), topk)
        mask = _ancestors(parents, depth)
        out_positions[...] = seq_lens[:, None] + mask[:, :, 1:].sum(axis=2)
        _write_links(parents, next_token, retrive_next_sibling.numpy())
    _write_mask(mask, seq_lens.tolist(), tree_mask, tree_mask_mode)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target model's argmax down each draft tree, in place.

    From the root: among the current node's children, the first whose token is the target's prediction at that node is
    accepted. It ends where no child matches, or after ``accept_index.shape[1] - 1`` accepted draft tokens.

    Args:
        predicts: [bs * n] int32; changed at the accepted nodes (root included) to the target's prediction there.
        accept_index: [bs, steps + 1] int32; its first entries are changed to the flat indices of the accepted nodes,
            root first; the rest stays (-1 by convention).
        accept_token_num: [bs] int32, changed: accepted draft tokens, without the root.
        candidates: [bs, n] int64; the token at each node.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64, from
            `build_tree_kernel_efficient_cpu`.
        target_predict: [bs, n] int64; the target's argmax after each node.
    """
    bs, width = accept_index.shape
    target = target_predict.reshape(-1).tolist()
    index, tokens = retrive_index.tolist(), candidates.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    out_predicts, out_index, out_num = predicts.numpy(), accept_index.numpy(), accept_token_num.numpy()
    for b in range(bs):
        node, path = 0, [index[b][0]]
        while len(path) < width:
            node = child[b][node]
            while node != -1 and tokens[b][node] != target[path[-1]]:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(index[b][node])
        out_num[b] = len(path) - 1
        out_index[b, : len(path)] = path
        out_predicts[path] = [target[i] for i in path]
