"""allreduce-fusion-gate: which group of GPUs may fuse, asked of recorded hosts and of flashinfer's own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.layers import flashinfer_comm_fusion
from sglang.srt.layers.layer_boundary.residual import add_norm
from sglang.srt.runtime_context import get_context, get_parallel, override_platform
from sglang.srt.server_args import ServerArgs

from sglang_patches.nccl import topology
from sglang_patches.nccl.topology import Topology
from sglang_patches.runtime import _outcome, allreduce_fusion_gate
from sglang_patches.runtime.allreduce_fusion_gate import AllReduceFusionRefused, kernels, launch
from sglang_patches.runtime.allreduce_fusion_gate.decision import Problem, decide

REPO = Path(__file__).parents[2]
HOSTS = REPO / "test/nccl/topologies"
KIMI = Problem("auto", 90, 8, torch.bfloat16, 7168)


def host(name: str, gpus: int | None = None) -> Topology:
    recorded = Topology.from_json((HOSTS / f"{name}.json").read_text())
    return recorded if gpus is None else recorded.subset(range(gpus))


NVLINK = host("nvlink-host")
NO_PEER_ACCESS = replace(NVLINK, links=tuple(replace(link, read=False, write=False) for link in NVLINK.links))
ONE_LINK_MISSING = replace(NVLINK, links=(*NVLINK.links[:-1], replace(NVLINK.links[-1], nvlink=False)))
UNTOLD = replace(NVLINK, links=tuple(replace(link, nvlink=None, read=False, write=False) for link in NVLINK.links))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})


def anything(_: Problem) -> str:
    return ""


def never_asked(problem: Problem) -> str:
    raise AssertionError(f"the kernel was asked about {problem}, though the links already rule it out")


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("group", "why"),
    [
        (host("eight-on-two-sockets"), "the pair 0000:19:00.0 and 0000:35:00.0 (PCIe level NODE) has no NVLink"),
        (host("two-switch-islands-of-four"), "the pair 0000:19:00.0 and 0000:35:00.0 (PCIe level PXB) has no NVLink"),
        (host("two-gpus"), "the pair 0000:19:00.0 and 0000:35:00.0 (PCIe level PHB) has no NVLink"),
        (ONE_LINK_MISSING, "has no NVLink"),
        (NO_PEER_ACCESS, "has NVLink but no peer access"),
        (replace(NVLINK, peer_access_off=True), "peer access is switched off in the environment"),
    ],
)
def test_no_kernel_runs_on_a_group_without_full_nvlink_or_peer_access(
    group: Topology, why: str, sm: int, explicit: bool
) -> None:
    verdict = decide(replace(KIMI, sm=sm, world_size=len(group.gpus)), group, explicit, never_asked)
    assert not verdict.allowed
    assert verdict.known
    assert why in verdict.why
    assert verdict.remedy


@pytest.mark.parametrize("group", [UNTOLD, host("no-gpu"), host("nvml-missing")])
def test_where_the_links_are_not_told_only_the_operators_word_counts(group: Topology) -> None:
    guessed = decide(KIMI, group, False, anything)
    assert (guessed.allowed, guessed.known) == (False, False)
    asked = decide(KIMI, group, True, anything)
    assert (asked.allowed, asked.known) == (True, False)
    assert "the operator asked for it" in asked.why
    assert not decide(KIMI, group, True, lambda _: "no kernel").allowed


# By SM and tensor parallel size: what "auto" runs on a group with full NVLink, or why nothing does.
NOT_COMPILED = "the trtllm kernel of fused all-reduce is not compiled for SM {} GPUs (it is for SM 9x, SM 10x, SM 12x)"
KERNELS = {
    (80, 8): NOT_COMPILED.format(80),
    (89, 8): NOT_COMPILED.format(89),
    (90, 8): "",
    (90, 2): "",
    (90, 6): "the trtllm kernel of fused all-reduce is for 2, 4, 8, 16 ranks, this group has 6",
    (100, 8): "",
    (100, 6): "",
    (103, 4): "",
    (120, 8): "",
    (120, 3): "the trtllm kernel of fused all-reduce is for 2, 4, 8, 16 ranks, this group has 3",
}


@pytest.mark.parametrize(("sm", "ranks"), KERNELS)
def test_with_full_nvlink_the_kernel_decides(sm: int, ranks: int) -> None:
    verdict = decide(replace(KIMI, sm=sm, world_size=ranks), host("nvlink-host", ranks), False, kernels.supports)
    expected = KERNELS[sm, ranks]
    assert (verdict.allowed, verdict.why) == (not expected, expected or "every pair has NVLink and peer access")


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (replace(KIMI, dtype=torch.float32), ""),
        (replace(KIMI, dtype=torch.float16, hidden=7176), ""),
        (replace(KIMI, dtype=torch.float8_e4m3fn), "takes float16, bfloat16 and float32, not float8_e4m3fn"),
        (replace(KIMI, hidden=7164), "rows of 7164 bfloat16 are no multiple of that"),
        (replace(KIMI, nodes=2), "is for one host, this group spans 2"),
        (replace(KIMI, sm=100, world_size=16, nodes=2), ""),
        (replace(KIMI, backend="mnnvl"), ""),
        (replace(KIMI, backend="mnnvl", nodes=2), "spans 2 hosts with SM 10x GPUs only, these are SM 90"),
        (replace(KIMI, backend="mnnvl", sm=120), "the mnnvl kernel of fused all-reduce is not compiled for SM 120"),
        (replace(KIMI, backend="mnnvl", sm=100, world_size=72), "is for 2 to 64 ranks, this group has 72"),
        (
            replace(KIMI, backend="cutedsl"),
            "the cutedsl kernel of fused all-reduce is for SM 10x GPUs, these are SM 90",
        ),
        (replace(KIMI, backend="cutedsl", sm=100), ""),
        (replace(KIMI, backend="cutedsl", sm=100, world_size=6), "is for 2, 4, 8, 16 ranks, this group has 6"),
        (replace(KIMI, backend="cutedsl", sm=100, dtype=torch.float16), "takes bfloat16, not float16"),
        (replace(KIMI, backend="new"), "the new kernel of fused all-reduce is not known to this patch"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value.backend}-{value.sm}-{value.dtype}-{value.hidden}",
)
def test_what_each_kernel_can_do(problem: Problem, why: str) -> None:
    assert why in kernels.supports(problem)
    assert bool(why) == bool(kernels.supports(problem))


def test_flashinfer_itself_says_what_its_kernels_are_compiled_for() -> None:
    """And is left as it was: its real generator still looks at this machine's GPUs, of which there are none."""
    from flashinfer.jit import comm

    assert kernels.compiled_for("trtllm") == (9, 10, 12)
    assert kernels.compiled_for("mnnvl") == (9, 10)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="No supported CUDA architectures"):
            comm.gen_trtllm_comm_module()


