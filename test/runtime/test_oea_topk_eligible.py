"""oea-topk: what of a process keeps the rule out, and the weight of shared experts that ride along."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers import moe
from sglang.srt.layers.moe import topk as upstream

from sglang_patches.runtime import oea_topk
from sglang_patches.runtime.oea_topk import eligible, reference
from sglang_patches.runtime.oea_topk.settings import Rule


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The reason of a process whose parallelism is plain but for what is given."""
    seen = {"attn_dp_size": 1, "attn_cp_size": 1}
    backend = SimpleNamespace(is_none=lambda: True)
    monkeypatch.setattr(moe, "get_moe_a2a_backend", lambda: backend)
    monkeypatch.setattr(moe, "is_moe_input_scattered_across_dp_ranks", lambda: False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(**seen))

    def why(**sizes: int) -> str:
        seen.update(sizes)
        return eligible.why_not_process()

    eligible.why_not_process.cache_clear()
    yield why
    eligible.why_not_process.cache_clear()


def test_plain_tensor_parallelism_keeps_nothing_out(process: Any) -> None:
    assert process() == ""


@pytest.mark.parametrize(
    ("sizes", "reason"), [({"attn_dp_size": 2}, "dp_attention"), ({"attn_cp_size": 2}, "context_parallel")]
)
def test_ranks_that_do_not_see_the_whole_batch(process: Any, sizes: dict[str, int], reason: str) -> None:
    assert process(**sizes) == reason


def test_tokens_that_travel_to_experts(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "is_moe_input_scattered_across_dp_ranks", lambda: True)
    assert process() == "expert_all_to_all"
    eligible.why_not_process.cache_clear()
    monkeypatch.setattr(moe, "is_moe_input_scattered_across_dp_ranks", lambda: False)
    monkeypatch.setattr(moe, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: False))
    assert process() == "expert_all_to_all"


def test_verifies_of_uneven_width(process: Any) -> None:
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("compact"):
        assert process() == "ragged_verify"


def test_routing_that_is_made_up(process: Any) -> None:
    with envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.override(True):
        assert process() == "simulated_routing"


@pytest.mark.parametrize("on_output", [False, True])
def test_shared_experts_weigh_what_upstream_gives_them(on_output: bool) -> None:
    """Where upstream scales the sum of all experts later, a shared expert's weight takes that back."""
    bias = torch.linspace(-0.3, 0.3, 16)
    config = upstream.TopKConfig(
        5, True, 1, 1, correction_bias=bias, routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=on_output,
    )  # fmt: skip
    router = oea_topk._router(config, 5, 1)
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = reference.choose(logits, bias, None, Rule(k0=4), router)
    theirs, their_ids = upstream.biased_grouped_topk_impl._torchdynamo_orig_callable(
        logits, logits, bias, 5, True, 1, 1, 1, 2.5, on_output
    )
    assert ids[:, -1].tolist() == their_ids[:, -1].tolist() == [16] * 6
    torch.testing.assert_close(weights[:, -1], theirs[:, -1])
    torch.testing.assert_close(weights[:, :4].sum(1), theirs[:, :4].sum(1))
