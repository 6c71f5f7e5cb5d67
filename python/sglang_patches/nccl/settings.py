"""The environment that the server's workers get, and who set each NCCL variable in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_patches.nccl.profile import Profile, choose
from sglang_patches.nccl.topology import Topology

#: Upstream 0.5.23 sets these where they are unset (`entrypoints/engine.py`, `_set_envs_and_config`) ...
_UPSTREAM_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
#: ... and this one always.
_UPSTREAM_ALWAYS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


@dataclass(frozen=True)
class Settings:
    """An environment for ranks.

    Attributes:
        environment: all of it.
        by: NCCL variable -> who set it: "you", "upstream" or "profile NAME".
        profile: what the server would choose here.
    """

    environment: dict[str, str]
    by: dict[str, str]
    profile: Profile = field(default_factory=lambda: Profile("none"))

    def profile_document(self) -> dict[str, Any]:
        """The profile, JSON-able."""
        return {**asdict(self.profile), "environment": dict(self.profile.environment)}


def without_profile(environ: Mapping[str, str] | None = None) -> Settings:
    """What workers of an upstream server get: "NCCL as it comes"."""
    environment = dict(os.environ if environ is None else environ)
    by = {name: "you" for name in environment if name.startswith("NCCL_")}
    for name, value in _UPSTREAM_DEFAULTS.items():
        if name not in environment:
            environment[name], by[name] = value, "upstream"
    return Settings(environment | _UPSTREAM_ALWAYS, by)


def with_profile(topology: Topology, nccl_version: str | None, environ: Mapping[str, str] | None = None) -> Settings:
    """What workers get with patch pcie-nccl-allreduce: the chosen profile on top."""
    bare = without_profile(environ)
    profile = choose(topology, nccl_version, os.environ if environ is None else environ)
    mine = dict.fromkeys(profile.environment, f"profile {profile.name}")
    return Settings({**bare.environment, **profile.environment}, {**bare.by, **mine}, profile)
