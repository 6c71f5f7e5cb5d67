"""Which kind of GPU a process computes on is known once CUDA runs in it; torch looks for it at each use of a stream."""

from __future__ import annotations

import functools


def keep_device_kind() -> None:
    """Let torch find the index of the current device without looking for the kind of device first.

    ``torch.cuda.current_stream()``, and so each event that is recorded and each ``with`` of a stream, looks whether
    there is an NVIDIA GPU at all, by way of an environment variable and a call of the CUDA runtime. Where CUDA is
    initialized there is one. Before, after a fork and on any other device the look is torch's own. Safe to call again.
    """
    import torch
    from torch import _utils

    looked = _utils._get_current_device_index
    if getattr(looked, "_keeps_kind", False):
        return

    @functools.wraps(looked)
    def current() -> int:
        if torch.cuda.is_initialized():
            return torch.cuda.current_device()
        return looked()  # type: ignore[no-any-return, no-untyped-call]

    current._keeps_kind = True  # type: ignore[attr-defined]
    _utils._get_current_device_index = current
