"""mla-verify-split-kv: which servers and which calls split, what is left to upstream, and what is told of it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.model_executor import forward_batch_info

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import mla_verify_split_kv as patch
from sglang_patches.runtime._split_kv import check, settings
from sglang_patches.runtime.mla_verify_split_kv import gate, launch

KIMI_ON_H200 = gate.Facts(
    capability=(9, 0),
    algorithm="EAGLE3",
    topk=1,
    tokens=4,
    mla=True,
    width=512,
    rope=64,
    compute=torch.bfloat16,
    cache=torch.bfloat16,
    dcp_size=1,
    deterministic=False,
    upstream_serves=False,
)


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(patch, "backends", patch.Backends(patch.PATCH))


class Writes:
    """In place of `launch.SplitVerify`: the same number everywhere, or an error."""

    def __init__(self, requests: int, number: float, error: Exception | None = None) -> None:
        self.requests, self.number, self.error = requests, number, error
        self.workspace = torch.empty(0)
        self.override: int | None = None
        self.tried: list[tuple[int, int | None]] = []

    def fits(self, batch: int, rows: int, width: int) -> bool:
        return batch <= self.requests

    def __call__(self, q: Any, k_extend: Any, out: torch.Tensor, *tensors: Any, **options: Any) -> None:
        indptr = tensors[1]
        self.tried.append((int(indptr[-1]), self.override))
        if self.error is not None:
            raise self.error
        out.fill_(self.number)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (Writes(2, 0.0), "on this GPU they are up to"),
        (Writes(1, 0.0), "on this GPU they are up to"),
        (Writes(2, math.nan), "on this GPU they are up to nan"),
        (Writes(2, 0.0, RuntimeError("no PTX for sm_999")), "RuntimeError: no PTX for sm_999"),
        (Writes(0, 0.0), ""),  # no batch fits, so none is split
    ],
)
def test_kernels_that_are_wrong_here_are_not_used(run: Writes, told: str) -> None:
    seen = replace(KIMI_ON_H200, width=64, rope=16)
    wrong = check.wrong(lambda: patch._difference(run, 8, seen))
    assert wrong.startswith(told)
    assert bool(wrong) == bool(told)
    # As it is split, and a long one in a single program, whose loop is longer than its pipeline.
    both = [(233 if run.requests == 2 else 200, None), (1000, 1)]
    assert run.tried == both[: 0 if not run.requests else 1 if run.error else 2]
    assert run.override is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"capability": (8, 0)}, None),
        ({"capability": (10, 0)}, None),
        ({"capability": (12, 0)}, None),
        ({"capability": (7, 5)}, "device"),
        ({"capability": None}, "device"),
        ({"algorithm": None, "tokens": 0, "topk": 0}, "no_speculation"),
        ({"algorithm": "NEXTN"}, None),
        ({"algorithm": "NGRAM"}, "algorithm"),
        ({"algorithm": "DFLASH"}, "algorithm"),
        ({"upstream_serves": True}, "upstream"),
        ({"topk": 4, "tokens": 8}, "topk"),
        ({"tokens": 2}, None),
        ({"tokens": 16}, None),
        ({"tokens": 17}, "draft_tokens"),
        ({"mla": False}, "not_mla"),
        ({"width": 1024}, "head_dim"),
        ({"rope": 0}, "head_dim"),
        ({"rope": 128}, "head_dim"),
        ({"dcp_size": 2}, "context_parallel"),
        ({"deterministic": True}, "deterministic"),
        ({"verifier": "flashmla"}, "other_backend"),
        ({"prefill_node": "fixed"}, "prefill_node"),
        ({"prefill_node": "switchable"}, None),
        ({"compute": torch.float32, "cache": torch.float32}, "dtype"),
        ({"cache": torch.float8_e4m3fn}, None),
        ({"cache": torch.float8_e4m3fn, "capability": (8, 9)}, None),
        ({"cache": torch.float8_e5m2, "capability": (8, 6)}, "cache_dtype"),
        ({"cache": torch.uint8}, "cache_dtype"),
        ({"cache": torch.float16}, "cache_dtype"),
    ],
    ids=str,
)
def test_which_servers_split(changes: dict[str, Any], reason: str | None) -> None:
    refused = gate.server_reason(replace(KIMI_ON_H200, **changes))
    assert (refused[0] if refused else None) == reason


def verify_call(**changes: Any) -> dict[str, Any]:
    """What upstream hands over for 3 requests of 4 draft tokens, 8 heads."""
    cache = torch.zeros(50, 1, 576, dtype=torch.bfloat16)
    extend = torch.zeros(12, 1, 576, dtype=torch.bfloat16)
    return {
        "q_extend": torch.zeros(12, 8, 576, dtype=torch.bfloat16),
        "k_extend": extend,
        "v_extend": extend[..., :512],
        "o_extend": torch.zeros(12, 8, 512, dtype=torch.bfloat16),
        "k_buffer": cache,
        "v_buffer": cache[..., :512],
        "qo_indptr": torch.arange(4) * 4,
        "kv_indptr": torch.arange(4, dtype=torch.int32) * 10,
        "kv_indices": torch.zeros(30, dtype=torch.int64),
        "custom_mask": None,
        "is_causal": True,
        "mask_indptr": None,
        "max_len_extend": 4,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "sm_scale": 0.1,
        **changes,
    }


class Run:
    def __init__(self, room: bool = True, error: Exception | None = None) -> None:
        self.room, self.error, self.ran = room, error, 0

    def fits(self, batch: int, rows: int, width: int) -> bool:
        assert (batch, rows, width) == (3, 32, 512)
        return self.room

    def __call__(self, *tensors: Any, **options: Any) -> None:
        self.ran += 1
        if self.error is not None:
            raise self.error


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"custom_mask": torch.ones(3)}, None),  # that of a chain, by topk
        ({"sinks": torch.ones(8)}, "sinks"),
        ({"sliding_window_size": 128}, "sliding_window"),
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"xai_temperature_len": 8}, "temperature"),
        ({"is_causal": False}, "not_causal"),
        ({"max_len_extend": 0}, "draft_tokens"),
        ({"max_len_extend": 32}, "draft_tokens"),
        ({"max_len_extend": 5}, "ragged"),
        ({"k_buffer": torch.zeros(50, 576, dtype=BF16)}, "layout"),
        ({"k_buffer": torch.zeros(50, 2, 576, dtype=BF16)}, "kv_heads"),
        ({"k_buffer": torch.zeros(50, 1, 640, dtype=BF16)}, "head_dim"),
        ({"v_buffer": torch.zeros(50, 1, 512, dtype=BF16)}, "value_apart"),
        ({"o_extend": torch.zeros(12, 512, 8, dtype=BF16).transpose(1, 2)}, "layout"),
        ({"q_extend": torch.zeros(12, 8, 576)}, "dtype"),
        ({"k_buffer": torch.zeros(50, 1, 576), "v_buffer": None}, "dtype"),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else value,
)
def test_which_calls_split_and_the_rest_is_counted(changes: dict[str, Any], reason: str | None) -> None:
    given = verify_call(**changes)
    if given["v_buffer"] is None:
        given["v_buffer"] = given["k_buffer"][..., :512]
    run = Run()
    assert patch.Hook(run, 4)(**given) is (reason is None)
    assert run.ran == (reason is None)
    assert patch.backends.figures()["calls"] == {"split_kv" if reason is None else f"extend:{reason}": 1}


def test_a_batch_that_the_workspace_does_not_hold_goes_to_upstream() -> None:
    run = Run(room=False)
    assert patch.Hook(run, 4)(**verify_call()) is False
    assert (run.ran, patch.backends.figures()["calls"]) == (0, {"extend:workspace": 1})


def test_a_kernel_that_fails_leaves_verify_to_upstream_from_then_on() -> None:
    run = Run(error=RuntimeError("out of resource: shared memory"))
    hook = patch.Hook(run, 4)
    assert hook(**verify_call()) is False
    run.error = None
    assert hook(**verify_call()) is False
    assert (run.ran, patch.backends.figures()["calls"]) == (1, {"extend:failed": 2})
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "failed"
    assert "out of resource: shared memory" in told["detail"]


class Runner:
    """As much of upstream's model runner as is read where a target's backend is made, and the backend itself."""

    is_draft_worker, skip_prefill = False, False
    device, gpu_id, dtype, kv_cache_dtype = "meta", 0, BF16, BF16
    model_config = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64)
    spec_algorithm = SimpleNamespace(name="EAGLE3", is_none=lambda: False)
    req_to_token_pool = SimpleNamespace(size=8)
    prefill_attention_backend_str = decode_attention_backend_str = "triton"
    topk, use_mla, dcp_size, enable_deterministic, num_head, device_core_count = 1, True, 1, False, 8, 132

    def __init__(self, tokens: int) -> None:
        self.num_draft_tokens = tokens
        self.use_verify_shared_kv = self.use_verify_splitkv = False
        self.verify_shared_kv_fwd: Any = None


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What upstream publishes of its arguments, as far as it is read."""
    found = SimpleNamespace(
        disaggregation_mode="null",
        enable_pd_role_switch=False,
        speculative_attention_mode="prefill",
        speculative_num_draft_tokens=None,
        max_speculative_num_draft_tokens=None,
    )
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: found)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: found)
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "verifier"),
    [
        ("triton", "triton", "prefill", ""),
        ("triton", "flashmla", "prefill", ""),
        ("flashmla", "triton", "prefill", "flashmla"),
        ("flashmla", "triton", "decode", ""),
        ("triton", "flashmla", "decode", "flashmla"),
    ],
)
def test_the_backend_that_verifies_is_upstreams_choice(
    published: SimpleNamespace, prefill: str, decode: str, mode: str, verifier: str
) -> None:
    """Beside upstream's own composed backend."""
    published.speculative_attention_mode = mode
    runner = Runner(4)
    runner.prefill_attention_backend_str, runner.decode_attention_backend_str = prefill, decode
    assert gate.verifier(runner) == verifier
    both = hybrid_attn_backend.HybridAttnBackend.__new__(hybrid_attn_backend.HybridAttnBackend)
    both.spec_attn_is_decode = mode == "decode"
    vars(both).update(prefill_backend=prefill, decode_backend=decode)
    chosen = both._select_backend(forward_batch_info.ForwardMode.TARGET_VERIFY)
    assert (chosen == "triton") is (verifier == "")


