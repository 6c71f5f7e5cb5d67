"""Copies of many sets of buffers by upstream's ``try_small_copy`` and by ours, in Triton's interpreter; see
`test_quick_launch_small_copy.py`, which starts it. A process of its own: Triton reads TRITON_INTERPRET when it is
imported.

    python small_copies.py random FILE
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import inspect  # isort: skip

import torch
from sglang.kernels.ops.memory import small_copy as upstream

from sglang_patches.runtime.quick_launch.small_copy import SmallCopy

SIZE = 4096
TYPES = (torch.int32, torch.int64, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
View = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]


def on_this_device(function: Callable[..., bool]) -> Callable[[Any, Any], bool]:
    """Upstream's function, which copies on a GPU only."""
    source = inspect.getsource(inspect.unwrap(function)).replace("@quick_launch.copies\n", "")
    condition = 'device.type != "cuda"'
    assert source.count(condition) == 1
    exec(source.replace(condition, 'device.type != "cpu"'), vars(upstream))
    made: Callable[[Any, Any], bool] = vars(upstream)["try_small_copy"]
    return made


def view(arena: torch.Tensor, made: View) -> torch.Tensor:
    dtype, offset, shape, strides = made
    return torch.as_strided(arena.view(dtype), shape, strides, offset // dtype.itemsize)


def drawn(chance: random.Random) -> list[tuple[View, View]]:
    """Pairs of a destination and a source; most can be copied, if they do not overlap."""
    pairs = []
    for place in range(chance.choice((1, 2, 3, 3, 4))):
        dtype = chance.choice(TYPES)
        other = chance.choice((torch.int32, torch.int64)) if dtype in (torch.int32, torch.int64) else dtype
        if chance.random() < 0.03:
            other = chance.choice(TYPES)
        shape: tuple[int, ...] = chance.choice(((0,), (1,), (3,), (7,), (2, 3), (3, 0), (4, 2)))
        if chance.random() < 0.03:
            shape = chance.choice(((2, 2, 2), ()))

        def strides(free: bool, shape: tuple[int, ...] = shape) -> tuple[int, ...]:
            inner = chance.choice((1, 1, 2, 0 if free else 1))
            rows = chance.choice((shape[-1] * max(inner, 1), 8, 0 if free else 9)) if shape else 0
            return {0: (), 1: (inner,), 2: (rows, inner), 3: (4, 2, 1)}[len(shape)]

        apart = chance.random() < 0.85
        begins = [SIZE // 2 * side + 512 * place if apart else 8 * chance.randrange(16) for side in (0, 1)]
        begins = [begin + chance.choice((0, 0, 8, 16)) for begin in begins]
        target = (dtype, begins[0], shape, strides(chance.random() < 0.05))
        pairs.append((target, (other, begins[1], shape, strides(True))))
        if chance.random() < 0.05:
            pairs[-1] = (target, target)
    return pairs


def moved(pairs: list[tuple[View, View]], chance: random.Random) -> list[tuple[View, View]]:
    """The same shapes elsewhere, now and then upon each other."""

    def move(each: View) -> View:
        dtype, offset, shape, strides = each
        return dtype, max(0, min(SIZE - 512, offset + 8 * chance.choice((-20, -2, 0, 0, 1, 40)))), shape, strides

    return [(move(target), move(source)) for target, source in pairs]


def compared() -> dict[str, Any]:
    original = on_this_device(upstream.try_small_copy)
    asked = [0]

    class Counted(SmallCopy):
        def _upstream(self, *given: Any) -> bool:
            asked[0] += 1
            return super()._upstream(*given)

    quick = Counted(original, "_small_copy_kernel")
    chance = random.Random(5)
    found: dict[str, Any] = {"copied": 0, "refused": 0, "different": []}
    for _ in range(150):
        pairs = drawn(chance)
        for _ in range(4):
            begun = torch.randint(0, 2, (SIZE,), dtype=torch.uint8)
            results = []
            for copy in (original, quick):
                arena = begun.clone()
                dsts, srcs = ([view(arena, pair[side]) for pair in pairs] for side in (0, 1))
                results.append((copy(dsts, srcs), arena))
            (wanted, first), (got, second) = results
            found["copied" if wanted else "refused"] += 1
            if got != wanted or not torch.equal(first, second):
                found["different"].append(pairs)
            if chance.random() < 0.7:
                pairs = moved(pairs, chance)
    found["asked"], found["plans"] = asked[0], len(quick.plans)
    return found


if __name__ == "__main__":
    torch.save(compared(), sys.argv[2])
