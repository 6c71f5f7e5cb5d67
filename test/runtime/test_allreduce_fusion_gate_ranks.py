"""allreduce-fusion-gate: two real ranks come to one decision before upstream makes a workspace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import meet
from sglang.srt.layers import flashinfer_comm_fusion

from sglang_patches.nccl import topology
from sglang_patches.nccl.topology import Topology
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.allreduce_fusion_gate import captured, kernels, launch, ranks
from sglang_patches.runtime.allreduce_fusion_gate.decision import Verdict

HOSTS = Path(__file__).parents[1] / "nccl/topologies"
NVLINK = Topology.from_json((HOSTS / "nvlink-host.json").read_text())

RANK = """
import json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
rank, control_port = int(sys.argv[1]), int(sys.argv[2])
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import flashinfer_comm_fusion as fusion
from sglang.srt.runtime_context import get_context, get_device, get_exec, get_parallel
from sglang_patches.runtime import _agreement, _outcome
from sglang_patches.runtime.allreduce_fusion_gate import AllReduceFusionRefused, captured, ranks
from sglang_patches.runtime.allreduce_fusion_gate.decision import Verdict
_agreement._RANK_WAIT = timedelta(seconds=3)
control = dist.TCPStore("127.0.0.1", control_port, 2, rank == 0, timedelta(seconds=100))
fusion._flashinfer_comm = fusion._create_allreduce_fusion_workspace = object()
def entered(group, source_rank):
    raise RuntimeError("workspace creation was entered")
fusion.in_the_same_node_as = entered  # what upstream's initialize does first with other ranks
YES, NO = Verdict(True, "every pair has NVLink"), Verdict(False, "the pair a and b has no NVLink", "other GPUs")
for turn, behaviour in enumerate(sys.argv[3:]):
    asked = None if behaviour == "not asked" else "trtllm"
    if behaviour == "told differently" and rank == 1:
        asked = None
    store = dist.PrefixStore(str(turn), control)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _outcome._recorded.clear()
    ranks._Process.refused, captured._Expected.due = "", False
    said = {"rank": rank, "behaviour": behaviour, "error": "", "workspace": ""}
    overridden = get_context().override_server_args(flashinfer_allreduce_fusion_backend=asked)
    overridden.install()
    parallel_state.set_flashinfer_allreduce_only(asked is not None)
    mine = ranks.Place("one host", f"0000:0{rank}:00.0", 90, asked, behaviour == "asked for")
    refuses = {"one refuses": rank == 1, "both refuse": True, "asked for": rank == 1, "not asked": True}
    # What a rank is and sees is stood in for; that it meets, concludes and settles is not.
    ranks.here = lambda asked, explicit: mine
    ranks.judge = lambda rank, group, places: NO if refuses.get(behaviour) else YES
    world = SimpleNamespace(rank=rank, ranks=[0, 1])
    sizes = dict(tp_size=2, attn_tp_size=2, moe_tp_size=2)
    parallel = dict(tp_rank=rank, pp_rank=0, tp_group=world, world_group=world, **sizes)
    with get_parallel().override(**parallel), get_device().override(device="cuda"):
        try:
            if behaviour == "silent" and rank == 1:
                control.wait([f"done {turn} 0"])
            else:
                ranks.agree()
        except AllReduceFusionRefused as error:
            said["error"] = str(error)
        try:
            fusion.FlashInferWorkspaceManager().initialize(2, rank, 128, 64, cpu_group=dist.group.WORLD)
        except RuntimeError as error:
            said["workspace"] = str(error)
        said |= {
            "outcomes": _outcome.outcomes(), "backend": get_exec().comm.flashinfer_allreduce_fusion_backend,
            "enforced": get_exec().comm.enforce_disable_flashinfer_allreduce_fusion,
            "tags": parallel_state._ENABLE_FLASHINFER_ALLREDUCE_ONLY, "compares": captured._Expected.due,
        }
    print("SAID " + json.dumps(said), flush=True)
    overridden.restore()
    control.set(f"done {turn} {rank}", "")
    control.wait([f"done {turn} 0", f"done {turn} 1"])
    dist.destroy_process_group()
control.set(f"end {rank}", "")
if rank == 0:
    control.wait(["end 1"])
os._exit(0)
"""
BEHAVIOURS = ("both can", "one refuses", "both refuse", "told differently", "silent", "asked for", "not asked")


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, int], dict[str, Any]]:
    """Two gloo ranks meet once for each behaviour, with upstream's published configuration: what each says after it."""
    return meet(RANK, behaviours=BEHAVIOURS)[0]


