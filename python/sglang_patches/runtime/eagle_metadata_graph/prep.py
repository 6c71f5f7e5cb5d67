"""What the preparation of each of a cycle's three forwards reads and writes, with upstream's triton backend (0.5.23).

Read: the lengths, rows and positions of the runner's buffers, ``req_to_token``, and for draft extend how many tokens
were accepted; all of them where they always are, and the kernels' grids follow from the batch's size alone. The sums of
lengths that a batch carries on the host decide nothing here: they only cut slices where a graph is captured, and where
a forward runs eager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import torch

# A name and the tensor.
Named = tuple[str, torch.Tensor]


class Kind(StrEnum):
    """Forwards of a cycle, by the names that eagle-verify-cuda-graph has for them."""

    VERIFY = "verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"


@dataclass(frozen=True)
class Prep:
    """Of one runner.

    Attributes:
        inputs: of a view: name, the tensor that is read, and the buffer whose begin it has to be.
        written: by batch size: the parts of buffers that mean something, once they are filled. Waits for the GPU.
    """

    inputs: Callable[[Any], list[tuple[str, torch.Tensor | None, torch.Tensor]]]
    written: Callable[[int], list[Named]]

    def moved(self, view: Any) -> str:
        """The first tensor of ``view`` that is not where the runner's buffers are, which a graph would read for ever;
        empty for none."""
        return next((name for name, tensor, buffer in self.inputs(view) if not starts(tensor, buffer)), "")


def starts(tensor: torch.Tensor | None, buffer: torch.Tensor) -> bool:
    """Whether ``tensor`` is the first rows of ``buffer``."""
    return (
        tensor is not None
        and tensor.data_ptr() == buffer.data_ptr()
        and tensor.dtype == buffer.dtype
        and tensor.stride() == buffer.stride()
        and tensor.shape[0] <= buffer.shape[0]
    )


def of(runner: Any, kind: Kind) -> Prep:
    """Of a runner whose backend `gate` has let through."""
    buffers = runner.buffers

    def rows(view: Any) -> list[tuple[str, torch.Tensor | None, torch.Tensor]]:
        return [(name, getattr(view, name), getattr(buffers, name)) for name in ("seq_lens", "req_pool_indices")]

    if kind is Kind.VERIFY:
        backend = runner.attn_backend
        return Prep(
            lambda view: [*rows(view), ("custom_mask", view.spec_info.custom_mask, backend.verify_mask.buffer)],
            lambda bs: [*_read_stream(backend, bs), ("mask_indptr", backend.mask_indptr[1 : bs + 1])],
        )
    if kind is Kind.DRAFT_EXTEND:
        extends = runner.draft_extend_attn_backend
        return Prep(
            lambda view: [
                *rows(view),
                ("extend_seq_lens", view.spec_info.extend_seq_lens_tensor, buffers.extend_seq_lens),
            ],
            lambda bs: _read_stream(extends, bs),
        )
    return Prep(
        lambda view: [*rows(view), ("positions", view.positions, buffers.positions)],
        lambda bs: _steps(runner.draft_attn_backend, bs),
    )


def _read_stream(backend: Any, bs: int) -> list[Named]:
    """Of a ``TritonAttnBackend``. Each first element of a ``kv_indptr`` and of ``mask_indptr`` is 0 from the start."""
    used = int(backend.kv_indptr[bs])
    return [
        ("qo_indptr", backend.qo_indptr[: bs + 1]),
        ("kv_indptr", backend.kv_indptr[1 : bs + 1]),
        ("kv_indices", backend.cuda_graph_kv_indices[:used]),
    ]


def _steps(backend: Any, bs: int) -> list[Named]:
    """Of a ``TritonMultiStepDraftBackend``, of all draft steps."""
    found: list[Named] = [("num_kv_splits", backend.attn_backends[-1].cuda_graph_num_kv_splits[:bs])]
    for step, used in enumerate(backend.kv_indptr[:, bs].tolist()):
        found.append((f"kv_indptr of step {step}", backend.kv_indptr[step, 1 : bs + 1]))
        found.append((f"kv_indices of step {step}", backend.cuda_graph_kv_indices[step, :used]))
    return found


def static_draft_view(runner: Any, forward_batch: Any, raw_bs: int, bs: int) -> SimpleNamespace:
    """What upstream passes to the draft's backend, its tensors those of the runner's buffers, padded or not."""
    buffers, tokens = runner.buffers, bs * runner.captured_req_width
    return SimpleNamespace(
        **vars(forward_batch)
        | {
            "seq_lens": buffers.seq_lens[:bs],
            "req_pool_indices": buffers.req_pool_indices[:bs],
            "positions": buffers.positions[:tokens],
            "out_cache_loc": buffers.out_cache_loc[: tokens * runner.speculative_num_steps],
        },
        num_padding=bs - raw_bs,
    )


def verify_reason(runner: Any, forward_batch: Any) -> str | None:
    """Why this batch's metadata is not what a graph of this runner gives; None if it is. Reads no value on the GPU.

    Upstream copies a batch's mask into the backend's, unless the mask is that one, where the drafts' tree was built.
    A slice of a batch (eagle-verify-cuda-graph) has a mask of its own.
    """
    spec_info, mask = forward_batch.spec_info, runner.attn_backend.verify_mask
    if spec_info is None or mask is None or spec_info.custom_mask is None:
        return "mask"
    given = spec_info.custom_mask
    if given is not mask.buffer and not (given.shape == mask.buffer.shape and starts(given, mask.buffer)):
        return "mask"
    return None if spec_info.num_tokens_per_req == runner.captured_req_width else "width"
