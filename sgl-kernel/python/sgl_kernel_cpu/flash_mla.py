"""Not provided on CPU; importable because an attention backend of SGLang 0.5.17 imports names from here."""

from __future__ import annotations

from .absent import module_getattr

__getattr__ = module_getattr("flash_mla")
