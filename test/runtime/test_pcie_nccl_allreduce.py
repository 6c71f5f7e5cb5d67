"""pcie-nccl-allreduce: what is set for which host, that every rank checks it, and NCCL's rules for graphs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_table
import pytest
import torch
from ranks import meet
from sglang.srt.server_args import ServerArgs

from sglang_patches import lane
from sglang_patches.lane import newest
from sglang_patches.nccl import profile, topology
from sglang_patches.nccl.topology import Topology
from sglang_patches.runtime import _outcome, pcie_nccl_allreduce
from sglang_patches.runtime.pcie_nccl_allreduce import decision, guard

REPO = Path(__file__).parents[2]
HOSTS = REPO / "test/nccl/topologies"
PATCH = decision.PATCH


def host(name: str) -> Topology:
    return Topology.from_json((HOSTS / f"{name}.json").read_text())


PCIE = host("eight-on-two-sockets")
NCCL = lane_table.nccl()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_upstream_has_every_argument_that_is_read_with_the_plain_values_assumed_here() -> None:
    real = lane.here().resolving(ServerArgs(model_path=str(REPO / "test/models/tiny-kimi"), device="cpu"))
    plain = vars(arguments(tp_size=1, device="cpu"))
    if lane_table.release() == "0.5.9":  # knows no workers of Ray's
        del plain["use_ray"]
    assert {name: getattr(real, name) for name in plain} == plain


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`prepare` on a recorded host: (decision, environment after it)."""

    def run(
        seen: Topology = PCIE, environ: dict[str, str] | None = None, **changed: Any
    ) -> tuple[decision.Decision | None, dict[str, str]]:
        variables = {profile.FOLDER: str(tmp_path), **(environ or {})}
        monkeypatch.setattr(topology, "read", lambda _environ: seen)
        return decision.prepare(arguments(**changed), variables), variables

    return run


def result() -> dict[str, Any]:
    return _outcome.outcomes()[PATCH]


@pytest.mark.parametrize(
    ("gpus", "name", "variables"), [(2, "two-gpus", {"NCCL_MIN_NCHANNELS": "16"}), (4, "default", {})]
)
def test_a_pcie_host_gets_a_built_in_before_workers_start(
    prepared: Any, gpus: int, name: str, variables: dict[str, str]
) -> None:
    made, environ = prepared(tp_size=gpus)
    assert {name: value for name, value in environ.items() if name.startswith("NCCL_")} == variables
    assert (made.profile, made.graphs_only, made.nccl_version) == (name, True, NCCL)
    assert decision.inherited(environ) == made
    assert _outcome.outcomes() == {}  # only a rank that read it back may say "applied"


@pytest.mark.parametrize(
    ("seen", "changed", "why"),
    [
        (host("nvlink-host"), {}, "every pair of the 8 GPUs has NVLink"),
        (host("no-gpu"), {"tp_size": 1}, "tensor parallel size is 1"),
        (host("no-gpu"), {"device": "cpu"}, "device is cpu"),
        (host("nvlink-host"), {"use_ray": True}, "every pair of the 8 GPUs has NVLink"),
        (PCIE, {"tp_size": 1}, "tensor parallel size is 1"),
        (PCIE, {"device": "cpu"}, "device is cpu"),
        (PCIE, {"nnodes": 2}, "2 nodes"),
        (PCIE, {"enable_deterministic_inference": True}, "deterministic inference"),
        (PCIE, {"elastic_ep_backend": "mooncake"}, "mooncake"),
    ],
)
def test_nothing_is_set_where_it_is_not_needed(prepared: Any, seen: Topology, changed: Any, why: str) -> None:
    made, environ = prepared(seen, **changed)
    assert made is None
    assert list(environ) == [profile.FOLDER]
    assert result()["result"] == "not needed"
    assert why in result()["detail"]


@pytest.mark.parametrize(
    ("seen", "changed", "why"),
    [
        (host("no-gpu"), {}, "NVML lists no GPU"),
        (host("nvml-missing"), {}, "NVML Shared Library Not Found"),
        (PCIE, {"use_ray": True}, "with --use-ray the workers are actors of Ray, which do not inherit it"),
    ],
)
def test_where_it_may_be_needed_and_cannot_be_done_it_has_failed(
    prepared: Any, seen: Topology, changed: Any, why: str
) -> None:
    made, environ = prepared(seen, **changed)
    assert made is None
    assert list(environ) == [profile.FOLDER]
    assert result()["result"] == "failed"
    assert why in result()["detail"]


