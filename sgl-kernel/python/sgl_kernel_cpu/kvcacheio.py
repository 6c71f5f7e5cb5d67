"""Moves rows of the KV cache."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .absent import module_getattr

__getattr__ = module_getattr("kvcacheio")


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every buffer, copy row ``src_loc[i]`` to row ``tgt_loc[i]``, reading all sources before writing.

    Sources and targets may overlap. If a target occurs twice, one of its sources wins.

    Args:
        data_ptrs: [buffers] uint64; address of each contiguous buffer (K and V of every layer). The caller vouches
            for them: they are not checked.
        strides: [buffers] int64; bytes per row (one token of one layer), equal to the bytes copied.
        tgt_loc, src_loc: [n] integer; row numbers (KV slots), at least 0.

    Raises:
        ValueError: different numbers of sources and targets, or a negative row.
    """
    src, tgt = src_loc.numpy(), tgt_loc.numpy()
    if src.shape != tgt.shape:
        raise ValueError(f"copy_all_layer_kv_cache_cpu: {src.size} source rows for {tgt.size} target rows")
    if not src.size:
        return
    if min(src.min(), tgt.min()) < 0:
        raise ValueError(f"copy_all_layer_kv_cache_cpu: negative row in src {src.tolist()} or tgt {tgt.tolist()}")
    rows = int(max(src.max(), tgt.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_char * (rows * row_bytes)).from_address(address)
        # One void item per row makes the gather and the scatter plain row copies.
        buffer = np.frombuffer(memory, dtype=np.dtype((np.void, row_bytes)))
        buffer[tgt] = buffer[src]
