"""The draft tree: its links and attention mask, and its greedy verification."""

from __future__ import annotations

import numpy as np
import torch

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent of each node of one tree; the root, and a node whose parent was not selected, are their own."""
    node_of = {token: node for node, token in enumerate(selected, start=1)}
    parents = [0]
    for node, token in enumerate(selected, start=1):
        group = token // topk
        parents.append(node_of.get(parent_list[group], node) if group else 0)
    return parents


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, in node order; -1 for none."""
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent != node:
            sibling[node] = child[parent]
            child[parent] = node
    return child, sibling


def _paths(parents: list[int]) -> tuple[list[int], list[int]]:
    """Of each node: the nodes it attends (ancestors, itself, the root) as a bit set, and its depth."""
    paths, depths = [1], [0]
    for node in range(1, len(parents)):
        parent = parents[node] if parents[node] != node else 0
        paths.append(paths[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return paths, depths


def _write_mask(paths: list[int], n: int, seq_lens: list[int], tree_mask: torch.Tensor, mode: int) -> None:
    """Write the bit sets of all nodes, request after request."""
    out = tree_mask.numpy().view(np.uint8)
    if mode == QLEN_ONLY_BITPACKING:
        item_bytes = 1 if n <= 8 else 2 if n <= 16 else 4
        packed = b"".join([path.to_bytes(item_bytes, "little") for path in paths])
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return
    item_bytes = (n + 7) // 8
    packed = b"".join([path.to_bytes(item_bytes, "little") for path in paths])
    bytes_ = np.frombuffer(packed, np.uint8).reshape(len(paths), item_bytes)
    mask = np.unpackbits(bytes_, axis=1, count=n, bitorder="little")
    if mode == QLEN_ONLY:
        out[: mask.size] = mask.reshape(-1)
        return
    offset = 0
    for b, seq_len in enumerate(seq_lens):
        end = offset + n * (seq_len + n)
        out[offset:end].reshape(n, seq_len + n)[:, seq_len:] = mask[b * n : (b + 1) * n]
        offset = end


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
            [bs, n] of 1, 2 or 4 bytes for n up to 8, 16 or 32, bit j for node j.
        positions: [bs * n] int64, changed: verified_seq_len + depth in the tree.
        retrive_index: [bs, n] int64, changed: flat index ``b * n + i``.
        retrive_next_token, retrive_next_sibling: [bs, n] int64, changed: a node's first child and next sibling in
            node order, -1 for none.
        topk: branching of the draft.
        depth: draft steps; not needed here, as the tree ends where its nodes do.
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
    seq_lens = verified_seq_len.tolist()
    all_paths, all_positions, all_child, all_sibling = [], [], [], []
    for seq_len, groups, selected in zip(seq_lens, parent_list.tolist(), selected_index.tolist(), strict=True):
        parents = _parents(groups, selected, topk)
        child, sibling = _links(parents)
        paths, depths = _paths(parents)
        all_child.append(child)
        all_sibling.append(sibling)
        all_paths += paths
        all_positions += [seq_len + depth for depth in depths]
    positions.numpy()[...] = all_positions
    retrive_index.numpy()[...] = np.arange(bs * n).reshape(bs, n)
    retrive_next_token.numpy()[...] = all_child
    retrive_next_sibling.numpy()[...] = all_sibling
    _write_mask(all_paths, n, seq_lens, tree_mask, tree_mask_mode)


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
