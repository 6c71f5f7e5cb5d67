"""quick-launch: what Triton would launch is launched, and nothing of hooks, settings or arguments goes unnoticed.

Triton's own front end and launcher run here, on a GPU that is not there (`launches`). Speed needs a GPU.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import launches
import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import jit

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import quick_launch as patch
from sglang_patches.runtime.quick_launch import launch

BYTES = torch.zeros(4096, dtype=torch.uint8)
TYPES = (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[launches.Gpu]:
    with launches.gpu(monkeypatch) as made:
        yield made


def quick(function: Any, counts: launch.Counts | None = None, **options: Any) -> Any:
    return launch.quicken(jit.JITFunction(function, **options), counts or launch.Counts())


def tensor(dtype: torch.dtype = torch.int64, offset: int = 0) -> torch.Tensor:
    """``offset`` bytes behind an address that 16 divides."""
    assert BYTES.data_ptr() % 16 == 0
    size = dtype.itemsize
    return BYTES[offset : offset + 16 * size].view(dtype)


def own(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> Any:
    """As ``kernel[grid](...)`` of a kernel that is not quick."""
    return jit.KernelInterface.__getitem__(kernel, grid)(*arguments, **options)


def drawn(chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    whole = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64 - 1)

    def pointer() -> torch.Tensor:
        return tensor(chance.choice(TYPES), chance.choice((0, 8, 16, 32, 24)))

    def number() -> Any:
        return chance.choice((*whole, True, False, None, 1.0, 0.5))

    arguments = [
        pointer(),
        chance.choice((pointer(), None)),
        number(),
        number(),
        number(),
        chance.choice(((pointer(), 1), (pointer(), 16), (3, (2, 1)), (pointer(), pointer()), 7, ())),
        chance.choice((1, 2, 64, True, (1, 2), None, "text", tl.float32)),
    ]
    options: dict[str, Any] = {}
    if chance.random() < 0.5:
        options["KIND"] = chance.choice(("sum", "mean", 1, 1.5))
    if chance.random() < 0.5:
        options["last"] = chance.choice((pointer(), number()))
    if chance.random() < 0.4:
        options["num_warps"] = chance.choice((1, 2, 4, 8))
    if chance.random() < 0.2:
        options["num_stages"] = chance.choice((1, 3))
    if chance.random() < 0.05:
        options[chance.choice(("debug", "device", "nothing", "stream"))] = True
    return arguments, options


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_not_specialize": ["n", "pair"]},
        {"do_not_specialize_on_alignment": ["a", "m"]},
        {"do_not_specialize": [2, 3], "do_not_specialize_on_alignment": ["b", "n", "pair"]},
    ],
    ids=str,
)
def test_any_arguments_launch_what_triton_launches(gpu: launches.Gpu, options: dict[str, Any]) -> None:
    chance = random.Random(str(options))
    counts = launch.Counts()
    kernel = quick(launches.several, counts, **options)
    chosen: set[int] = set()
    refused = 0
    for _ in range(300):
        arguments, given = drawn(chance)
        grid = chance.choice(((1,), (2, 3), (4, 5, 6)))
        gpu.stream = chance.randrange(1000)
        runs = [lambda g=grid, a=arguments, o=given: own(kernel, g, *a, **o)]
        runs += [lambda g=grid, a=arguments, o=given: kernel[g](*a, **o)] * 2
        if chance.random() < 0.5:
            runs.reverse()
        (first, wanted), *others = [gpu.by(run) for run in runs]
        refused += isinstance(first, type)
        for result, launched in others:
            assert result is first
            assert [launches.less_hooks(each) for each in launched] == [launches.less_hooks(each) for each in wanted]
            assert all(a is b for x, y in zip(launched, wanted, strict=True) for a, b in zip(x[-1], y[-1], strict=True))
        chosen |= {each[4] for each in wanted}
    assert len(chosen) > 100
    assert 0 < refused < 100
    assert counts.quick[0] > 250


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a", tensor(), tensor(offset=8)),
        ("a", tensor(offset=8), tensor(offset=16)),
        ("a", tensor(torch.int32), tensor(torch.float32)),
        ("a", tensor(torch.uint8), tensor(torch.bool)),
        ("n", 1, 2),
        ("n", 16, 17),
        ("n", 2**31 - 1, 2**31),
        ("n", 2**63 - 1, 2**63),
        ("n", 1, True),
        ("n", 2, 2.0),
        ("n", 2, None),
        ("pair", (tensor(), 2), (tensor(offset=8), 2)),
        ("pair", (tensor(), 2), (tensor(), 1)),
        ("pair", (2, 3), (2, 3, 3)),
        ("W", 64, 128),
        ("KIND", "sum", "mean"),
        ("num_warps", 4, 8),
        ("num_stages", 3, 2),
    ],
    ids=str,
)
def test_what_triton_tells_apart_is_told_apart(gpu: launches.Gpu, name: str, before: Any, after: Any) -> None:
    counts = launch.Counts()
    kernel = quick(launches.several, counts)
    given = {"a": tensor(), "b": tensor(), "n": 2, "m": 3, "x": 0.5, "pair": (1, 2), "W": 64}
    first = kernel[(1,)](**given | {name: before})
    assert kernel[(1,)](**given | {name: before}) is first
    assert counts.quick == [1]
    second = kernel[(1,)](**given | {name: after})
    assert second is not first
    assert second is own(kernel, (1,), **given | {name: after})
    assert kernel[(1,)](**given | {name: before}) is first
    assert counts.quick == [2]


def test_a_launch_is_on_the_current_device_and_stream(gpu: launches.Gpu) -> None:
    kernel = quick(launches.with_global)
    held = kernel[(1,)]
    for device, stream in ((0, 7), (0, 8), (1, 8), (0, 7), (1, 9), (1, 9)):
        gpu.device, gpu.stream = device, stream
        held(tensor(), 2)
        assert gpu.launched[-1][3] == stream + 100 * device
        assert own(kernel, (1,), tensor(), 2) is held(tensor(), 2)


def test_hooks_that_come_later_are_called(gpu: launches.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = launch.Counts()
    kernel = quick(launches.with_global, counts)
    held = kernel[(3,)]
    seen: list[Any] = []

    def goes(expected: str) -> launches.Native:
        quick_before, usual_before = counts.quick[0], dict(counts.usual)
        held(tensor(), 2)
        if expected == "quick":
            assert (counts.quick[0], dict(counts.usual)) == (quick_before + 1, usual_before)
        else:
            assert (counts.quick[0], counts.usual[expected]) == (quick_before, usual_before.get(expected, 0) + 1)
        return gpu.launched[-1]

    goes("new")
    goes("quick")
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(seen.append)
        native = goes("hook")
        assert seen.append in native[8 + [None, *native[9:11]].index(chain)].calls
        assert native[8].get()["name"] == "with_global"
        chain.remove(seen.append)
        goes("quick")
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as set_later:
            set_later.setattr(knobs.runtime, name, seen.append)
            assert seen.append in goes("hook")[9:11]
        goes("quick")
    kernel.add_pre_run_hook(lambda *given, **options: seen.append(given))
    goes("hook")
    assert seen[-1][1] == 2
    kernel.pre_run_hooks.clear()
    with monkeypatch.context() as set_later:
        set_later.setattr(knobs.runtime, "add_stages_inspection_hook", lambda: ("key", "hash"))
        before = gpu.launched[-1][4]
        assert goes("hook")[4] != before
    goes("quick")
    for owner, name, value in (
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "consan"),
        (kernel, "debug", True),
    ):
        with monkeypatch.context() as set_later:
            set_later.setattr(owner, name, value)
            goes("debug")
        goes("quick")


def test_a_changed_global_is_refused_as_by_triton(gpu: launches.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = launch.Counts()
    kernel = quick(launches.with_global, counts)
    assert kernel.cache_key  # which Triton asks for when it compiles, and notes globals then
    held = kernel[(1,)]
    held(tensor(), 2)
    held(tensor(), 2)
    assert counts.quick == [1]
    with monkeypatch.context() as changed:
        changed.setattr(launches, "CONSTANT", tl.constexpr(5))
        with pytest.raises(RuntimeError, match="CONSTANT has changed"):
            held(tensor(), 2)
    held(tensor(), 2)
    assert (counts.quick, counts.usual) == ([2], {"new": 1, "globals": 1})


def test_kernels_that_triton_forgot_are_chosen_anew(gpu: launches.Gpu) -> None:
    kernel = quick(launches.with_global)
    first = kernel[(1,)](tensor(), 2)
    kernel.device_caches.clear()
    second = kernel[(1,)](tensor(), 2)
    assert second is not first
    assert kernel[(1,)](tensor(), 2) is second is own(kernel, (1,), tensor(), 2)


def test_other_grids_and_mistakes_are_tritons(gpu: launches.Gpu) -> None:
    counts = launch.Counts()
    kernel = quick(launches.with_global, counts)
    kernel[(2,)](tensor(), 2)
    for grid in (lambda bound: (bound["n"], 5), [2, 5], (2, 5, 1, 1), torch.Size((2, 5))):
        kernel[grid](tensor(), 2)
        assert gpu.launched[-1][:3] == (2, 5, 1)
    assert counts.quick == [0]
    for arguments, options in (((), {}), ((tensor(), 2, 3), {}), ((tensor(), 2), {"warmup": True})):
        told = []
        for run in (kernel[(2,)], jit.KernelInterface.__getitem__(kernel, (2,))):
            with pytest.raises(TypeError) as raised:
                run(*arguments, **options)
            told.append(raised.type)
        assert told == [TypeError, TypeError]
    with pytest.raises(KeyError, match="nothing"):
        kernel[(2,)](tensor(), 2, nothing=1)


def test_variants_are_bounded(gpu: launches.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_VARIANTS", 5)
    counts = launch.Counts()
    kernel = quick(launches.several, counts)
    for width in range(18):
        kernel[(1,)](tensor(), tensor(), 2, 3, 0.5, (), width)
        assert 1 <= counts.variants <= 5
    kernel[(1,)](tensor(), tensor(), 2, 3, 0.5, (), 17)
    assert counts.quick == [1]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("num_ctas", 2, 1),
        ("global_scratch_size", 8, 0),
        ("profile_scratch_size", 8, 0),
        ("gsan_enabled", True, 0),
        ("__class__", type("Other", (launches.nvidia.CudaLauncher,), {}), 0),
    ],
)
def test_kernels_that_need_more_than_a_launch_are_left(gpu: launches.Gpu, name: str, value: Any, kept: int) -> None:
    counts = launch.Counts()
    kernel = quick(launches.with_global)
    compiled = kernel[(1,)](tensor(), 2)
    setattr(compiled._run, name, value)
    launch.Variants(kernel, counts)._keep((0, "key"), compiled, (tensor(), 2), {})
    assert counts.variants == kept


def test_it_stays_tritons_object(gpu: launches.Gpu) -> None:
    jitted = jit.JITFunction(launches.with_global)
    registered = jit._triton_jit_function_registry[f"{jitted.module}:{jitted.fn.__qualname__}"]
    kernel = launch.quicken(jitted, launch.Counts())
    assert kernel is jitted is registered
    assert isinstance(kernel, jit.JITFunction)
    assert (type(kernel).__name__, repr(kernel)) == ("JITFunction", "JITFunction(launches:with_global)")
    assert (kernel.arg_names, hash(kernel)) == (["a", "n"], hash(jit.JITFunction(launches.with_global)))
    compiled = kernel.warmup(torch.int64, 2, grid=(1,))
    assert compiled is kernel[(1,)](tensor(), 2)
    assert len(gpu.launched) == 1


def test_compiled_kernels_and_callers_of_quick_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's compiler, and with its own launch of what came out."""
    with launches.gpu(monkeypatch, compiles=True) as gpu:
        counts = launch.Counts()
        monkeypatch.setattr(launches, "doubled", quick(launches.doubled, counts))
        kernel = quick(calling, counts)
        for _ in range(3):
            assert kernel[(1,)](tensor(), 2, num_warps=2) is own(kernel, (1,), tensor(), 2, num_warps=2)
        assert len(kernel[(1,)](tensor(), 2, num_warps=2).asm["cubin"]) > 1000
        assert len({launches.less_hooks(each)[:8] for each in gpu.launched}) == 1
        assert counts.quick == [3]


