"""Random draft trees as linked nodes, and the arrays SGLang describes them with, made the way its draft loop does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st


@dataclass
class Node:
    """One token of the tree; ``order`` is its index in the tree (0 the root)."""

    score: float
    number: int = -1
    order: int = 0
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """This node and its ancestors, root last."""
        return [self] if self.parent is None else [self, *self.parent.path()]


@dataclass
class Batch:
    """Trees of one batch, and SGLang's arrays for them."""

    trees: list[list[Node]]
    topk: int
    steps: int
    drafts: int
    parent_list: torch.Tensor
    selected_index: torch.Tensor

    def links(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat index, first child and next sibling of each node, -1 for none; each [bs, drafts] int64."""
        index = torch.arange(len(self.trees) * self.drafts).reshape(-1, self.drafts)
        child, sibling = torch.full_like(index, -1), torch.full_like(index, -1)
        for b, tree in enumerate(self.trees):
            for node in tree:
                for k, c in enumerate(node.children):
                    if k == 0:
                        child[b, node.order] = c.order
                    else:
                        sibling[b, node.children[k - 1].order] = c.order
        return index, child, sibling


def _draft(rng: random.Random, topk: int, steps: int, drafts: int) -> tuple[list[Node], list[int], list[int]]:
    """Draft one tree: its selected nodes (root first), ``parent_list`` and ``selected_index``."""
    root = Node(score=1.0)
    made: list[Node] = []
    beams, parent_list = [root], [-1]
    for step in range(steps):
        fresh = [Node(score=beam.score * rng.uniform(0.01, 0.99), parent=beam) for beam in beams for _ in range(topk)]
        for node in fresh:
            node.number = len(made)
            made.append(node)
        beams = sorted(fresh, key=lambda node: -node.score)[:topk]
        if step < steps - 1:
            parent_list += [beam.number for beam in beams]
    chosen = sorted(sorted(made, key=lambda node: -node.score)[: drafts - 1], key=lambda node: node.number)
    for order, node in enumerate(chosen, start=1):
        node.order = order
        assert node.parent is not None
        node.parent.children.append(node)
    return [root, *chosen], parent_list if steps > 1 else [], [node.number for node in chosen]


def make_batch(seed: int, bs: int, topk: int, steps: int, drafts: int) -> Batch:
    """Draft ``bs`` trees of ``drafts`` nodes."""
    rng = random.Random(seed)
    drafted = [_draft(rng, topk, steps, drafts) for _ in range(bs)]
    return Batch(
        trees=[tree for tree, _, _ in drafted],
        topk=topk,
        steps=steps,
        drafts=drafts,
        parent_list=torch.tensor([parents for _, parents, _ in drafted], dtype=torch.int64).reshape(bs, -1),
        selected_index=torch.tensor([selected for _, _, selected in drafted], dtype=torch.int64).reshape(
            bs, drafts - 1
        ),
    )


@st.composite
def batches(draw: st.DrawFn, max_drafts: int = 64) -> Batch:
    """Batches of 1-8 requests, topk 1-8, 1-5 steps, and any number of nodes the draft can fill."""
    bs, topk, steps = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(1, 5))
    drafts = draw(st.integers(2, min(max_drafts, 1 + topk + (steps - 1) * topk * topk)))
    return make_batch(draw(st.integers(0, 2**32)), bs, topk, steps, drafts)
