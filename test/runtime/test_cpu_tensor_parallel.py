"""cpu-tensor-parallel: upstream's own start of ranks without shared-memory kernels, and drafts that it pads.

Whole servers of several ranks are in e2e/test_cpu_tensor_parallel.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from sglang_patches.draft import shapes
from sglang_patches.runtime import cpu_tensor_parallel

DRAFT = Path(__file__).parents[1] / "models/tiny-kimi-eagle3"
OPERATOR = "init_cpu_threads_env"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_nccl_is_not_asked_to_serve_a_cpu(device: torch.device | str | int) -> None:
    with pytest.raises(ValueError, match="GPUs only"):
        cpu_tensor_parallel.refuse_cpu(device)


@pytest.mark.parametrize("device", [0, "cuda:1", torch.device("cuda", 3)])
def test_nccl_serves_gpus(device: torch.device | str | int) -> None:
    cpu_tensor_parallel.refuse_cpu(device)


def test_upstream_makes_no_nccl_communicator_of_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's class, for a group of two: without the patch it loads NCCL and ends in a ValueError of torch's."""
    from sglang.srt.distributed.device_communicators import pynccl

    loaded: list[object] = []

    def load(path: str | None) -> Any:
        loaded.append(path)
        raise OSError("as where the library is missing")

    monkeypatch.setattr(pynccl, "NCCLLibrary", load)
    group = object.__new__(pynccl.StatelessProcessGroup)
    group.rank, group.world_size = 0, 2
    for device, loads in ((torch.device("cpu"), 0), (torch.device("cuda", 0), 1)):
        communicator = pynccl.PyNcclCommunicator(group, device)
        assert (communicator.available, communicator.disabled, len(loaded)) == (False, True, loads)


@pytest.mark.parametrize("arm", [False, True])
def test_ranks_without_the_kernel_that_binds_threads_start_unbound(monkeypatch: pytest.MonkeyPatch, arm: bool) -> None:
    """Also on Arm, where upstream takes the kernel for granted."""
    from sglang.srt.distributed import bootstrap

    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", arm)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert not cpu_tensor_parallel.binds_threads()
    assert bootstrap._bind_threads_if_cpu(device="cpu") is None
    bootstrap._init_cpu_threads_env(local_omp_cpuid=None)
    # Unset, it tells upstream's groups to sum with torch.
    assert "LOCAL_SIZE" not in bootstrap.os.environ


def test_ranks_with_the_kernel_are_bound_as_upstream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import bootstrap
    from sglang.srt.utils import numa_utils

    called: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.ops.sgl_kernel, OPERATOR, lambda cpus: called.append((OPERATOR, cpus)), raising=False)
    monkeypatch.setattr(
        torch.ops.sgl_kernel, "initialize", lambda *ranks: called.append(("initialize", ranks)), raising=False
    )
    monkeypatch.setattr(bootstrap, "_is_cpu_arm64", True)
    monkeypatch.setenv("LOCAL_SIZE", "")
    parallel = SimpleNamespace(dp_size=1, pp_size=1, tp_size=2, tp_rank=1)
    monkeypatch.setattr(bootstrap, "get_parallel", lambda: parallel)
    monkeypatch.setattr(bootstrap, "get_device", lambda: SimpleNamespace(gpu_id=1))
    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0,1", "2,3"])
    bootstrap._init_cpu_threads_env(local_omp_cpuid=bootstrap._bind_threads_if_cpu(device="cpu"))
    assert called == [(OPERATOR, "2,3"), ("initialize", (2, 1))]
    assert bootstrap.os.environ["LOCAL_SIZE"] == "2"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_draft_whose_sizes_upstream_pads_is_still_the_checkpoints(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    from sglang.srt.configs import update_config

    monkeypatch.setattr(update_config, "may_get_weight_block_size", lambda *_: None)
    config = AutoConfig.from_pretrained(DRAFT)
    config.intermediate_size = 770  # 32 divides it at no number of ranks
    before = shapes.expected(copy.deepcopy(config), shapes.LLAMA)
    model_config: Any = SimpleNamespace(
        hf_config=config, hf_text_config=config, num_attention_heads=4, num_key_value_heads=2, quantization=None,
        get_total_num_kv_heads=lambda: 2,
    )  # fmt: skip
    update_config.adjust_config_with_unaligned_cpu_tp(model_config, None, ranks)
    assert config.intermediate_size != 770
    assert (config.num_attention_heads != 4) == (ranks not in (1, 2))
    assert shapes.expected(config, shapes.LLAMA) == before
    assert before is not None
    with safe_open(DRAFT / "model.safetensors", "pt") as stored:
        name = next(name for name in stored.keys() if name.endswith("self_attn.k_proj.weight"))  # noqa: SIM118
        assert tuple(stored.get_slice(name).get_shape()) == before["layers.0.self_attn.k_proj.weight"]
