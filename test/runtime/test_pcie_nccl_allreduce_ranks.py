"""pcie-nccl-allreduce in the workers: real ranks compare what they inherited, and go on or stop together."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from nccl_hosts import NCCL, PATCH, PCIE, arguments, forget
from ranks import meet

from sglang_patches.nccl import profile, topology
from sglang_patches.runtime.pcie_nccl_allreduce import decision, guard


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


RANK = """
import ctypes, json, os, sys
from datetime import timedelta
import torch.distributed as dist
rank, control_port, decided = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.distributed.parallel_state import init_model_parallel_group
from sglang_patches.runtime import _agreement, _outcome, pcie_nccl_allreduce
from sglang_patches.runtime.pcie_nccl_allreduce import agreement
_agreement._RANK_WAIT = timedelta(seconds=5)
control = dist.TCPStore("127.0.0.1", control_port, 2, rank == 0, timedelta(seconds=100))
def come_late():
    control.wait([f"done {turn} 0"])
class Communicator:
    disabled, broken = False, None
    def __init__(self, **named):
        if rank == self.broken:
            raise OSError("no channel")
        if behaviour == "ipc late" and rank == 1:
            come_late()
try:
    from sglang.srt.distributed.device_communicators import pcie_ipc_ar
    pcie_ipc_ar.PcieIpcCommunicator = Communicator
except ImportError:  # not in every lane
    pass
class Pynccl:
    def __init__(self, group, **named):
        if behaviour != "not made":
            self.graphs_only = pcie_nccl_allreduce.made_for_graphs(self, group)
            self.comm = object()
pynccl.PyNcclCommunicator = Pynccl
exchange = agreement.exchange
def exchange_late(*arguments):
    come_late()
    return exchange(*arguments)
def differ(behaviour):
    if behaviour == "os.environ":
        os.environ["NCCL_MIN_NCHANNELS"] = "8"
    if behaviour == "getenv":
        ctypes.CDLL(None).setenv(b"NCCL_MIN_NCHANNELS", b"4", 1)
    if behaviour == "own":
        os.environ["NCCL_PROTO"] = "LL"
    if behaviour == "without":
        del os.environ["SGLANG_PATCHES_NCCL_DECISION"]
for turn, behaviour in enumerate(sys.argv[4:]):
    original = dict(os.environ)
    os.environ.update({} if behaviour.startswith("ipc") else decided)
    if behaviour.startswith("ipc"):
        os.environ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "1"
        Communicator.broken = 1 if behaviour == "ipc broken" else None
    if behaviour == "library":
        os.environ["SGLANG_NCCL_SO_PATH"] = "/nowhere/libnccl.so.2"
    if rank == 1:
        differ(behaviour)
    if behaviour == "own both":
        os.environ["NCCL_PROTO"] = "LL"
    if behaviour == "file":
        # As NCCL does it, after os.environ was copied, once a communicator is made before this group's.
        ctypes.CDLL(None).setenv(b"NCCL_NTHREADS", b"128", 0)
        decision = json.loads(os.environ["SGLANG_PATCHES_NCCL_DECISION"])
        os.environ["SGLANG_PATCHES_NCCL_DECISION"] = json.dumps(decision | {"in_files": {"NCCL_NTHREADS": "128"}})
    agreement.exchange = exchange_late if behaviour == "late" and rank == 1 else exchange
    _outcome._recorded.clear()
    store = dist.PrefixStore(str(turn), control)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    said = {"rank": rank, "behaviour": behaviour, "error": ""}
    try:
        group = init_model_parallel_group([[0, 1]], rank, "gloo", True, False, group_name="tp")
        said |= {"outcomes": _outcome.outcomes(), "ipc": getattr(group, "pcie_ipc_comm", None) is not None}
    except agreement.NcclSettingsMismatch as error:
        said["error"] = str(error)
    print("SAID " + json.dumps(said), flush=True)
    control.set(f"done {turn} {rank}", "")
    control.wait([f"done {turn} 0", f"done {turn} 1"])
    dist.destroy_process_group()
    for name in set(os.environ) - set(original):
        del os.environ[name]
    os.environ.update(original)
    ctypes.CDLL(None).unsetenv(b"NCCL_NTHREADS")
control.set(f"end {rank}", "")
if rank == 0:
    control.wait(["end 1"])