def test_without_flashinfers_word_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled_for", lambda backend: None)
    assert "flashinfer does not tell for which GPUs" in kernels.supports(KIMI)


@pytest.mark.parametrize(
    ("capability", "kernel"), [((8, 0), False), ((8, 9), False), ((9, 0), False), ((10, 0), False), ((12, 0), True)]
)
def test_only_sm_12_gains_over_upstream(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernel: bool
) -> None:
    """Upstream's own constant and `_resolve_backend` stand for SM 9x and 10x; below 9 there is no kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    kernels._beyond_upstream.cache_clear()
    upstream = flashinfer_comm_fusion._resolve_backend.__wrapped__  # type: ignore[attr-defined]

    def outcome(resolve: Any, *arguments: Any) -> str:
        try:
            return str(resolve(*arguments))
        except ValueError as error:
            return str(error)

    try:
        with override_platform(is_sm90=capability[0] == 9, is_sm100=capability[0] == 10):
            assert kernels.runs_where_compiled(False) is kernel
            assert kernels.runs_where_compiled(True) is True
            for arguments in [("auto", False), ("trtllm", False), ("trtllm", True), ("mnnvl", False), ("auto", True)]:
                seen = outcome(flashinfer_comm_fusion._resolve_backend, *arguments)
                if kernel and arguments in [("auto", False), ("trtllm", False)]:
                    assert seen == "trtllm"
                else:
                    assert seen == outcome(upstream, *arguments)
    finally:
        kernels._beyond_upstream.cache_clear()


def test_upstreams_fused_path_opens_with_that_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_norm, "_is_flashinfer_available", True)
    with get_context().override_server_args(flashinfer_allreduce_fusion_backend="trtllm"):
        assert not add_norm.flashinfer_ar_fusion_applies(1)
        monkeypatch.setattr(add_norm, "_is_sm90_supported", True)
        assert add_norm.flashinfer_ar_fusion_applies(1)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`before_workers` with upstream's real, resolved arguments of a Hopper host: the view of them afterwards."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def run(seen: Topology, again: bool = False, **options: Any) -> Any:
        monkeypatch.setattr(topology, "read", lambda environ: seen)
        arguments = ServerArgs(
            model_path=str(REPO / "test/models/tiny-kimi"),
            attention_backend="torch_native",
            sampling_backend="pytorch",
            **{"tp_size": 2, "dtype": "bfloat16", **options, "device": "cpu"},
        )
        with override_platform(is_sm90=True):
            arguments.resolve_once()
        # Upstream resolves nothing for CUDA on a machine without it.
        declare_resolution(arguments, "test", device=options.get("device", "cuda"))
        for _ in range(1 + again):
            allreduce_fusion_gate.before_workers(arguments)
        return resolving_view(arguments)

    return run


def told() -> dict[str, Any]:
    return _outcome.outcomes()[launch.PATCH]


def test_what_upstream_chose_is_switched_off_before_workers_start(start: Any) -> None:
    for seen in (host("two-gpus"), replace(NVLINK, peer_access_off=True), host("nvml-missing"), UNTOLD):
        cfg = start(seen)
        assert cfg.flashinfer_allreduce_fusion_backend is None
        assert cfg.enforce_disable_flashinfer_allreduce_fusion
        assert (told()["fusion"], told()["asked"], told()["explicit"], told()["sm"]) == ("off", "auto", False, 90)
        assert told()["result"] == ("failed" if seen.absent or seen is UNTOLD else "applied")
    start(host("two-gpus"))
    assert told()["detail"] == (
        "fused all-reduce is off (auto, chosen by upstream): the pair 0000:19:00.0 and 0000:35:00.0 (PCIe level PHB) "
        "has no NVLink"
    )
    assert "2x NVIDIA GeForce RTX 4090, PHB, NVLink on 0 and peer access on 0 of 1 pairs" in told()["group"]


def test_an_engine_that_starts_again_with_the_same_arguments_tells_the_same(start: Any) -> None:
    cfg = start(host("two-gpus"), again=True)
    assert cfg.flashinfer_allreduce_fusion_backend is None
    assert (told()["result"], told()["asked"]) == ("applied", "auto")


def test_what_upstream_chose_stays_on_a_group_that_can(start: Any) -> None:
    cfg = start(NVLINK)
    assert cfg.flashinfer_allreduce_fusion_backend == "auto"
    assert not cfg.enforce_disable_flashinfer_allreduce_fusion
    assert launch.PATCH not in _outcome.outcomes()  # the ranks tell, once they have read it back


def test_only_the_gpus_of_the_group_count(start: Any) -> None:
    two_pairs = Topology(
        NVLINK.gpus[:4],
        tuple(replace(link, nvlink={link.a, link.b} in ({0, 1}, {2, 3})) for link in host("nvlink-host", 4).links),
    )
    assert start(two_pairs).flashinfer_allreduce_fusion_backend == "auto"
    assert start(two_pairs, base_gpu_id=1).flashinfer_allreduce_fusion_backend is None
    assert "GPUs 1, 2 (2x NVIDIA H200" in told()["group"]
    assert start(two_pairs, tp_size=4).flashinfer_allreduce_fusion_backend is None
    assert start(two_pairs, dp_size=2).flashinfer_allreduce_fusion_backend == "auto"
    # Replicas inherit one set of arguments: one whose GPUs cannot decides for all.
    lone = replace(two_pairs, links=tuple(replace(link, nvlink={link.a, link.b} == {0, 1}) for link in two_pairs.links))
    assert start(lone).flashinfer_allreduce_fusion_backend == "auto"
    assert start(lone, dp_size=2).flashinfer_allreduce_fusion_backend is None
    assert "GPUs 2, 3 (2x NVIDIA H200" in told()["group"]


@pytest.mark.parametrize(
    "option", [{"flashinfer_allreduce_fusion_backend": "trtllm"}, {"enable_flashinfer_allreduce_fusion": True}]
)
def test_what_the_operator_asked_for_is_refused_with_group_link_and_remedy(start: Any, option: dict[str, Any]) -> None:
    with pytest.raises(AllReduceFusionRefused) as refused:
        start(host("two-gpus"), **option)
    for part in (
        "GPUs 0, 1 (2x NVIDIA GeForce RTX 4090",
        "the pair 0000:19:00.0 and 0000:35:00.0 (PCIe level PHB) has no NVLink",
        "choose GPUs that all have NVLink to each other; or start without the option",
    ):
        assert part in str(refused.value)
    assert start(NVLINK, **option).flashinfer_allreduce_fusion_backend is not None
    assert start(UNTOLD, **option).flashinfer_allreduce_fusion_backend is not None


@pytest.mark.parametrize(
    ("options", "stays", "reason"),
    [
        ({"tp_size": 1}, None, "upstream does not choose it for this model, GPU and parallelism"),
        ({"tp_size": 1, "flashinfer_allreduce_fusion_backend": "auto"}, "auto", "tensor parallel size is 1"),
        ({"enforce_disable_flashinfer_allreduce_fusion": True}, None, "--enforce-disable-flashinfer-allreduce-fusion"),
        ({"enable_aiter_allreduce_fusion": True, "tp_size": 1}, None, "fused all-reduce is aiter's (AMD)"),
        ({"device": "cpu"}, "auto", "is for NVIDIA GPUs, and the device is cpu"),
    ],
)
def test_what_does_not_concern_it_is_left_alone(
    start: Any, options: dict[str, Any], stays: str | None, reason: str
) -> None:
    assert start(host("two-gpus"), **options).flashinfer_allreduce_fusion_backend == stays
    assert told()["result"] == "not needed"
    assert reason in told()["detail"]


@pytest.mark.parametrize("elsewhere", [{"nnodes": 2, "dist_init_addr": "127.0.0.1:20000"}, {"use_ray": True}])
def test_gpus_that_this_process_does_not_see_are_left_to_the_ranks(start: Any, elsewhere: dict[str, Any]) -> None:
    options = {"flashinfer_allreduce_fusion_backend": "trtllm", **elsewhere}
    assert start(host("two-gpus"), **options).flashinfer_allreduce_fusion_backend == "trtllm"
    assert launch.PATCH not in _outcome.outcomes()


def test_ranks_agree_when_groups_are_made_and_before_upstream_marks_them_for_the_fusion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.distributed import bootstrap

    order: list[str] = []
    steps = ("init_distributed_environment", "initialize_model_parallel", "_tag_groups_for_flashinfer_allreduce_only")
    for step in (*steps, "initialize_dp_attention"):
        monkeypatch.setattr(bootstrap, step, lambda *_, _step=step, **__: order.append(_step))
    monkeypatch.setattr(allreduce_fusion_gate, "agree", lambda: order.append("agree"))
    with get_context().override_server_args() as arguments, get_parallel().override(tp_rank=0, pp_rank=0):
        bootstrap._init_parallel_groups(backend="gloo", dist_init_method="", server_args=arguments, gpu_id=0)
    assert order[:4] == [*steps[:2], "agree", steps[2]]


def test_upstream_asks_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.entrypoints import engine

    class Seen(Exception):
        pass

    def seen(server_args: Any) -> None:
        raise Seen(server_args.model_path)

    monkeypatch.setattr(allreduce_fusion_gate, "before_workers", seen)
    with pytest.raises(Seen, match="tiny-kimi"):
        engine._set_envs_and_config(ServerArgs(model_path=str(REPO / "test/models/tiny-kimi"), device="cpu"))