def calling(a, n):  # type: ignore[no-untyped-def]
    tl.store(a, launches.doubled(n))


def test_what_is_not_a_plain_kernel_is_left_as_it_is() -> None:
    counts = launch.Counts()

    def annotated(a, n: tl.int32):  # type: ignore[no-untyped-def]
        tl.store(a, n)

    def ours(a, q_key):  # type: ignore[no-untyped-def]
        tl.store(a, q_key)

    def many(*a):  # type: ignore[no-untyped-def]
        tl.store(a[0], 1)

    tuned = triton.autotune([triton.Config({})], key=[])(jit.JITFunction(launches.with_global))
    for left in (tuned, *map(jit.JITFunction, (annotated, ours, many))):
        before = type(left)
        assert launch.quicken(left, counts) is left
        assert type(left) is before
    assert counts.kernels == 0


@pytest.mark.parametrize(
    ("cuda", "version", "told"),
    [
        (None, "3.8.0", {"result": "not needed"}),
        ("13.0", "3.9.1", {"result": "not needed", "reason": "triton"}),
        ("13.0", "3.8.0", None),
    ],
)
def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch, cuda: str | None, version: str, told: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton, "__version__", version)
    patch._counts.cache_clear()
    try:
        kernel = patch.kernel(jit.JITFunction(launches.with_global))
        copies = patch.copies(test_where_it_is_used)
    finally:
        patch._counts.cache_clear()
    outcome = _outcome.outcomes().get(patch.PATCH)
    assert outcome is not None
    if told is None:
        assert (type(kernel), copies is not test_where_it_is_used) == (launch.JITFunction, True)
        assert outcome == {"kernels": 1, "variants": 0, "launches": {"quick": 0}}
    else:
        assert (type(kernel), copies) == (jit.JITFunction, test_where_it_is_used)
        assert {name: outcome[name] for name in told} == told
        assert version in outcome["detail"] or cuda is None


