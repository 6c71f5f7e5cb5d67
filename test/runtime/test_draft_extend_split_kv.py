"""draft-extend-split-kv: its kernels give what attention gives, upstream's backend calls them, and only where they can.

The kernels run in triton's interpreter, in a process of their own (`split_extend.py`), and are compiled for GPUs that
are not here. Speed, and bfloat16 in the interpreter, need a GPU. What it shares with mla-verify-split-kv, that patch's
tests test.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from split_compile import compiled
from split_extend import SHAPES
from split_made import written

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import draft_extend_split_kv as patch
from sglang_patches.runtime._split_kv import plan
from sglang_patches.runtime.draft_extend_split_kv import gate, launch
from sglang_patches.runtime.draft_extend_split_kv.kernels import attend_splits

BF16, F32 = torch.bfloat16, torch.float32

DRAFT_ON_H200 = gate.Facts(
    capability=(9, 0),
    tokens=4,
    mla=False,
    heads=8,
    kv_heads=1,
    key_width=128,
    width=128,
    compute=BF16,
    cache=BF16,
    dcp_size=1,
    deterministic=False,
)


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(patch, "backends", patch.Backends(patch.PATCH))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return written("split_extend.py", "draft-extend-split-kv", "kernels", tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("name", [*SHAPES, "scaled cache", "float32 of the check"])
def test_kernels_give_float32_attention(kernels: Any, name: str) -> None:
    split, reference = kernels[name]["split"], kernels[name]["reference"]
    assert reference.abs().max() > 0.2
    assert (split - reference).abs().max() < 3e-6


def test_what_start_up_tries_is_right(kernels: Any) -> None:
    assert len(kernels["check"]) == 3
    assert all(worst < (1e-5 if "float32" in what else 5e-3) for what, worst in kernels["check"].items())


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.float8_e4m3fn"])
def test_other_types_round_only(kernels: Any, dtype: str) -> None:
    assert (kernels[dtype]["split"] - kernels[dtype]["reference"]).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("tile", "sm", "cache", "width"),
    [
        (launch.ROWS_16, 120, "bf16", 128),
        (launch.ROWS_32, 89, "fp8e4nv", 128),
        (launch.ROWS_32, 80, "bf16", 128),
        (launch.ROWS_32, 90, "bf16", 256),
        (launch.ROWS_64, 100, "bf16", 256),
    ],
    ids=str,
)
def test_kernels_compile_and_take_the_shared_memory_they_say(tile: Any, sm: int, cache: str, width: int) -> None:
    """For 8 heads that share a KV head."""
    if width > launch.NARROW:
        tile = next(known for known in launch.known(width) if known.block_m == tile.block_m)
    pointers = {"Q": "bf16", "K": "bf16", "V": "bf16", "KCache": cache, "VCache": cache}
    constants = {"L": 4, "H": 8, "KV_HEADS": 1, "DK": width, "DV": width, "BLOCK_DK": width, "BLOCK_DV": width}
    made = compiled(attend_splits, pointers, constants, tile, sm)
    assert len(made.asm["cubin"]) > 1000
    assert made.metadata.shared <= tile.memory <= plan.LEAST_SHARED_MEMORY


def test_upstreams_backend_extends_with_the_split_kernels(tmp_path: Path) -> None:
    """The bundled draft's whole forward, 4 new tokens of three requests, against torch's and upstream's kernels."""
    found = written("split_extend.py", "draft-extend-split-kv", "backend", tmp_path)
    reference, upstream, split = found["torch_native"], found["triton"], found["split"]
    assert (upstream["calls"], split["calls"]) == (None, {"split_kv": 1})  # it has one layer
    told = {name: split["outcome"][name] for name in ("result", "rows", "splits_launched_at_batch_1")}
    assert told == {"result": "applied", "rows": 16, "splits_launched_at_batch_1": 3}
    for other in (reference, upstream):
        for name in ("logits", "hidden"):
            assert other[name].abs().max() > 1
            assert (split[name] - other[name]).abs().max() < 1e-5 * other[name].abs().max(), name
        assert torch.equal(split["logits"].argmax(-1), other["logits"].argmax(-1))
    assert (upstream["outcome"]["result"], upstream["outcome"]["reason"]) == ("not needed", "device")
    used, outcome = found["off"]
    assert (used, outcome["result"], outcome["reason"]) == (False, "not needed", "off")
    assert found["target's"] is False
    assert found["a draft step's"] is False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv_heads": 8}, None),
        ({"capability": (8, 0)}, None),
        ({"capability": (12, 0)}, None),
        ({"capability": (7, 5)}, "device"),
        ({"capability": None}, "device"),
        ({"mla": True}, "mla"),
        ({"tokens": 2}, None),
        ({"tokens": 16}, None),
        ({"tokens": 0}, "draft_tokens"),
        ({"tokens": 17}, "draft_tokens"),
        ({"heads": 8, "kv_heads": 3}, "kv_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"key_width": 256, "width": 256}, None),
        ({"key_width": 257}, "head_dim"),
        ({"width": 0}, "head_dim"),
        ({"dcp_size": 2}, "context_parallel"),
        ({"deterministic": True}, "deterministic"),
        ({"compute": torch.float32, "cache": torch.float32}, "dtype"),
        ({"cache": torch.float8_e4m3fn}, None),
        ({"cache": torch.float8_e5m2, "capability": (8, 6)}, "cache_dtype"),
        ({"cache": torch.uint8}, "cache_dtype"),
    ],
    ids=str,
)
def test_which_drafts_split(changes: dict[str, Any], reason: str | None) -> None:
    refused = gate.server_reason(replace(DRAFT_ON_H200, **changes))
    assert (refused[0] if refused else None) == reason


