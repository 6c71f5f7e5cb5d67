"""flashinfer-mla-gather-cast: outputs with it and without, the plan against sets, the cast against ``.to``, limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import flashinfer_mla_gather_cast as patch
from sglang_patches.runtime.flashinfer_mla_gather_cast import crossover, pages
from sglang_patches.runtime.flashinfer_mla_gather_cast.crossover import Crossover
from sglang_patches.runtime.flashinfer_mla_gather_cast.pages import Pages, Shape

REPO = Path(__file__).parents[2]
MODES = ("extend", "decode", "decode graph", "verify", "verify graph", "draft", "draft graph", "draft extend")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU: gathered_attention.py --gpu")
def test_outputs_equal_upstreams_bit_for_bit() -> None:
    """Upstream's backend in all its modes, eager and captured; gathered and whole; in PyTorch and in Triton."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (REPO, REPO / "python", REPO / "sgl-kernel" / "python"))),
        "SGLANG_PATCHES": "torch-native-mla,cpu-eagle3,flashinfer-mla-gather-cast",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
    }
    script = Path(__file__).with_name("gathered_attention.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in MODES:
        for path in ("gathered", "whole"):
            assert f" {mode}, {path}\n" in done.stdout


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_kernels_compile_for_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, by Triton's own ptxas; the cast moves 16 bytes at a time, which rows of 576 bytes allow."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_patches.runtime.flashinfer_mla_gather_cast import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("room", "rows", "limit", "n_pages", "nan", "negative_nan"), "i32")
    pointers = {"source": "*u8", "out": "*i16", "totals": "*i64"}
    constants = {"PAGE": 64, "BLOCK": 1024, "PIECES": 9, "WIDTH": 64, "PER_BLOCK": 64, "BFLOAT": True}
    for kernel in (kernels.mark_kernel, kernels.list_kernel, kernels.remap_kernel, kernels.cast_kernel):
        names = kernel.arg_names
        fixed = {name: constants[name] for name in names if name in constants}
        kinds = {name: numbers.get(name) or pointers.get(name, "*i32") for name in names if name not in fixed}
        source = ASTSource(
            fn=kernel,
            signature=kinds | dict.fromkeys(fixed, "constexpr"),
            constexprs=fixed,
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n, kind in kinds.items() if kind[0] == "*"},
        )
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert made.asm["cubin"]
    assert "ld.global.v4.b32" in made.asm["ptx"]
    assert "st.global.v4.b32" in made.asm["ptx"]


def planned(slots: torch.Tensor, used: int, shape: Shape, limit: int) -> tuple[Pages, list[int]]:
    into, totals = Pages.empty(shape, "cpu"), torch.zeros(3, dtype=torch.int64)
    pages.plan(slots, torch.tensor([used], dtype=torch.int32), shape, limit, into, totals)
    return into, totals.tolist()


