"""Patch ``constant-lookups``: what upstream's scheduler asks anew in each cycle though the answer is the same is kept.

`environment` keeps what variables mean, `models` what a model is, `ranges` leaves out profiler ranges that nobody
records, `fields` keeps the fields of a dataclass, and `device` the kind of the GPU. Each notices when its answer could
have changed and asks upstream again. Upstream reads its variables before torch is imported, so nothing here imports it
until a decorated function is.
"""

from __future__ import annotations

from sglang_patches.runtime.constant_lookups.device import keep_device_kind
from sglang_patches.runtime.constant_lookups.environment import keeps_meanings
from sglang_patches.runtime.constant_lookups.fields import with_kept_fields
from sglang_patches.runtime.constant_lookups.models import kept_by_model
from sglang_patches.runtime.constant_lookups.ranges import only_while_recorded

__all__ = ["keep_device_kind", "keeps_meanings", "kept_by_model", "only_while_recorded", "with_kept_fields"]