class Run:
    """In place of `launch.SplitExtend`."""

    heads, kv_heads, key_width, width = 8, 2, 16, 24

    def __init__(self, room: bool = True, error: Exception | None = None) -> None:
        self.room, self.error, self.ran = room, error, 0

    def fits(self, batch: int, rows: int, width: int) -> bool:
        assert (batch, rows, width) == (3, 32, 24)
        return self.room

    def __call__(self, *tensors: Any, **options: Any) -> None:
        self.ran += 1
        if self.error is not None:
            raise self.error


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def extend_call(hook: Any, mode: ForwardMode = ForwardMode.DRAFT_EXTEND_V2, **changes: Any) -> bool:
    """What upstream's ``forward_extend`` hands over for 3 requests of 4 new tokens, 8 heads that share 2 KV heads."""
    given: dict[str, Any] = {
        "caches": (zeros(50, 2, 16), zeros(50, 2, 24)),
        "tokens": 4,
        "mask": None,
        "temperature_len": -1,
    } | changes
    k_cache, v_cache = given.pop("caches")
    backend = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer: k_cache, get_value_buffer=lambda layer: v_cache),
        forward_metadata=SimpleNamespace(max_extend_len=given.pop("tokens"), custom_mask=given.pop("mask")),
    )
    if hook is not None:
        setattr(backend, patch.ATTRIBUTE, hook)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=8,
        qk_head_dim=16,
        v_head_dim=24,
        scaling=0.25,
        xai_temperature_len=given.pop("temperature_len"),
    )
    call: dict[str, Any] = {
        "q": zeros(12, 8 * 16),
        "k": zeros(12, 2, 16),
        "v": zeros(12, 2, 24),
        "out": zeros(12, 8 * 24),
        "kv_indptr": torch.arange(4, dtype=torch.int32) * 10,
        "kv_indices": torch.zeros(30, dtype=torch.int64),
        "k_scale": 1.0,
        "v_scale": 1.0,
        "is_causal": True,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "sinks": None,
        "score_mod": None,
        **given,
    }
    return patch.attends(backend, layer=layer, forward_batch=SimpleNamespace(forward_mode=mode), **call)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"caches": (zeros(50, 2, 16, dtype=torch.float8_e4m3fn), zeros(50, 2, 24, dtype=torch.float8_e4m3fn))}, None),
        ({"mask": torch.ones(3)}, "mask"),
        ({"score_mod": print}, "score_mod"),
        ({"sinks": torch.ones(8)}, "sinks"),
        ({"sliding_window_size": 128}, "sliding_window"),
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"temperature_len": 8}, "temperature"),
        ({"is_causal": False}, "not_causal"),
        ({"tokens": 0}, "draft_tokens"),
        ({"tokens": 32}, "draft_tokens"),
        ({"tokens": 5}, "ragged"),
        ({"k": zeros(13, 2, 16)}, "ragged"),
        ({"caches": (zeros(10, 2, 5, 16), zeros(10, 2, 5, 24))}, "layout"),
        ({"k": zeros(12, 16, 2).transpose(1, 2)}, "layout"),
        ({"caches": (zeros(50, 1, 16), zeros(50, 1, 24))}, "heads"),
        ({"v": zeros(12, 2, 16), "caches": (zeros(50, 2, 16), zeros(50, 2, 16))}, "head_dim"),
        ({"k": zeros(12, 2, 24)}, "head_dim"),
        (
            {"q": zeros(12, 8 * 16, dtype=F32), "caches": (zeros(50, 2, 16, dtype=F32), zeros(50, 2, 24, dtype=F32))},
            "dtype",
        ),
        ({"caches": (zeros(50, 2, 16), zeros(50, 2, 24, dtype=F32))}, "dtype"),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else value,
)
def test_which_calls_split_and_the_rest_is_counted(changes: dict[str, Any], reason: str | None) -> None:
    run = Run()
    assert extend_call(patch.Hook(run, 4), **changes) is (reason is None)  # type: ignore[arg-type]
    assert run.ran == (reason is None)
    assert patch.backends.figures()["calls"] == {"split_kv" if reason is None else f"extend:{reason}": 1}


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED, ForwardMode.DECODE])
def test_other_forwards_are_upstreams(mode: ForwardMode) -> None:
    run = Run()
    assert extend_call(patch.Hook(run, 4), mode) is False  # type: ignore[arg-type]
    assert (run.ran, patch.backends.figures()) == (0, {})