def test_amds_gpus_are_no_concern_even_though_nvml_does_not_know_them(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert prepared(host("nvml-missing"))[0] is None
    assert (result()["result"], "ROCm 6.4" in result()["detail"]) == ("not needed", True)


def test_where_nvml_does_not_tell_of_nvlink_nothing_is_set_but_ranks_are_compared(prepared: Any) -> None:
    untold = replace(PCIE, links=tuple(replace(link, nvlink=None) for link in PCIE.links))
    made, environ = prepared(untold)
    assert not made.changes_something
    assert "NVML does not tell whether the 8 GPUs have NVLink" in made.why
    assert sorted(environ) == sorted([profile.FOLDER, decision.DECISION])


def test_only_the_gpus_of_the_server_count(prepared: Any) -> None:
    half_linked = replace(PCIE, links=tuple(replace(link, nvlink=link.a // 4 == link.b // 4) for link in PCIE.links))
    assert prepared(half_linked, tp_size=4, base_gpu_id=4)[0] is None
    assert prepared(half_linked, tp_size=4, pp_size=2)[0] is None
    assert prepared(half_linked, tp_size=4, base_gpu_id=2)[0] is not None
    assert prepared(half_linked, tp_size=4, gpu_id_step=2)[0] is not None
    first, second = half_linked.subset([0, 4]), half_linked.subset([1, 5])
    assert prepared(half_linked, tp_size=2, dp_size=2, gpu_id_step=4)[0] is None
    assert result()["result"] == "failed"
    assert "8 are visible" in result()["detail"]
    assert first.fingerprint() == second.fingerprint()


def test_what_the_operator_set_stays_and_is_checked_too(prepared: Any) -> None:
    made, environ = prepared(environ={"NCCL_PROTO": "LL"})
    assert "NCCL_MIN_NCHANNELS" not in environ
    assert made.expected == made.launcher == {"NCCL_PROTO": "LL"}
    assert not made.changes_something
    made, environ = prepared(environ={"NCCL_PROTO": "Simple", profile.SELECTION: "story"})
    assert environ["NCCL_PROTO"] == "Simple"
    assert environ["NCCL_NTHREADS"] == "512"
    with pytest.raises(profile.ProfileError, match="'stroy'"):
        prepared(environ={profile.SELECTION: "stroy"})


def test_a_second_engine_does_not_take_the_firsts_settings_for_the_operators(prepared: Any) -> None:
    made, environ = prepared()
    assert prepared(environ=environ)[0] == made
    _, environ = prepared(host("nvlink-host"), environ=environ)
    assert list(environ) == [profile.FOLDER]


def test_what_calls_the_communicator_outside_of_graphs_is_all_that_the_page_names() -> None:
    assert newest.Lane.eager_pynccl == {
        "enable_symm_mem": False,
        "enable_pdmux": False,
        "enable_torch_compile": False,
        "enable_kv_cache_sharding": False,
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
    }


@pytest.mark.parametrize(("name", "value"), [(name, True if plain is False else 2) for name, plain in EAGER.items()])
def test_where_upstream_calls_the_communicator_outside_of_graphs_it_is_left_alone(
    prepared: Any, name: str, value: Any
) -> None:
    made, environ = prepared(tp_size=2, **{name: value})
    assert not made.graphs_only
    assert made.graphs_only_why.startswith(f"{name}={value}")
    assert environ["NCCL_MIN_NCHANNELS"] == "16"


def tuned() -> profile.Profile:
    return profile.Profile(
        "tuned-here",
        {"NCCL_PROTO": "LL128"},
        fingerprint=PCIE.fingerprint(),
        nccl_version="2.30.7",
        crossovers={profile.PCIE_IPC: profile.Crossover(rows=8, size_bytes=8 * 7168 * 2)},
    )


def test_a_tuned_profile_turns_pcie_ipc_on_up_to_its_crossover(prepared: Any, tmp_path: Path) -> None:
    profile.save(tuned(), tmp_path)
    made, environ = prepared()
    assert made.profile == "tuned-here"
    assert (environ[decision.IPC_SWITCH], environ[decision.IPC_LIMIT]) == ("1", str(8 * 7168))
    made, environ = prepared(environ={decision.IPC_SWITCH: "0"})
    assert environ[decision.IPC_SWITCH] == "0"
    assert decision.IPC_LIMIT not in environ
    assert made.kept == {decision.IPC_SWITCH: "0"}


def test_without_a_tuned_profile_pcie_ipc_is_upstreams_own_matter(prepared: Any) -> None:
    assert decision.IPC_SWITCH not in prepared()[1]


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


def test_the_patch_gives_upstream_what_it_calls() -> None:
    patch_file = REPO / "patches" / lane_table.release() / f"{PATCH}.patch"
    called = set(re.findall(r"pcie_nccl_allreduce\.(\w+)", patch_file.read_text()))
    assert {"prepare", "before_communicators", "after_communicators"} <= called
    for name in called:
        assert callable(getattr(pcie_nccl_allreduce, name))
