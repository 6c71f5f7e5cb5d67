"""Puts the start-up file into editable installs, too; a wheel gets it from pyproject.toml."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StartUpFile(BuildHookInterface):
    """Hatchling build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Without this an editable install would carry copies of the patches and read those."""
        if version == "editable":
            build_data["force_include_editable"] = {"python/sglang_patches.pth": "sglang_patches.pth"}