os._exit(0)
"""
BEHAVIOURS = (
    "alike", "not made", "os.environ", "getenv", "own", "own both", "file", "library", "without", "late", "ipc",
    "ipc broken", "ipc late",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> dict[tuple[str, int], dict[str, Any]]:
    """Two real ranks make upstream's tensor-parallel group, once for each way in which rank 1 differs: what each says.

    They inherit the decision for two GPUs of a PCIe host.
    """
    environ: dict[str, str] = {profile.FOLDER: "/nowhere"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "read", lambda _environ: PCIE.subset([0, 1]))
        assert decision.prepare(arguments(tp_size=2), environ)
    said, outputs = meet(RANK, json.dumps(environ), behaviours=BEHAVIOURS)
    return said | {("output", rank): {"text": out} for rank, out in enumerate(outputs)}


def test_ranks_that_inherited_the_same_go_on_and_rank_0_tells(ranks: Any) -> None:
    assert ranks["alike", 0]["error"] == ranks["alike", 1]["error"] == ""
    outcome = ranks["alike", 0]["outcomes"][PATCH]
    assert outcome["result"] == "applied"
    assert outcome["environment"] == {"NCCL_MIN_NCHANNELS": "16"}
    assert outcome["nccl_version"] == NCCL
    assert "result" not in ranks["alike", 1]["outcomes"].get(PATCH, {})
    assert ranks["file", 0]["outcomes"][PATCH]["result"] == "applied"


def test_the_communicator_for_graphs_alone_is_told_and_counted_on_every_rank(ranks: Any) -> None:
    assert ranks["alike", 0]["outcomes"][PATCH]["graphs_only"] is True
    assert ranks["alike", 1]["outcomes"][PATCH].keys() == {*guard.Guard(None).figures()}  # counters, no result


def test_a_communicator_that_was_decided_and_not_made_is_told(ranks: Any) -> None:
    outcome = ranks["not made", 0]["outcomes"][PATCH]
    assert (outcome["result"], outcome["graphs_only"]) == ("failed", False)
    assert "no communicator is for graphs alone: upstream made no pynccl communicator" in outcome["detail"]


def test_settings_that_all_workers_got_alike_after_the_decision_stop_the_start(ranks: Any) -> None:
    for rank in (0, 1):
        for which in (0, 1):
            assert (
                f"rank {which} has NCCL_PROTO='LL' in the process, expected unset" in ranks["own both", rank]["error"]
            )


def test_a_rank_that_comes_when_the_others_gave_up_gives_up_too(ranks: Any) -> None:
    for rank in (0, 1):
        assert "rank 1 reported none" in ranks["late", rank]["error"]


def test_pcie_ipc_that_comes_late_on_one_rank_is_used_by_none(ranks: Any) -> None:
    assert [ranks["ipc late", rank]["ipc"] for rank in (0, 1)] == [False, False]
    assert "because rank 1 could not have its kernels (or not in time)" in ranks["output", 0]["text"]


def test_a_store_of_a_file_says_that_a_rank_did_not_come_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from sglang_patches.runtime import _agreement

    store = dist.FileStore(str(tmp_path / "store"), 2)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr(_agreement, "_RANK_WAIT", timedelta(seconds=1))
    assert _agreement.exchange("settings", "mine", 0, [0, 1]) == {0: "mine", 1: None}
    assert _agreement.first_verdict("settings", "", [0, 1]) == ""
    assert _agreement.first_verdict("settings", "late", [0, 1]) == ""


@pytest.mark.parametrize(
    ("behaviour", "named"),
    [
        ("os.environ", "rank 1 has NCCL_MIN_NCHANNELS='8' in os.environ, expected '16'"),
        ("getenv", "rank 1 has NCCL_MIN_NCHANNELS='4' in the process, expected '16'"),
        ("own", "rank 1 has NCCL_PROTO='LL' in the process, expected unset"),
        ("without", "rank 1 reported none"),
    ],
)
def test_a_rank_that_differs_stops_the_start_by_name(ranks: Any, behaviour: str, named: str) -> None:
    for rank in (0,) if behaviour == "without" else (0, 1):
        assert named in ranks[behaviour, rank]["error"]
        assert "rank 0 has" not in ranks[behaviour, rank]["error"]


def test_another_nccl_than_the_one_decided_for_is_named(ranks: Any) -> None:
    for rank in (0, 1):
        assert f"rank 0 has NCCL None, expected {NCCL}" in ranks["library", rank]["error"]


def test_pcie_ipc_is_on_all_ranks_or_on_none(ranks: Any) -> None:
    assert [ranks["ipc", rank]["ipc"] for rank in (0, 1)] == [True, True]
    assert [ranks["ipc broken", rank]["ipc"] for rank in (0, 1)] == [False, False]
    assert (
        ranks["output", 0]["text"].count("off on all ranks, because rank 1 could not have its kernels") == 2
    )  # "ipc late" too


def test_a_workspace_that_one_rank_cannot_build_is_used_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator

    from sglang_patches.runtime.pcie_nccl_allreduce import ipc

    assert hasattr(PcieIpcCommunicator.prepare, "__wrapped__")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    answers: dict[int, str | None] = {1: "yes"}
    asked: list[str] = []
    names: list[str] = []

    def exchange(name: str, mine: str, rank: int, ranks: list[int]) -> dict[int, str | None]:
        asked.append(mine)
        return {rank: mine, **answers}

    monkeypatch.setattr(ipc, "exchange", exchange)

    def first_verdict(name: str, mine: str, ranks: list[int]) -> str:
        names.append(name)
        return mine

    monkeypatch.setattr(ipc, "first_verdict", first_verdict)

    def fresh() -> Any:
        communicator = object.__new__(PcieIpcCommunicator)
        communicator.disabled, communicator._workspace, communicator._group = False, object(), object()
        return communicator

    built = fresh()
    built.prepare(hidden=64)
    built.prepare(hidden=64)
    assert not built.disabled
    assert asked == ["yes"]  # a draft model prepares again
    for answers[1] in ("no", None):
        other = fresh()
        other.prepare(hidden=64)
        assert other.disabled
    assert len(set(names)) == len(names) == 3  # no workspace is answered with another one's verdict
