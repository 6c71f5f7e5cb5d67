"""Recorded hosts, and a server's arguments, as pcie-nccl-allreduce reads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_table
import pytest

from sglang_patches import lane
from sglang_patches.nccl.topology import Topology
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.pcie_nccl_allreduce import decision, guard

REPO = Path(__file__).parents[2]
HOSTS = REPO / "test/nccl/topologies"
PATCH = decision.PATCH


def host(name: str) -> Topology:
    return Topology.from_json((HOSTS / f"{name}.json").read_text())


PCIE = host("eight-on-two-sockets")
NCCL = lane_table.nccl()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has decided nothing yet."""
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(guard, "_guard", None)
    monkeypatch.setattr(guard, "_expected_group", None)


EAGER = dict(lane.here().eager_pynccl)


def arguments(**changed: Any) -> SimpleNamespace:
    """The resolved server arguments that are read, of ``--tp 8``."""
    values: dict[str, Any] = {
        "device": "cuda",
        "tp_size": 8,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "enable_deterministic_inference": False,
        "elastic_ep_backend": None,
        "use_ray": False,
    }
    return SimpleNamespace(**values | EAGER | changed)
