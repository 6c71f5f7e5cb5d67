"""The seeded hash, against MurmurHash3 over bytes as its author describes it."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_cpu as ops

MASK = 2**32 - 1


def murmur3_x86_32(key: bytes, seed: int = 0) -> int:
    def rotl(x: int, r: int) -> int:
        return (x << r | x >> (32 - r)) & MASK

    def scramble(k: int) -> int:
        return rotl(k * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK

    h, whole = seed, len(key) // 4 * 4
    for (k,) in struct.iter_unpack("<I", key[:whole]):
        h = (rotl(h ^ scramble(k), 13) * 5 + 0xE6546B64) & MASK
    if key[whole:]:
        h ^= scramble(int.from_bytes(key[whole:], "little"))
    h ^= len(key)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("key", "seed", "digest"),
    [(b"", 0, 0), (b"", 1, 0x514E28B7), (b"test", 0, 0xBA6BD213), (b"Hello, world!", 0x9747B28C, 0x24884CBA)],
)
def test_the_reference_itself(key: bytes, seed: int, digest: int) -> None:
    """Published test vectors."""
    assert murmur3_x86_32(key, seed) == digest


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=8),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.sampled_from([torch.int64, torch.uint64]),
)
@settings(max_examples=100, deadline=None)
def test_hash(rows: list[tuple[int, int]], columns: list[int], dtype: torch.dtype) -> None:
    seeds, positions = zip(*rows, strict=True)
    got = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions, dtype=dtype), torch.tensor(columns)
    )
    assert got.dtype == torch.uint32
    expected = [[murmur3_x86_32(struct.pack("<QII", s, p, c)) for c in columns] for s, p in rows]
    assert got.tolist() == expected
    assert got.to(torch.float64).tolist() == expected  # the conversion that SGLang makes


def test_negative_seeds_wrap_like_the_cast_to_uint64() -> None:
    got = ops.murmur_hash32_cpu(torch.tensor([-1]), torch.tensor([3]), torch.tensor([4]))
    assert got.item() == murmur3_x86_32(struct.pack("<QII", 2**64 - 1, 3, 4))