def test_a_backend_without_the_kernels_is_upstreams() -> None:
    assert extend_call(None) is False
    assert patch.backends.figures() == {}


def test_a_batch_that_the_workspace_does_not_hold_goes_to_upstream() -> None:
    run = Run(room=False)
    assert extend_call(patch.Hook(run, 4)) is False  # type: ignore[arg-type]
    assert (run.ran, patch.backends.figures()["calls"]) == (0, {"extend:workspace": 1})


def test_a_kernel_that_fails_leaves_draft_extend_to_upstream_from_then_on() -> None:
    run = Run(error=RuntimeError("out of resource: shared memory"))
    hook = patch.Hook(run, 4)  # type: ignore[arg-type]
    assert extend_call(hook) is False
    run.error = None
    assert extend_call(hook) is False
    assert (run.ran, patch.backends.figures()["calls"]) == (1, {"extend:failed": 2})
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "failed"
    assert "out of resource: shared memory" in told["detail"]


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What upstream publishes of its arguments, as far as it is read."""
    found = SimpleNamespace(
        disaggregation_mode="null",
        enable_pd_role_switch=False,
        speculative_num_draft_tokens=None,
        max_speculative_num_draft_tokens=None,
    )
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: found)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: found)
    return found


class Backend:
    """As much of a draft's attention backend and of its model runner as is read where it is made."""

    is_draft_worker, skip_prefill = True, False
    device, gpu_id, dtype, kv_cache_dtype = "meta", 0, BF16, BF16
    model_config = SimpleNamespace(head_dim=128)
    req_to_token_pool = SimpleNamespace(size=8)
    use_mla, dcp_size, enable_deterministic, device_core_count = False, 1, False, 132
    num_head, num_kv_head, v_head_dim = 8, 1, 128

    def __init__(self, tokens: int) -> None:
        self.num_draft_tokens = tokens


@pytest.mark.parametrize(
    ("difference", "result"), [(0.0, "applied"), (0.3, "failed"), (float("nan"), "failed"), (OSError("ptx"), "failed")]
)
def test_kernels_that_are_wrong_here_are_not_used(
    monkeypatch: pytest.MonkeyPatch, difference: float | Exception, result: str
) -> None:
    def compared(run: launch.SplitExtend, **types: Any) -> float:
        assert (run.heads, run.kv_heads, run.key_width, run.width) == (8, 1, 128, 128)
        assert types == {"tokens": 4, "dtype": BF16, "cache_dtype": BF16}
        if isinstance(difference, Exception):
            raise difference
        return difference

    monkeypatch.setattr(gate, "capability", lambda model_runner: (8, 6))
    monkeypatch.setattr(patch.check, "difference", compared)
    firsts: list[Any] = []
    make = patch.Hook.__init__

    def made(self: Any, run: Any, tokens: int, first: Any = None) -> None:
        firsts.append(first)
        make(self, run, tokens, first)

    monkeypatch.setattr(patch.Hook, "__init__", made)
    backend = Backend(4)
    patch.prepare(backend, backend)
    told = _outcome.outcomes()[patch.PATCH]
    assert hasattr(backend, patch.ATTRIBUTE) == (result == "applied")
    if result == "applied":
        # Not before it served: in a composed backend, or with another algorithm, it never does.
        assert (told["result"], told["reason"]) == ("not needed", "not_yet")
        firsts[0]()
        told = _outcome.outcomes()[patch.PATCH]
        assert (told["detail"], told["rows"]) == ("draft extend splits the context", 32)
        patch.prepare(backend, backend)
        assert _outcome.outcomes()[patch.PATCH]["result"] == "applied", "another backend that has not served yet"
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == result


