"""What a test finds must not depend on the shell that starts it: the variables that steer the server and this project
are taken out of the environment before anything reads them."""

from __future__ import annotations

import os

# By prefix. Where a checkout's patches and its cache are is no behaviour, so these two stay.
_STEERING = (
    "SGLANG_",
    "SGL_",
    "NCCL_",
    "OMP_",
    "MKL_NUM",
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "PYTHONDONTWRITEBYTECODE",
)
_PLACES = ("SGLANG_PATCHES_CACHE", "SGLANG_PATCHES_DIR")

for _name in list(os.environ):
    if _name.startswith(_STEERING) and _name not in _PLACES:
        del os.environ[_name]