def told(said: Any, behaviour: str) -> dict[str, Any]:
    """What rank 0 recorded; rank 1 records nothing."""
    assert "detail" not in said[behaviour, 1]["outcomes"].get("allreduce-fusion-gate", {})
    return dict(said[behaviour, 0]["outcomes"]["allreduce-fusion-gate"])


def test_the_fusion_stays_on_where_both_ranks_can(said: Any) -> None:
    for rank in (0, 1):
        entry = said["both can", rank]
        assert (entry["backend"], entry["enforced"], entry["tags"], entry["compares"]) == ("trtllm", False, True, True)
        assert entry["workspace"] == "workspace creation was entered"
    outcome = told(said, "both can")
    assert (outcome["result"], outcome["fusion"], outcome["sm"]) == ("not needed", "trtllm", 90)
    assert outcome["detail"] == "fused all-reduce is on (trtllm, chosen by upstream): every pair has NVLink"
    assert outcome["group"] == "2 ranks on 1 host(s)"


def test_a_fusion_whose_workspace_upstream_cannot_make_is_not_told_as_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """By upstream's own manager, where flashinfer's part is missing."""
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(ranks._Process, "refused", "")
    monkeypatch.setattr(flashinfer_comm_fusion, "_flashinfer_comm", None)
    flashinfer_comm_fusion.FlashInferWorkspaceManager().initialize(2, 0, 128, 64)
    assert _outcome.outcomes() == {}, "of a rank that decided nothing"
    launch.record("trtllm", "auto", Verdict(True, "every pair has NVLink"), False, "2 ranks", 90)
    assert _outcome.outcomes()[launch.PATCH]["fusion"] == "trtllm"
    flashinfer_comm_fusion.FlashInferWorkspaceManager().initialize(2, 0, 128, 64)
    outcome = _outcome.outcomes()[launch.PATCH]
    assert (outcome["result"], outcome["fusion"], outcome["asked"]) == ("failed", "off", "auto")
    assert "could not make a workspace" in outcome["detail"]


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        ("one refuses", "rank 1: the pair a and b has no NVLink"),
        ("both refuse", "(trtllm, chosen by upstream): the pair a and b has no NVLink"),
        ("told differently", "ranks were told different things (rank 0: trtllm; rank 1: off)"),
    ],
)
def test_if_one_cannot_it_is_off_on_both_and_no_workspace_is_made(said: Any, behaviour: str, why: str) -> None:
    for rank in (0, 1):
        entry = said[behaviour, rank]
        assert (entry["backend"], entry["enforced"], entry["tags"], entry["compares"]) == (None, True, False, False)
        assert (entry["workspace"], entry["error"]) == ("", "")
    outcome = told(said, behaviour)
    assert (outcome["result"], outcome["fusion"], outcome["asked"]) == ("applied", "off", "trtllm")
    assert why in outcome["detail"]
    assert outcome["remedy"]


def test_a_rank_that_takes_no_part_keeps_the_fusion_from_the_others(said: Any) -> None:
    assert said["silent", 0]["backend"] is None
    assert said["silent", 0]["workspace"] == ""
    assert "rank 1 did not take part" in said["silent", 0]["outcomes"]["allreduce-fusion-gate"]["detail"]
    assert (
        "patch allreduce-fusion-gate is off there?" in said["silent", 0]["outcomes"]["allreduce-fusion-gate"]["remedy"]
    )


def test_what_the_operator_asked_for_ends_the_start_on_every_rank(said: Any) -> None:
    for rank in (0, 1):
        assert (
            "--flashinfer-allreduce-fusion-backend trtllm cannot be done by 2 ranks on 1 host(s): "
            "rank 1: the pair a and b has no NVLink" in said["asked for", rank]["error"]
        )
        assert "other GPUs; or start without the option" in said["asked for", rank]["error"]


def test_a_model_that_makes_a_workspace_of_its_own_is_kept_from_it(said: Any) -> None:
    """Upstream's beam.py does, without the option; nothing is told, as nothing was asked."""
    for rank in (0, 1):
        assert said["not asked", rank]["workspace"] == ""
        assert "detail" not in said["not asked", rank]["outcomes"].get("allreduce-fusion-gate", {})


class Cuda:
    """Stands in for CUDA's view of a host: eight GPUs in NVLINK's order, this rank on the third."""

    blocked: tuple[int, ...] = ()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def properties(device: int) -> Any:
            bus = int(NVLINK.gpus[device].bus.split(":")[1], 16)
            return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other not in self.blocked)