@pytest.mark.parametrize("switch", [False, True])
def test_a_prefill_node_does_not_say_applied(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, switch: bool
) -> None:
    """Where its role can be switched it says so with its first verify."""
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(patch.check, "difference", lambda run, **sizes: 0.0)
    monkeypatch.setattr(launch.SplitVerify, "__call__", lambda self, *tensors, **options: None)
    published.disaggregation_mode, published.enable_pd_role_switch = "prefill", switch
    (backend,) = adaptive(4)
    told = _outcome.outcomes()[patch.PATCH]
    assert (told["result"], told["reason"]) == ("not needed", "prefill_node")
    assert backend.use_verify_shared_kv is switch
    if switch:
        assert backend.verify_shared_kv_fwd(**verify_call()) is True
        told = _outcome.outcomes()[patch.PATCH]
        assert (told["result"], told["rows"], told.get("reason")) == ("applied", 32, None)


def adaptive(*tokens: int) -> list[Runner]:
    """The target's backends of a server that adapts, in the order upstream makes them: that of the start is first."""
    made = [Runner(count) for count in tokens]
    for backend in made:
        patch.fills_verify_hook(lambda self, model_runner: None)(backend, backend)
    return made


def test_backends_of_a_server_that_adapts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3 steps at first, then 16, which are too many, 0, which verifies the token that was sampled, and 1."""
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(patch.check, "difference", lambda run, **sizes: 0.0)
    backends = adaptive(4, 17, 1, 2)
    assert [backend.use_verify_shared_kv for backend in backends] == [True, False, True, True]
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "applied"
    assert told["detail"] == (
        "1 draft tokens: verify splits the context; 2 draft tokens: verify splits the context; "
        "4 draft tokens: verify splits the context; 17 draft tokens: 17 draft tokens; 1 to 16 are supported"
    )
    each = told["by_draft_tokens"]
    assert [each[tokens].get("rows") for tokens in ("1", "2", "4", "17")] == [8, 16, 32, None]
    assert (each["17"]["result"], each["17"]["reason"]) == ("not needed", "draft_tokens")
    assert "rows" not in told, "the figures of one backend are not those of another"

    # Each counts its own calls, and the failure of one is not hidden by another that works.
    broken, works = (patch.Hook(Run(error=error), tokens) for error, tokens in ((RuntimeError("x"), 2), (None, 4)))
    broken.run.fits = lambda *_: True
    assert works(**verify_call()) is True
    for _ in range(2):
        assert broken(**verify_call()) is False
    assert works(**verify_call()) is True
    told = _outcome.outcomes()[patch.PATCH]
    assert told["calls"] == {"extend:failed": 2, "split_kv": 2}
    assert {tokens: entry["calls"] for tokens, entry in told["by_draft_tokens"].items()} == {
        "1": {},
        "2": {"extend:failed": 2},
        "4": {"split_kv": 2},
        "17": {},
    }
    assert told["result"] == told["by_draft_tokens"]["2"]["result"] == "failed"
    adaptive(2)
    assert _outcome.outcomes()[patch.PATCH]["result"] == "failed", "as many draft tokens, a backend made later"


@pytest.mark.parametrize(
    ("most", "same"),
    [
        (8, [0, 0, 0, 0]),  # the first has room for all that are to come
        (None, [0, 0, 2, 2]),  # the larger one of a captured graph stays, and serves the next
    ],
)
def test_backends_of_one_model_runner_share_a_workspace(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, most: int | None, same: list[int]
) -> None:
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(patch.check, "difference", lambda run, **sizes: 0.0)
    published.max_speculative_num_draft_tokens = most
    made: list[launch.SplitVerify] = []

    def hook(run: launch.SplitVerify, *_: Any, **__: Any) -> Run:
        made.append(run)
        return Run()

    monkeypatch.setattr(patch, "Hook", hook)
    runner = Runner(4)
    for tokens in (4, 4, 8, 2):
        patch.fills_verify_hook(lambda self, model_runner: None)(Runner(tokens), runner)
    assert [run.workspace is made[first].workspace for run, first in zip(made, same, strict=True)] == [True] * 4
    assert len({id(run.workspace) for run in made}) == len(set(same))
    assert all(
        run.fits(batch, tokens * 8, 512)
        for run, tokens in zip(made, (4, 4, 8, 2), strict=True)
        for batch in range(1, runner.req_to_token_pool.size + 1)
    )
    adaptive(2)
    assert made[4].workspace is not made[0].workspace, "another model runner's forwards may run at the same time"
    monkeypatch.setattr(patch.check, "difference", lambda run, **sizes: 1.0)
    (failed,) = adaptive(4)
    assert not any(isinstance(value, torch.Tensor) for value in vars(failed).values()), "kept, and used by nothing"


def test_one_backend_is_told_as_before() -> None:
    adaptive(4)
    told = _outcome.outcomes()[patch.PATCH]
    assert told == {"result": "not needed", "detail": "no NVIDIA GPU; SM 80 is needed", "reason": "device"}


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = patch.SPLITS_VARIABLE
    for name in (patch.VARIABLE, splits):
        monkeypatch.delenv(name, raising=False)
    assert (settings.mode(patch.VARIABLE), settings.split_override(splits)) == ("auto", None)
    monkeypatch.setenv(splits, "16")
    assert settings.split_override(splits) == 16
    for wrong in ("0", "-1", "many", "513"):
        monkeypatch.setenv(splits, wrong)
        with pytest.raises(ValueError, match=rf"SGLANG_PATCHES_MLA_VERIFY_SPLITS='{wrong}' is no whole number from 1"):
            settings.split_override(splits)
    monkeypatch.setenv(patch.VARIABLE, "yes")
    with pytest.raises(ValueError, match="SGLANG_PATCHES_MLA_VERIFY='yes' is not known; it can be auto, on, off"):
        settings.mode(patch.VARIABLE)


def test_a_server_whose_kernels_are_wrong_verifies_as_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "capability", lambda model_runner: (8, 6))
    monkeypatch.setattr(patch.check, "difference", lambda run, **sizes: 0.3)
    (backend,) = adaptive(3)
    assert (backend.use_verify_shared_kv, backend.verify_shared_kv_fwd) == (False, None)
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "failed"
    assert told["detail"].startswith("on this GPU they are up to 0.3 from attention in float32")