@settings(max_examples=150, deadline=None)
@given(
    page=st.sampled_from([1, 4, 64]),
    n_pages=st.integers(1, 30),
    share=st.floats(0, 1),
    wanted=st.lists(st.integers(0, 10**6), max_size=80),
    tail=st.integers(0, 5),
)
def test_plan_lists_each_page_once_and_keeps_order(
    page: int, n_pages: int, share: float, wanted: list[int], tail: int
) -> None:
    shape = Shape(rows=n_pages * page, dim=3, page=page)
    limit = int(share * n_pages)
    before = torch.tensor([w % shape.rows for w in wanted] + [-7] * tail, dtype=torch.int32)
    slots = before.clone()
    into, totals = planned(slots, len(wanted), shape, limit)
    read = sorted({int(s) // page for s in before[: len(wanted)]})
    whole = len(read) > limit
    n = int(into.count)
    assert into.order[:n].tolist() == (list(range(n_pages)) if whole else read)
    assert totals == [1, int(whole), len(read)]
    pool = torch.randn(shape.rows, 1, 3).to(torch.float8_e4m3fn)
    out = torch.full((shape.rows, 1, 3), float("nan"), dtype=torch.bfloat16)
    pages.cast(pool, into, shape, out)
    used = slice(0, len(wanted))
    assert torch.equal(out[slots[used].long()], pool.to(torch.bfloat16)[before[used].long()])
    assert slots[len(wanted) :].tolist() == [-7] * tail, "a stale tail must stay"
    assert bool(out[n * page :].isnan().all()), "no more than the planned pages may be written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte(dtype: torch.dtype) -> None:
    assert pages.every_byte_agrees("cpu", dtype)

    def off_by_one_bit(source: torch.Tensor, plan: Pages, shape: Shape, out: torch.Tensor) -> None:
        pages.cast(source, plan, shape, out)
        # One NaN's payload: the least that may differ.
        bits = out.view(torch.int16)
        bits[int(out.isnan().flatten().int().argmax()) // 64, 0, 63] ^= 1

    assert not pages.every_byte_agrees("cpu", dtype, off_by_one_bit)


def test_choose() -> None:
    assert crossover.choose({"0.25": 1.0, "0.5": 2.0, "1.0": 4.0}, 4.0) == 1.0
    assert crossover.choose({"0.25": 1.0, "0.5": 2.0, "1.0": 4.0}, 3.0) == 0.75
    assert crossover.choose({"0.5": 2.0, "0.25": 1.0, "1.0": 4.0}, 2.5) == 0.625
    assert crossover.choose({"0.25": 1.0, "0.5": 2.0}, 0.5) == 0.0


def test_saving_counts_layers_against_the_plan() -> None:
    measured = Crossover("measured", 1.0, upstream_ms=1.0, whole_ms=1.0, plan_ms=5.0, gather_ms={"0.0625": 0.5})
    assert measured.saves_ms(61) == pytest.approx(25.5)
    assert measured.saves_ms(1) == pytest.approx(-4.5)
    assert Crossover("set", 1.0).saves_ms(61) is None


@pytest.mark.parametrize(("text", "share"), [("auto", None), ("", None), ("0", 0.0), ("0.25", 0.25), ("1", 1.0)])
def test_asked_share(monkeypatch: pytest.MonkeyPatch, text: str, share: float | None) -> None:
    monkeypatch.setenv(crossover.VARIABLE, text)
    assert crossover.asked_share() == share


@pytest.mark.parametrize("text", ["nan", "1.1", "-0.1", "half"])
def test_refuses_what_is_no_share(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(crossover.VARIABLE, text)
    with pytest.raises(ValueError, match=rf"{crossover.VARIABLE}='{text}' is not a share"):
        patch.prepare(FlashInferMLAAttnBackend(None), None)


class FlashInferMLAAttnBackend:
    gather_cast: Any

    def __init__(self, pool: Any) -> None:
        self.token_to_kv_pool = pool


class TRTLLMMLABackend(FlashInferMLAAttnBackend): ...


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes upstream's real pool, and clears what other tests left."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(patch, "_shared", {})
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})

    def make(dtype: torch.dtype = torch.float8_e4m3fn, kind: type = MLATokenToKVPool) -> Any:
        return kind(128, 64, dtype, 8, 4, 2, "cpu", False)

    with get_parallel().override(dcp_enabled=False):
        yield make


def runner(**more: Any) -> Any:
    return SimpleNamespace(dtype=torch.bfloat16, server_args=SimpleNamespace(**({"enable_pdmux": False} | more)))


def test_applies_and_tells_memory_and_counts(pools: Any) -> None:
    backend = FlashInferMLAAttnBackend(pools())
    patch.prepare(backend, runner())
    told = _outcome.outcomes()[patch.PATCH]
    assert (told["result"], told["pool_rows"], told["plans"]) == ("not needed", 192, 0), "nothing has asked it yet"
    assert told["detail"].startswith("no forward has reached this attention backend yet; then up to ")
    wrapper = SimpleNamespace(_use_cuda_graph=False)
    slots = torch.tensor([65, 66, 130, 65], dtype=torch.int32)
    patch.plan(backend, wrapper, torch.tensor([0, 3, 4], dtype=torch.int32), slots)
    assert slots.tolist() == [1, 2, 66, 1]
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "applied"
    assert (told["pool_rows"], told["page_rows"], told["plans"], told["whole_pool_plans"]) == (192, 64, 1, 0)
    assert told["pages_read"] == 2
    second = FlashInferMLAAttnBackend(pools())
    patch.prepare(second, runner())
    assert second.gather_cast.shared is backend.gather_cast.shared, "one static buffer a process and kind of pool"
    assert _outcome.outcomes()[patch.PATCH]["result"] == "applied"


@pytest.mark.parametrize(
    ("what", "result", "why"),
    [
        ("bfloat16", "not needed", "the KV cache is torch.bfloat16 as the queries are"),
        ("e5m2", "failed", "the KV cache is torch.float8_e5m2, only"),
        ("subclass", "not needed", "attention backend TRTLLMMLABackend does not cast"),
        ("bfloat16 pool", "not needed", "the KV cache is torch.bfloat16 as the queries are"),
        ("pool", "failed", "KV pool is Other, only MLATokenToKVPool is known"),
        ("pdmux", "failed", "--enable-pdmux runs two forwards at once"),
        ("dcp", "failed", "decode context parallelism makes its own KV indices"),
        ("sharded", "failed", "the KV pool is sharded by layer"),
    ],
)
def test_leaves_upstreams_path_and_tells_why(pools: Any, what: str, result: str, why: str) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    class Other(MLATokenToKVPool): ...

    dtype = {"bfloat16": torch.bfloat16, "e5m2": torch.float8_e5m2}.get(what.split()[0], torch.float8_e4m3fn)
    pool = pools(dtype, Other if "pool" in what else MLATokenToKVPool)
    pool.layer_shard_enabled = what == "sharded"
    backend = (TRTLLMMLABackend if what == "subclass" else FlashInferMLAAttnBackend)(pool)
    with get_parallel().override(dcp_enabled=what == "dcp"):
        patch.prepare(backend, runner(enable_pdmux=what == "pdmux"))
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == result
    assert told["detail"].startswith(why)
    wrapper, slots = SimpleNamespace(_use_cuda_graph=False), torch.tensor([65], dtype=torch.int32)
    patch.plan(backend, wrapper, torch.tensor([0, 1], dtype=torch.int32), slots)
    assert slots.tolist() == [65]
    assert patch.attend(backend, wrapper, None, torch.zeros(0), None) is None


def test_small_pool_is_left_alone(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Crossover("measured", 1.0, upstream_ms=0.01, whole_ms=0.01, plan_ms=0.1, gather_ms={"0.0625": 0.01})
    monkeypatch.setattr(crossover, "Crossover", lambda *_: slow)
    backend = FlashInferMLAAttnBackend(pools())
    patch.prepare(backend, runner())
    assert backend.gather_cast is None
    assert _outcome.outcomes()[patch.PATCH]["result"] == "not needed"
    assert patch._shared == {}, "the static buffer must not stay"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("it is full"),
            "no memory for the static buffer; lower --mem-fraction-static (it is full)",
        ),
        (RuntimeError("no such instruction"), "RuntimeError: no such instruction"),
    ],
)
def test_what_fails_at_start_is_told_and_leaves_upstreams_path(
    pools: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(patch, "_share", full)
    backend = FlashInferMLAAttnBackend(pools())
    patch.prepare(backend, runner())
    assert backend.gather_cast is None
    assert _outcome.outcomes()[patch.PATCH] == {"result": "failed", "detail": told}


def test_a_graphs_whole_buffer_is_rewritten(pools: Any) -> None:
    """A graph reads by the lengths on the device; the view of its buffer is as long as the host's lengths say."""
    backend = FlashInferMLAAttnBackend(pools())
    patch.prepare(backend, runner())
    buffer = torch.tensor([130, 131, 65, 66, 67], dtype=torch.int32)
    wrapper = SimpleNamespace(_use_cuda_graph=True, _kv_indices_buf=buffer)
    indptr = torch.tensor([0, 2, 4], dtype=torch.int32)
    patch.plan(backend, wrapper, indptr, buffer[:3], again=True)
    assert wrapper.gather_cast_pages is None
    assert buffer.tolist() == [130, 131, 65, 66, 67], "upstream has yet to write these"
    patch.plan(backend, wrapper, indptr, buffer[:3])
    assert buffer.tolist() == [66, 67, 1, 2, 67]
    first = wrapper.gather_cast_pages
    patch.plan(backend, wrapper, indptr, buffer[:3])
    assert wrapper.gather_cast_pages is first, "captured kernels hold its addresses"


def test_flashinfers_wrapper_has_what_is_asked_of_it() -> None:
    """The real one; the stand-in has the same attributes."""
    from flashinfer import BatchMLAPagedAttentionWrapper

    indices = torch.zeros(4, dtype=torch.int32)
    real = BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.uint8), use_cuda_graph=True, kv_indices=indices)
    assert real._use_cuda_graph is True
    assert real._kv_indices_buf is indices
    assert BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.uint8))._use_cuda_graph is False


def test_a_pool_that_changed_its_size_is_refused(pools: Any) -> None:
    backend = FlashInferMLAAttnBackend(pools())
    patch.prepare(backend, runner())
    wrapper = SimpleNamespace(_use_cuda_graph=False)
    patch.plan(backend, wrapper, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([65], dtype=torch.int32))
    backend.token_to_kv_pool.kv_buffer[1] = backend.token_to_kv_pool.kv_buffer[1][:64]
    with pytest.raises(RuntimeError, match="layer 1 has 64 rows of KV, planned were 192"):
        patch.attend(backend, wrapper, SimpleNamespace(layer_id=1), torch.zeros(0), torch.zeros(0))
