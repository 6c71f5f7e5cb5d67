"""Each check on recorded hosts: where it fires, what it then says, and that it is quiet where nothing is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sglang_patches.doctor.checks import CHECKS, examine
from sglang_patches.doctor.checks.gpus import positions
from sglang_patches.doctor.checks.process import nccl_shared_memory
from sglang_patches.doctor.checks.serving import a_rank
from sglang_patches.doctor.checks.software import runs_on
from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host, Kernels, Library, Model, Patch, Serving

from .conftest import HEALTHY, NAMES, recorded

GIB = 1 << 30


def fired(host: Host, check: str) -> list[Finding]:
    return [finding for finding in examine(host) if finding.check == check and finding.level != "ok"]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_hosts_have_no_complaints(name: str) -> None:
    found = [finding for finding in examine(recorded(name)) if finding.level != "ok"]
    assert [(finding.check, finding.level) for finding in found] == ([("driver", "note")] if name == "no-gpu" else [])


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_is_whole(name: str) -> None:
    host = recorded(name)
    assert all(list(check(host)) for check in CHECKS), "a check said nothing at all"
    for finding in examine(host):
        assert finding.seen
        if finding.level != "ok":
            assert re.search(r"\d", finding.why), f"no number in {finding}"
            assert finding.do, finding


def test_nothing_recorded_is_no_reason_to_crash() -> None:
    assert {finding.check for finding in examine(Host())} >= {"driver", "memory", "port"}
    assert examine(replace(recorded("eight-pcie"), gpus=()))


def serving(**changes: Any) -> Callable[[Host], Host]:
    return lambda host: replace(host, serving=replace(host.serving, **changes))


def host(**changes: Any) -> Callable[[Host], Host]:
    return lambda old: replace(old, **changes)


def as_it_is(old: Host) -> Host:
    return old


def mixed(old: Host) -> Host:
    gpus = old.topology.gpus
    return replace(old, topology=replace(old.topology, gpus=(*gpus[:7], replace(gpus[7], name="NVIDIA L40S"))))


def gpu(position: int, slot: dict[str, Any] | None = None, **changes: Any) -> Callable[[Host], Host]:
    def change(old: Host) -> Host:
        gpus, slots = list(old.gpus), list(old.topology.gpus)
        gpus[position] = replace(gpus[position], **changes)
        slots[position] = replace(slots[position], **(slot or {}))
        return replace(old, gpus=tuple(gpus), topology=replace(old.topology, gpus=tuple(slots)))

    return change


# (recorded host, what is changed on it, check, level, words that the finding must have)
FIRES = [
    ("old-software", as_it_is, "driver", "failure", ["550.54.15", "13.0", "580"]),
    ("nvml-missing", as_it_is, "driver", "failure", ["Driver/library version mismatch", "nvidia-smi"]),
    ("no-gpu", as_it_is, "driver", "note", ["on the CPU", "87 tok/s"]),
    ("eight-pcie", host(torch_cuda=""), "driver", "failure", ["without CUDA", "8 GPUs"]),
    ("nvlink", host(cuda_problem="Error 802: system not yet initialized"), "driver", "failure", ["fabricmanager"]),
    ("eight-pcie", host(driver_cuda=None), "driver", "warning", ["not compared"]),
    ("eight-pcie", serving(tp=16), "GPUs", "failure", ["8 visible", "8 of 16 ranks", "--tp 8"]),
    ("no-gpu", serving(tp=2), "GPUs", "failure", ["0 visible", "--tp 1 (a small model on the CPU)"]),
    ("no-gpu", serving(tp=8), "driver", "note", ["--tp 8 asks for 8", "nothing is served", "--tp 1"]),
    ("eight-pcie", serving(tp=4, base_gpu=6), "GPUs", "failure",
     ["8 visible", "--base-gpu-id 6", "2 of 4 ranks", "the last rank takes GPU 9"]),
    ("eight-pcie", serving(tp=2, base_gpu=8), "GPUs", "failure", ["2 of 2 ranks"]),
    ("eight-pcie", mixed, "GPUs", "warning", ["7x NVIDIA RTX PRO 6000", "1x NVIDIA L40S", "PCI_BUS_ID"]),
    # 61 layers x 2 calls x (24.8 - 19.5) and (68.2 - 24.9) us
    ("eight-pcie-iommu", as_it_is, "peer access", "warning",
     ["28 (0-1, 0-2", "chipset not supported", "IOMMU translates", "ForceP2P",
      "122 calls", "0.6 to 5.3 ms", "iommu=pt"]),
    ("container-small-shm", as_it_is, "peer access", "warning", ["GPU not supported", "(docker)", "on the host"]),
    ("switches-with-acs", as_it_is, "peer access", "warning", ["ACS", "0000:16:00.0", "setpci"]),
    ("eight-pcie", host(iommu="translated"), "peer access", "warning", ["allowed on all 28", "iommu=pt"]),
    ("degraded-link", as_it_is, "PCIe link", "warning", ["GPU 3 x8 of x16", "32 of 63 GB/s", "6.5 ms in place of 3.3"]),
    ("degraded-link", as_it_is, "PCIe link", "warning", ["GPU 5 generation 3 of 5", "13.0 ms in place of 3.3"]),
    # A slot of generation 4 under a GPU that idles at generation 1: it will serve at 4.
    ("eight-pcie", gpu(2, {"pcie_generation": 4}), "PCIe link", "warning",
     ["GPU 2 generation 4 of 5", "32 of 63 GB/s"]),
    ("eight-pcie", gpu(2, performance_state=2, generation=4), "PCIe link", "warning", ["GPU 2 generation 4 of 5"]),
    ("eight-pcie", gpu(2, performance_state=0, generation=4, width=8, own_width=8, slot={"pcie_width": 8}),
     "PCIe link", "warning", ["GPU 2 generation 4 of 5", "16 of 32 GB/s"]),
    ("eight-pcie", gpu(2, {"pcie_width": 8}, width=8), "PCIe link", "warning", ["GPU 2 x8 of x16"]),
    ("eight-pcie", host(gpus=()), "PCIe link", "note", ["could not be read"]),
    ("old-software", as_it_is, "NUMA", "warning", ["node 0 only", "4, 5, 6, 7", "4 of 8 ranks"]),
    ("old-software", as_it_is, "NUMA", "warning", ["balancing", "numa_balancing=0"]),
    ("old-software", as_it_is, "versions", "warning", ["0.6.3 (pinned 0.7.2)", "pip install flashinfer-python==0.7.2"]),
    ("eight-pcie", host(installed={"sglang": "0.5.23"}), "versions", "failure", ["torch missing"]),
    ("old-software", as_it_is, "NCCL", "warning", ["loaded 2 times", "unset LD_LIBRARY_PATH"]),
    ("old-software", as_it_is, "NCCL", "warning", ["2.27.5 is loaded", "2.30.7", "before 2.29", "11.0 us"]),
    ("eight-pcie", host(nccl=()), "NCCL", "failure", ["8 ranks"]),
    ("old-software", as_it_is, "sgl_kernel", "failure", ["SM 80, 89, 90, 100", "SM 120", "TORCH_CUDA_ARCH_LIST=12.0"]),
    ("eight-pcie", host(kernels=Kernels(error="ImportError: libcuda.so.1")), "sgl_kernel", "failure", ["libcuda.so.1"]),
    ("nvlink", host(kernels=Kernels("/sp/sgl_kernel/sm100/common_ops.abi3.so", (90,))), "sgl_kernel", "warning",
     ["SM 90 takes sm90"]),
    ("old-software", as_it_is, "patches", "failure", ["strict-api: mismatch", "reinstall"]),
    ("eight-pcie", host(patches=(Patch("provenance", "inactive"),)), "patches", "failure", ["PYTHONPATH"]),
    ("eight-pcie", host(patch_problem="unknown patch x\n  remedy     choose y"), "patches", "failure", ["choose y"]),
    ("eight-pcie", host(import_path={"/srv": "every user can write to /srv (mode 0777)"}), "import path", "warning",
     ["modules in /srv first", "mode 0777", "json.py", "PYTHONSAFEPATH=1"]),
    ("old-software", as_it_is, "allocator", "warning", ["PYTORCH_CUDA_ALLOC_CONF", "2.0 us", "17.8"]),
    ("container-small-shm", as_it_is, "shared memory", "failure", ["60 MiB", "588 MiB", "--shm-size"]),
    ("nvlink", host(shm=GIB, shm_free=GIB // 2), "shared memory", "warning", ["512 MiB", "1.0 GiB"]),
    ("eight-pcie-iommu", host(shm_free=600 << 20), "shared memory", "warning", ["809 MiB", "remount"]),
    ("container-small-shm", as_it_is, "limits", "warning", ["1024 open files", "65535"]),
    ("container-small-shm", as_it_is, "limits", "note", ["64 KiB of locked memory", "memlock=-1"]),
    ("eight-pcie", host(limits={"nproc": 200}), "limits", "warning", ["10 processes", "make 320"]),
    ("eight-pcie", serving(model=Model("/m", True, "/m has no config.json")), "model", "failure", ["/m has no"]),
    ("eight-pcie", serving(model=Model("a/b")), "model", "note", ["not on this machine", "hf download a/b"]),
    ("eight-pcie", serving(model=Model("/m.gguf", unread=True)), "model", "note", ["only a server reads", "0 bytes"]),
    ("old-software", as_it_is, "draft", "failure", ["vocab_size is 32000", "draft check"]),
    ("eight-pcie", serving(draft_warnings=("rounds",)), "draft", "warning", ["rounds", "2.89"]),
    ("eight-pcie", gpu(3, memory_free=10 * GIB), "memory", "failure", ["10.0 GiB free on GPU 3, the fullest of 8"]),
    ("old-software", as_it_is, "memory", "failure", ["60.0 GiB free", "72.3 GiB of weights", "35.6 GiB", "--tp 16"]),
    ("switches-with-acs", as_it_is, "memory", "failure", ["1.1 GiB are missing"]),
    ("no-gpu", host(memory_available=100 << 20), "memory", "failure", ["100 MiB available", "154 MiB"]),
    ("old-software", as_it_is, "port", "failure", ["30000 is in use", "stop --port 30000"]),
    ("eight-pcie", serving(port_free=False, port_seen="port 30000 is in use on 0.0.0.0 by pid 7 (nginx)",
                           port_remedy="another --port, or end that process"),
     "port", "failure", ["0.0.0.0 by pid 7 (nginx)", "end that process"]),
    ("container-small-shm", as_it_is, "could not be read", "note", ["ACS", "256 bytes"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "check", "level", "words"), FIRES)
def test_fires(name: str, change: Callable[[Host], Host], check: str, level: str, words: list[str]) -> None:
    found = fired(change(recorded(name)), check)
    assert all(re.search(r"\d", finding.why) and finding.do for finding in found), found
    said = [" | ".join((finding.seen, finding.why, finding.do)) for finding in found if finding.level == level]
    assert any(all(word in text for word in words) for text in said), found


# (recorded host, what is changed on it, check): near misses, on which the check is content
QUIET = [
    ("eight-pcie", host(driver_cuda="13.2"), "driver"),
    ("eight-pcie", serving(tp=4), "GPUs"),
    ("eight-pcie-iommu", serving(tp=1), "peer access"),
    ("nvlink", host(iommu="translated"), "peer access"),  # NVLink does not pass the IOMMU
    ("eight-pcie", host(iommu="identity"), "peer access"),
    ("eight-pcie", as_it_is, "PCIe link"),  # all links at generation 1, because all GPUs idle
    ("eight-pcie", gpu(2, performance_state=3), "PCIe link"),
    ("old-software", serving(draft_refused=()), "draft"),
    ("eight-pcie", serving(tp=4), "model"),
    ("eight-pcie", serving(tp=8), "NUMA"),
    ("eight-pcie", as_it_is, "patches"),
    ("eight-pcie", as_it_is, "limits"),
    ("eight-pcie", as_it_is, "could not be read"),
    ("eight-pcie", host(installed={**recorded("eight-pcie").installed, "torch": "2.14.1+cu130"}), "versions"),
    ("eight-pcie", host(nccl=(Library("/x/libnccl.so.2", "2.31.0"),)), "NCCL"),
    ("eight-pcie", host(kernels=Kernels("/x/common_ops.so", (), (90,))), "sgl_kernel"),  # PTX, compiled at first use
    ("eight-pcie", as_it_is, "import path"),
    ("eight-pcie", host(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}), "allocator"),
    ("eight-pcie-iommu", host(shm_free=GIB), "shared memory"),
    ("container-small-shm", serving(tp=1), "shared memory"),
    ("old-software", serving(port_free=True), "port"),
    ("nvml-missing", as_it_is, "memory"),
]


def test_nobody_speaks_of_serving_on_the_cpu_where_gpus_are_asked_for() -> None:
    said = " ".join(finding.seen for finding in examine(serving(tp=8)(recorded("no-gpu"))))
    assert "serving is on the CPU" not in said
    assert "float32" not in said
    assert "serving is on the CPU" in " ".join(finding.seen for finding in examine(recorded("no-gpu")))


@pytest.mark.parametrize(("name", "change", "check"), QUIET)
def test_is_quiet(name: str, change: Callable[[Host], Host], check: str) -> None:
    assert fired(change(recorded(name)), check) == []


def test_every_check_has_a_host_on_which_it_fires_and_one_on_which_it_does_not() -> None:
    checks = {finding.check for finding in examine(recorded("eight-pcie"))}
    assert checks == {check for _, _, check, _, _ in FIRES} == {check for _, _, check in QUIET}


def test_the_gpus_that_the_ranks_take_are_looked_at_and_no_others() -> None:
    """--base-gpu-id and --gpu-id-step, as upstream places ranks."""
    small = Model("m", True, split=8 * GIB, kv_whole=1000, layers=2, context_length=100)
    whole = serving(model=small, draft=None)(gpu(0, memory_free=GIB, sm=75)(recorded("eight-pcie")))
    slots = (replace(whole.topology.gpus[0], name="a display's", numa_node=7), *whole.topology.gpus[1:])
    links = tuple(replace(link, read=1 not in (link.a, link.b)) for link in whole.topology.links)
    whole = replace(whole, topology=replace(whole.topology, gpus=slots, links=links))
    placed = serving(tp=2, base_gpu=2, gpu_step=4)(whole)
    assert positions(placed) == [2, 6]
    for check in ("GPUs", "peer access", "memory", "sgl_kernel", "NUMA"):
        assert not fired(placed, check), check
    (told,) = [finding for finding in examine(placed) if finding.check == "GPUs"]
    assert told.seen.endswith("the ranks take GPU 2, 6")
    # The others would have been complained of, by their own positions.
    first = serving(tp=2)(whole)
    for check, words in {
        "GPUs": "unequal", "peer access": "1 (0-1)", "memory": "on GPU 0", "sgl_kernel": "SM 75", "NUMA": "GPUs 0 ",
    }.items():  # fmt: skip
        assert words in " ".join(finding.seen for finding in fired(first, check)), check
    last = serving(tp=2, base_gpu=1, gpu_step=6)(gpu(7, memory_free=GIB)(whole))
    assert "1 (1-7)" in fired(last, "peer access")[0].seen
    assert "on GPU 7" in fired(last, "memory")[0].seen


def test_shared_memory_is_reckoned_as_the_patch_page_does() -> None:
    """docs/patches/pcie-nccl-allreduce.md: for a communicator 0.3 GB on two GPUs (16 channels), 0.4 on eight (2)."""
    assert nccl_shared_memory(recorded("container-small-shm")) / 2 == 9_637_888 * 16 * 2
    assert nccl_shared_memory(recorded("eight-pcie-iommu")) / 2 == 9_637_888 * 2 * 22
    assert nccl_shared_memory(recorded("nvlink")) == 0


def test_a_rank_holds_its_share_and_all_of_the_latent() -> None:
    model = Model("m", True, split=800, whole=10, kv_split=16, kv_whole=5)
    assert a_rank(model, 8) == (110, 7)
    assert a_rank(model, 1) == (810, 21)
    # Four key/value heads: none of eight ranks can have half a one.
    assert a_rank(replace(model, kv_heads=4), 8) == (110, 9)
    assert a_rank(replace(model, kv_heads=16), 8) == (110, 7)


def test_room_for_tokens_is_what_is_left() -> None:
    """40 GB of split weights on 2 ranks of 100 GB at 0.9: 70 GB left, of 1000 bytes a token."""
    base = recorded("container-small-shm")
    gpus = tuple(replace(gpu, memory=10**11, memory_free=10**11) for gpu in base.gpus)
    model = Model("m", True, split=40 * 10**9, kv_whole=1000, context_length=70_000_000, layers=1)
    wanted = replace(base, gpus=gpus, serving=Serving(tp=2, model=model))
    (finding,) = [found for found in examine(wanted) if found.check == "memory"]
    assert (finding.level, "70,000,000 tokens" in finding.seen) == ("ok", True)
    longer = replace(wanted, serving=replace(wanted.serving, model=replace(model, context_length=70_000_001)))
    (finding,) = [found for found in examine(longer) if found.check == "memory"]
    assert finding.level == "warning"
    assert "--context-length 70000000" in finding.do


@pytest.mark.parametrize(
    ("archs", "ptx", "sm", "runs"),
    [
        ((80, 90), (), 90, True),
        ((80,), (), 89, True),  # machine code of the same major runs on a higher minor
        ((89,), (), 80, False),
        ((80, 90, 100), (), 120, False),
        ((100,), (), 103, True),
        ((), (90,), 120, True),
        ((), (), 90, False),
    ],
)
def test_code_runs_on(archs: tuple[int, ...], ptx: tuple[int, ...], sm: int, runs: bool) -> None:
    assert runs_on(Kernels("/x.so", archs, ptx), sm) is runs