@pytest.fixture
def rank_2_of_4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What rank 2 of a group on the first four GPUs of a host of eight says; each case changes one thing."""
    cuda = Cuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.process_model_config",
        lambda: SimpleNamespace(dtype=torch.bfloat16, hidden_size=7168),
    )

    def run(seen: Topology = NVLINK, asked: str | None = "auto", blocked: tuple[int, ...] = (), **mine: Any) -> Any:
        environments: list[Any] = []

        def read(environ: Any) -> Topology:
            environments.append(environ)
            return seen

        monkeypatch.setattr(topology, "read", read)
        cuda.blocked = blocked
        me = replace(ranks.here(asked, False), **mine)
        places = {rank: replace(me, bus=gpu.bus) for rank, gpu in enumerate(NVLINK.gpus)}
        verdict = ranks.judge(2, [0, 1, 2, 3], places)
        assert me.bus == NVLINK.gpus[2].bus
        assert "CUDA_VISIBLE_DEVICES" not in environments[0]
        return verdict

    return run


def test_a_rank_judges_the_gpus_really_used(rank_2_of_4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert rank_2_of_4().allowed
    far = {4, 5, 6, 7}
    islands = replace(NVLINK, links=tuple(replace(link, nvlink=not {link.a, link.b} & far) for link in NVLINK.links))
    assert rank_2_of_4(islands).allowed
    near = replace(NVLINK, links=tuple(replace(link, nvlink=(link.a, link.b) != (0, 1)) for link in NVLINK.links))
    assert "the pair 0000:19:00.0 and 0000:35:00.0" in rank_2_of_4(near).why
    other_host = Topology(tuple(replace(gpu, bus="") for gpu in NVLINK.gpus), NVLINK.links)
    assert "NVML lists no GPU at 0000:19:00.0" in rank_2_of_4(other_host).why


def test_a_rank_asks_cuda_for_peer_access_within_its_group_only(rank_2_of_4: Any) -> None:
    assert rank_2_of_4(blocked=(5,)).allowed
    verdict = rank_2_of_4(blocked=(1,))
    assert not verdict.allowed
    assert verdict.why == (
        f"CUDA gives the GPU at {NVLINK.gpus[2].bus} no access to the memory of the one at {NVLINK.gpus[1].bus}"
    )


def test_a_rank_asks_its_kernel_and_its_driver(rank_2_of_4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not compiled for SM 89" in rank_2_of_4(sm=89).why
    assert rank_2_of_4(sm=89, asked=None).allowed  # no kernel was asked for, so only the links count
    monkeypatch.setattr("flashinfer.comm.mnnvl.is_multicast_supported", lambda device: device != 2)
    assert "GPU 2 has no NVLink multicast" in rank_2_of_4(asked="mnnvl").why
    assert "GPU 2 has no NVLink multicast" in rank_2_of_4(sm=100).why
    assert rank_2_of_4(asked="trtllm").allowed
    assert kernels.device_lacks("mnnvl", 90, 0) == ""


def test_sums_that_are_parts_are_told_from_sums_in_another_order() -> None:
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(4, 8, 3 * 256, generator=generator)
    residual = 4 * torch.randn(8, 3 * 256, generator=generator)
    one = (residual + parts[0] + parts[1] + parts[2] + parts[3]).bfloat16().float()
    other = (
        parts[3].bfloat16() + parts[2].bfloat16() + parts[1].bfloat16() + parts[0].bfloat16()
    ) + residual.bfloat16()
    assert captured.differing(one, other.float()) < captured._TOLERATED / 2
    assert captured.differing(residual + parts[0], residual + parts[1]) > 2 * captured._TOLERATED
    assert captured.differing(one, one) == 0.0
    assert captured.differing(one * float("nan"), one * float("nan")) == 0.0


def test_a_model_that_is_compiled_is_not_compiled_anew_once_states_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(str(graph))
        return graph.forward

    pack = torch.compile(captured.compares_ranks(torch.Tensor.clone), fullgraph=True, backend=backend)
    for due in (True, False):
        monkeypatch.setattr(captured._Expected, "due", due)
        assert torch.equal(pack(torch.ones(2, 4)), torch.ones(2, 4))
    assert len(compiled) == 1


def test_states_that_are_alike_whatever_was_summed_are_not_taken_for_whole_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warm-up's: of token 0, whose embedding may be zero, or of a cache that was never written."""
    group = SimpleNamespace(world_size=2, cpu_group=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_group=group))

    def gather(all_ranks: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        all_ranks[0].copy_(mine)
        all_ranks[1].copy_(2 * mine)  # parts, unless they are zero

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    monkeypatch.setattr(captured._Expected, "due", True)
    monkeypatch.setattr(captured._Expected, "share", None)
    pack = captured.compares_ranks(torch.Tensor.clone)
    for states in (torch.zeros(4, 8), torch.full((4, 8), float("nan"))):
        pack(states)
        assert captured._Expected.due
        assert captured._Expected.share is None
    with pytest.raises(captured.PartialSumCaptured, match="100% of the elements of the first 4 tokens"):
        pack(torch.ones(4, 8))