def test_a_workspace_that_holds_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(plan, "WORKSPACE_LIMIT", 1000)
    backend = Backend(4)
    patch.prepare(backend, backend)
    told = _outcome.outcomes()[patch.PATCH]
    assert (told["result"], told["reason"], hasattr(backend, patch.ATTRIBUTE)) == ("not needed", "workspace", False)


@pytest.mark.parametrize(
    ("most", "same"),
    [
        (16, [0, 0, 0, 0]),  # the first has room for all that are to come
        (None, [0, 0, 2, 2]),  # the larger one of a captured graph stays, and serves the next
    ],
)
def test_backends_of_one_draft_share_a_workspace(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, most: int | None, same: list[int]
) -> None:
    """The draft's own, the one for its extends, and those of `--speculative-adaptive`."""
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(patch.check, "difference", lambda run, **types: 0.0)
    published.max_speculative_num_draft_tokens = most

    runs: list[launch.SplitExtend] = []
    kept = patch.Hook.__init__

    def hook(self: Any, run: launch.SplitExtend, *others: Any) -> None:
        runs.append(run)
        kept(self, run, *others)

    monkeypatch.setattr(patch.Hook, "__init__", hook)
    runner = Backend(4)
    for tokens in (4, 4, 16, 2):
        patch.prepare(Backend(tokens), runner)
    assert [run.workspace is runs[first].workspace for run, first in zip(runs, same, strict=True)] == [True] * 4
    assert len({id(run.workspace) for run in runs}) == len(set(same))
    assert all(
        run.fits(batch, tokens * 8, 128)
        for run, tokens in zip(runs, (4, 4, 16, 2), strict=True)
        for batch in range(1, runner.req_to_token_pool.size + 1)
    )
    patch.prepare(Backend(2), Backend(2))
    assert all(runs[4].workspace is not run.workspace for run in runs[:4]), "another draft's backends share another"
    monkeypatch.setattr(patch.check, "difference", lambda run, **types: 1.0)
    failed = Backend(4)
    patch.prepare(failed, failed)
    assert not any(isinstance(value, torch.Tensor) for value in vars(failed).values()), "kept, and used by nothing"


@pytest.mark.parametrize("switchable", [False, True])
def test_a_prefill_node_does_not_say_applied(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, switchable: bool
) -> None:
    """One that may become a decode node says so once it drafted."""
    monkeypatch.setattr(gate, "capability", lambda model_runner: (9, 0))
    monkeypatch.setattr(patch.check, "difference", lambda run, **types: 0.0)
    published.disaggregation_mode, published.enable_pd_role_switch = "prefill", switchable
    backend = Backend(4)
    patch.prepare(backend, backend)
    told = _outcome.outcomes()[patch.PATCH]
    assert (told["result"], told["reason"]) == ("not needed", "not_yet" if switchable else "prefill_node")
    assert hasattr(backend, patch.ATTRIBUTE) == switchable
    if switchable:
        nothing: Any = SimpleNamespace()
        started = patch.Hook(nothing, 4, lambda: patch.backends.record(4, "applied", "now"))
        assert started.served(lambda: None, lambda: None) is True
        assert _outcome.outcomes()[patch.PATCH]["result"] == "applied"


def test_splits_follow_from_kv_heads_too() -> None:
    """One H200 (132 multiprocessors), 4 new tokens and 8 heads: each KV head has programs of its own."""

    def launched(kv_heads: int, batch: int) -> tuple[int, int]:
        run = launch.SplitExtend(16, 4, 8, kv_heads, 128, 128, cores=132, device="meta")
        made = run.launch(batch, 4, 8, 128)
        return made.grid[0], made.grid[1]

    resident_16, resident_32 = launch.ROWS_16.resident, launch.ROWS_32.resident
    assert launched(1, 1) == (1, plan.MAX_SPLITS)
    assert launched(1, 16) == (1, -(-2 * 132 * resident_32 // 16))
    assert launched(8, 1) == (8, min(plan.MAX_SPLITS, 2 * 132 * resident_16 // 8))
    assert launched(8, 16) == (8, plan.MIN_SPLITS)


def test_a_batch_beyond_the_workspace_is_refused() -> None:
    """On a GPU it would write behind it."""
    run = launch.SplitExtend(1, 2, 2, 1, 16, 16, cores=4, device="cpu")
    q, k, cache = torch.zeros(8, 2, 16), torch.zeros(8, 1, 16), torch.zeros(5, 1, 16)
    with pytest.raises(ValueError, match="a batch of 4 with 4 rows needs"):
        run(q, k, k, q, cache, cache, torch.arange(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), scale=1.0)
