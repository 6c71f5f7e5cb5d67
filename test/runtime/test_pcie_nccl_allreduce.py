"""pcie-nccl-allreduce before workers start: what is set for which host, and where it is left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lane_table
import pytest
import torch
from nccl_hosts import EAGER, NCCL, PATCH, PCIE, REPO, arguments, forget, host
from sglang.srt.server_args import ServerArgs

from sglang_patches import lane
from sglang_patches.lane import newest
from sglang_patches.nccl import profile, topology
from sglang_patches.nccl.topology import Topology
from sglang_patches.runtime import _outcome, pcie_nccl_allreduce
from sglang_patches.runtime.pcie_nccl_allreduce import decision


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


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


def test_the_patch_gives_upstream_what_it_calls() -> None:
    patch_file = REPO / "patches" / lane_table.release() / f"{PATCH}.patch"
    called = set(re.findall(r"pcie_nccl_allreduce\.(\w+)", patch_file.read_text()))
    assert {"prepare", "before_communicators", "after_communicators"} <= called
    for name in called:
        assert callable(getattr(pcie_nccl_allreduce, name))
