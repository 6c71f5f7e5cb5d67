"""Which experts the tokens of a batch go to: random draws, and the order that upstream's kernel takes them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """One draw, sorted for blocks of `block_m` rows.

    Attributes:
        ids: int32 (tokens, top_k), distinct in a row.
        weights: float32 (tokens, top_k), positive, rows add up to 1.
        order: int32 (at least padded,): places in ``ids.flatten()`` by expert, filled up to whole blocks with its size.
        experts: int32, the expert of each block.
        padded: int32 (1,), how much of `order` counts.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    experts: torch.Tensor
    padded: torch.Tensor


def draw(tokens: int, experts: int, top_k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of a batch, each token's `top_k` distinct experts with equal chance, as a balanced router has it.

    Returns: int32 and float32, (tokens, top_k), on the generator's device.
    """
    scores = torch.rand(tokens, experts, generator=generator, device=generator.device)
    best, ids = scores.topk(top_k, dim=1)
    return ids.to(torch.int32), best / best.sum(1, keepdim=True)


def align(ids: torch.Tensor, block_m: int, experts: int) -> Aligned:
    """What upstream's ``moe_align_block_size`` gives, in plain torch; upstream has no kernel for it on a CPU.

    Returns: order, experts and padded of `Work`.
    """
    flat, count = ids.flatten().tolist(), ids.numel()
    order: list[int] = []
    of: list[int] = []
    for expert in range(experts):
        mine = [place for place, other in enumerate(flat) if other == expert]
        blocks = -(-len(mine) // block_m)
        order += mine + [count] * (blocks * block_m - len(mine))
        of += [expert] * blocks
    padded = len(order)
    room = count * block_m if count < experts + 1 else count + (experts + 1) * (block_m - 1)
    room = (room + 3) // 4 * 4
    order += [count] * (room - padded)
    of += [0] * (-(-room // block_m) - len(of))
    made = [torch.tensor(values, dtype=torch.int32, device=ids.device) for values in (order, of, [padded])]
    return made[0], made[1], made[2]


def work(
    tokens: int, experts: int, top_k: int, block_m: int, number: int, seed: int, device: torch.device,
    aligned: Callable[[torch.Tensor, int, int], Aligned] = align, held: int | None = None,
) -> Work:  # fmt: skip
    """Draw `number` for a batch size: the same tokens for every block size and in every process.

    Args:
        aligned: upstream's function where it runs, else `align`.
        held: experts that exist, if fewer than are told to `aligned`.
    """
    generator = torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + tokens) * 1_009 + number)
    ids, weights = (part.to(device) for part in draw(tokens, held or experts, top_k, generator))
    return Work(ids, weights, *aligned(ids, block_m, experts))
