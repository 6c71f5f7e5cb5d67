"""Not provided on CPU; importable because SGLang imports names from here."""

from __future__ import annotations

from .absent import module_getattr

__getattr__ = module_getattr("mamba")
