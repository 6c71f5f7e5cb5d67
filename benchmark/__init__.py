"""Measurements, and the small model they and the tests run on."""

from __future__ import annotations
