"""Switchable patches on a pinned SGLang release.

This module stays empty: every interpreter of the environment imports it at start-up (see `activate`).
"""
