"""MurmurHash3 (32 bit) of (seed, position, column): the random numbers of requests that set a seed."""

from __future__ import annotations

import numpy as np
import torch

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_MULTIPLIER, _OFFSET = np.uint32(5), np.uint32(0xE6546B64)
_FINAL1, _FINAL2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_KEY_BYTES = np.uint32(16)  # two words of seed, one of position, one of column


def _rotate_left(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _scramble(block: np.ndarray) -> np.ndarray:
    return _rotate_left(block * _C1, 15) * _C2


def _absorb(state: np.ndarray, scrambled: np.ndarray) -> np.ndarray:
    h = _rotate_left(state ^ scrambled, 13)
    h *= _MULTIPLIER
    h += _OFFSET
    return h


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash every (row, column) pair with MurmurHash3_x86_32, hash seed 0.

    The 16-byte key is the 64-bit ``seed[i]`` (low word first), the low 32 bits of ``positions[i]`` and the low 32
    bits of ``col_indices[j]``.

    Args:
        seed: [n], any integer dtype; one seed per request.
        positions: [n], any integer dtype; position in the sequence, in tokens.
        col_indices: [m], any integer dtype; for example the token ids of the vocabulary.

    Returns:
        [n, m] uint32.

    Source: A. Appleby, MurmurHash3 (public domain); upstream's Triton kernel ``murmur_hash32_kernel`` for the key.
    """
    seeds = seed.numpy().astype(np.uint64)
    h = _absorb(np.zeros(seeds.shape, np.uint32), _scramble(seeds.astype(np.uint32)))
    h = _absorb(h, _scramble((seeds >> np.uint64(32)).astype(np.uint32)))
    h = _absorb(h, _scramble(positions.numpy().astype(np.uint32)))
    out = _absorb(h[:, None], _scramble(col_indices.numpy().astype(np.uint32)))
    # In place from here: the matrix is as wide as the vocabulary.
    out ^= _KEY_BYTES
    out ^= out >> np.uint32(16)
    out *= _FINAL1
    out ^= out >> np.uint32(13)
    out *= _FINAL2
    out ^= out >> np.uint32(16)
    return torch.from_numpy(out)