def test_the_outcome_is_applied_with_the_first_quick_variant(gpu: launches.Gpu) -> None:
    counts = launch.Counts(first=patch._applied)
    _outcome.live_figures(patch.PATCH, lambda: patch.figures(counts))
    kernel = quick(launches.with_global, counts)
    assert "result" not in _outcome.outcomes()[patch.PATCH]
    for _ in range(3):
        kernel[(1,)](tensor(), 2)
    outcome = _outcome.outcomes()[patch.PATCH]
    assert (outcome["result"], outcome["kernels"], outcome["variants"]) == ("applied", 1, 1)
    assert outcome["launches"] == {"quick": 2, "new": 1}
    merged = _outcome.merge([{patch.PATCH: outcome}, {patch.PATCH: outcome}])
    assert merged[patch.PATCH]["launches"] == {"quick": 4, "new": 2}


MODULES = {
    "sglang.kernels.ops.memory.small_copy": ["_small_copy_kernel"],
    "sglang.kernels.ops.attention.kv_indices": ["create_flashinfer_kv_indices_triton"],
    "sglang.kernels.ops.attention.metadata": ["get_num_kv_splits_triton"],
    "sglang.kernels.ops.speculative.cache_locs": [
        "assign_draft_cache_locs_contiguous",
        "generate_draft_decode_kv_indices",
    ],
    "sglang.kernels.ops.speculative.eagle": ["_verify_commit_outputs_kernel", "_prepare_draft_extend_lengths_kernel"],
    "sglang.kernels.ops.speculative.gather_spec_extras": ["_gather_rows_kernel"],
    "sglang.srt.mem_cache.allocation": ["assign_req_to_token_pool"],
}
SEEN = """
import importlib, json, sys
modules, forced = json.loads(sys.argv[1])
if forced:
    from sglang_patches.runtime import quick_launch
    from sglang_patches.runtime.quick_launch.launch import Counts
    counts = Counts()
    quick_launch._counts = lambda: counts
types = {}
for module, names in modules.items():
    for name in names:
        kernel = getattr(importlib.import_module(module), name)
        types[name] = type(kernel).__module__
copy = importlib.import_module("sglang.kernels.ops.memory.small_copy").try_small_copy
print(json.dumps([types, hasattr(copy, "__wrapped__"), "sglang_patches.runtime.quick_launch" in sys.modules]))
"""


@pytest.mark.parametrize("selection", ["quick-launch", "forced", "none"])
def test_upstreams_kernels(selection: str) -> None:
    """Of a GPU all that an EAGLE cycle launches are quick; without one, and with the patch off, they are upstream's."""
    command = [sys.executable, "-c", SEEN, json.dumps([MODULES, selection == "forced"])]
    environment = os.environ | {"SGLANG_PATCHES": "none" if selection == "none" else "quick-launch"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    types, wrapped, loaded = json.loads(done.stdout.splitlines()[-1])
    wanted = launch.__name__ if selection == "forced" else jit.__name__
    assert types == dict.fromkeys((name for names in MODULES.values() for name in names), wanted)
    assert (wrapped, loaded) == (selection == "forced", selection != "none")
