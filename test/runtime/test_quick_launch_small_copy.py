"""quick-launch's fused copy: upstream's bytes and refusals, in Triton's interpreter, and upstream's launches."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launches
import pytest
import torch
from sglang.kernels.ops.memory import small_copy as upstream
from small_copies import on_this_device
from split_made import written
from triton.runtime import jit

from sglang_patches.runtime.quick_launch import launch, small_copy
from sglang_patches.runtime.quick_launch.small_copy import SmallCopy, apart, extent

KERNEL = "_small_copy_kernel"


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(upstream, "try_small_copy", upstream.try_small_copy)
    return on_this_device(upstream.try_small_copy)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[launches.Gpu]:
    known: Any = vars(upstream)[KERNEL]
    options = {name: getattr(known, name) for name in ("do_not_specialize", "do_not_specialize_on_alignment")}
    with launches.gpu(monkeypatch) as made:
        monkeypatch.setattr(upstream, KERNEL, launch.quicken(jit.JITFunction(known.fn, **options), launch.Counts()))
        yield made


def test_bytes_and_refusals_are_upstreams(tmp_path: Path) -> None:
    """Overlapping, strided, empty, of mixed integers, at changing addresses."""
    found = written("small_copies.py", "quick-launch", "random", tmp_path)
    assert found["different"] == []
    assert found["copied"] > 200
    assert found["refused"] > 100
    assert found["asked"] < 450  # of 600


def test_it_launches_what_upstream_launches(gpu: launches.Gpu, original: Any) -> None:
    chance = random.Random(2)
    quick = SmallCopy(original, KERNEL)
    kernel = vars(upstream)[KERNEL]

    def by_triton(dsts: Any, srcs: Any) -> bool:
        with pytest.MonkeyPatch.context() as own:
            own.setattr(type(kernel), "__getitem__", jit.KernelInterface.__getitem__)
            return bool(original(dsts, srcs))

    shapes: list[Any] = [(1,), (3,), (16,), (2, 3), (4, 1)]
    for _ in range(30):
        made = [
            (chance.choice((torch.int32, torch.int64)), chance.choice(shapes)) for _ in range(chance.choice((2, 4)))
        ]
        pool = torch.zeros(8192, dtype=torch.uint8)
        for _ in range(4):
            places = iter(chance.sample(range(0, 8000, 200), 2 * len(made)))

            def put(dtype: torch.dtype, shape: Any, pool: torch.Tensor = pool, places: Any = places) -> torch.Tensor:
                at = next(places) + chance.choice((0, 0, 8))
                count = torch.Size(shape).numel() * dtype.itemsize
                return pool[at : at + count].view(dtype).view(shape)

            dsts = [put(dtype, shape) for dtype, shape in made]
            srcs = [put(torch.int64, shape) for _, shape in made]
            runs = [gpu.by(functools.partial(copy, dsts, srcs)) for copy in (by_triton, quick, quick)]
            (_, (wanted,)), *others = runs
            for done, (launched,) in others:
                assert done is True
                assert launches.less_hooks(launched)[:-1] == launches.less_hooks(wanted)[:-1]
                assert launched[-1][2:] == wanted[-1][2:]
                for got, asked in zip(launched[-1][:2], wanted[-1][:2], strict=True):
                    assert all(a is b for a, b in zip(got, asked, strict=True))
    assert kernel.counts.quick[0] > 80


def test_what_upstream_is_asked_for(gpu: launches.Gpu, original: Any) -> None:
    """For new shapes and for ranges that may share bytes; not for other addresses, nor for what it always refuses."""
    calls = []

    class Watched(SmallCopy):
        def _upstream(self, *given: Any) -> bool:
            calls.append(super()._upstream(*given))
            return calls[-1]

    quick = Watched(original, KERNEL)
    pool = torch.zeros(64, dtype=torch.int64)

    def at(*begins: int, length: int = 4) -> list[torch.Tensor]:
        return [pool[begin : begin + length] for begin in begins]

    assert quick(at(0, 4), at(8, 12))
    assert quick(at(20, 24), at(8, 16))
    assert calls == [True]
    assert not quick(at(0, 4), at(3, 12))  # the first source begins in the first destination
    assert not quick(at(0, 2), at(8, 12))  # destinations share two numbers
    assert calls == [True, False, False]
    for _ in range(2):
        assert quick(at(0, 4), at(0, 4))  # each onto itself
        assert quick(at(0, 4), at(8, 9))  # sources share three numbers
    assert calls == [True, False, False, True, True]
    floats = [each.float() for each in at(8, 12)]
    for begin in (0, 20):
        assert not quick(at(begin, begin + 4), floats)
    assert calls == [True, False, False, True, True, False]
    assert not quick(at(0), at(8))
    assert not quick(at(0, 4), at(8))


def test_memory_is_bounded(gpu: launches.Gpu, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_copy, "MAX_PLANS", 3)
    monkeypatch.setattr(small_copy, "MAX_PLACES", 2)
    quick = SmallCopy(original, KERNEL)
    pool = torch.zeros(400, dtype=torch.int64)
    for length in range(1, 12):
        for begin in range(5):
            pair = [pool[begin : begin + length], pool[begin + 20 : begin + 20 + length]]
            assert quick(pair, [pool[100:][:length], pool[100:][:length]])
        assert len(quick.plans) <= 3
        assert all(len(plan.apart) <= 2 for plan in quick.plans.values())


@pytest.mark.parametrize(
    ("places", "extents", "expected"),
    [
        ((0, 8), (8, 8), True),
        ((0, 7), (8, 8), False),
        ((7, 0), (8, 8), False),
        ((0, 8, 4), (8, 8, 1), False),
        ((0, 10, 4), (20, 1, 1), False),
        ((0, 0), (0, 0), True),
        ((5, 5), (0, 1), True),
        ((5, 4), (0, 8), False),
    ],
)
def test_apart(places: tuple[int, ...], extents: tuple[int, ...], expected: bool) -> None:
    assert apart(places, extents) is expected


def test_extent() -> None:
    whole = torch.zeros(6, 8, dtype=torch.int32)
    assert [extent(each) for each in (whole, whole[:2, :3], whole[:, 2], whole[:0], whole[::2, 1::3])] == [
        192,
        44,
        164,
        0,
        (32 + 6 + 1) * 4,
    ]
