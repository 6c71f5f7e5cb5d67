"""Runs the split verify kernels in triton's interpreter, and writes what they give beside references; see
`test_mla_verify_split_kv_kernels.py`, which starts it. A process of its own: triton reads TRITON_INTERPRET when it is
imported.

    python split_verify.py kernels FILE     the kernels alone, over shapes, against float32 attention in torch
    python split_verify.py backend FILE     the real target on the CPU, verifying through upstream's TritonAttnBackend
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # isort: skip

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import mla_verify_split_kv as patch
from sglang_patches.runtime._split_kv import gate as needs
from sglang_patches.runtime.mla_verify_split_kv import check, gate, launch

# Each: lengths of the cached contexts, draft tokens, heads, DV, PE, multiprocessors, splits (None: as it follows).
SHAPES: dict[str, tuple[list[int], int, int, int, int, int, int | None]] = {
    "one token of context": ([1], 4, 8, 32, 16, 4, None),
    "no context": ([0, 5], 2, 4, 32, 16, 4, None),
    "ragged": ([1, 200, 63, 64, 65], 4, 8, 32, 16, 4, None),
    "shorter than a split": ([3, 40], 2, 8, 32, 16, 12, None),
    "padded rows of a graph batch": ([130, 1, 1], 4, 8, 32, 16, 4, None),
    "one long among short": ([700, 2, 9], 3, 4, 32, 16, 8, None),
    "8 tokens, 16 heads": ([150], 8, 16, 32, 16, 4, None),
    "one draft token": ([150, 3], 1, 8, 32, 16, 4, None),
    "16 tokens": ([70], 16, 3, 32, 16, 4, None),
    "odd sizes": ([77, 140], 5, 3, 72, 24, 4, None),
    "wider than a merge block": ([100], 2, 8, 160, 16, 4, None),
    "64 rows": ([150, 3], 8, 8, 32, 16, 4, None),
    "one split": ([300, 10], 4, 4, 32, 16, 8, 1),
    "more splits than fit": ([300], 2, 4, 32, 16, 1000, 140),
}
# With these tiles; the others with those of the smallest GPU.
TILES = {"ragged": launch.ROWS_32, "64 rows": launch.ROWS_64, "8 tokens, 16 heads": launch.ROWS_64}


def problem(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Random tensors of a shape; slots that are nobody's are NaN, and slot 0 is far off."""
    lengths, tokens, heads, width, rope, cores, override = SHAPES[name]
    generator = torch.Generator().manual_seed(5)
    batch, total = len(lengths), sum(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = torch.randperm(2 * total + 1, generator=generator)[:total] + 1
    cache = torch.full((2 * total + 2, 1, width + rope), float("nan"))
    cache[slots] = random(total, 1, width + rope)
    cache[0] = 1e3
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.cat([slots, torch.zeros(50, dtype=torch.int64)])
    extend = random(batch * tokens, 1, width + rope)
    q = random(batch * tokens, heads, width + rope)
    return {
        "q": q.to(dtype),
        "k_extend": extend.to(dtype),
        "cache": cache.to(dtype),
        "indptr": indptr,
        "indices": indices,
        "tokens": tokens,
        "width": width,
        "scale": (width + rope) ** -0.5,
        "cores": cores,
        "override": override,
        "tile": TILES.get(name),
    }


def reference(given: dict[str, Any], k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
    """Attention of each draft token over its context and the drafts up to it, in float32, one request at a time."""
    tokens, width, out = given["tokens"], given["width"], []
    for request in range(len(given["indptr"]) - 1):
        begin, end = given["indptr"][request : request + 2].tolist()
        cached = given["cache"][given["indices"][begin:end], 0].float()
        drafts = slice(request * tokens, (request + 1) * tokens)
        own = given["k_extend"][drafts, 0].float()
        keys = torch.cat([cached * k_scale, own])
        values = torch.cat([cached[:, :width] * v_scale, own[:, :width]])
        scores = torch.einsum("thd,nd->htn", given["q"][drafts].float(), keys) * given["scale"]
        seen = torch.arange(len(keys))[None] <= torch.arange(tokens)[:, None] + len(cached)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("htn,nd->thd", weights, values))
    return torch.cat(out)


def call(given: dict[str, Any], heads: int, **options: Any) -> torch.Tensor:
    """The kernels as the hook calls them, with NaN in workspace and output."""
    tokens, width = given["tokens"], given["width"]
    batch = len(given["indptr"]) - 1
    run = launch.SplitVerify(
        batch, tokens, heads, width, cores=given["cores"], device="cpu", override=given["override"], tile=given["tile"]
    )
    run.workspace.fill_(float("nan"))
    out = torch.full((batch * tokens, heads, width), float("nan"), dtype=given["q"].dtype)
    hook = patch.Hook(run, tokens)
    served = hook(
        given["q"],
        given["k_extend"],
        given["k_extend"][..., :width],
        out,
        given["cache"],
        given["cache"][..., :width],
        torch.arange(batch + 1) * tokens,
        given["indptr"],
        given["indices"],
        None,
        True,
        None,
        tokens,
        options.get("k_scale", 1.0),
        options.get("v_scale", 1.0),
        given["scale"],
    )
    assert served, (patch.backends.figures(), _outcome.outcomes().get(patch.PATCH))
    return out


def kernels() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    needs.COMPUTE = (torch.float32, *needs.COMPUTE)  # for a close comparison
    for name, (_, _, heads, *_) in SHAPES.items():
        given = problem(name)
        found[name] = {"split": call(given, heads), "reference": reference(given)}
    given = problem("one long among short")
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    found["scaled cache"] = {"split": call(given, 4, **scales), "reference": reference(given, **scales)}
    found["check"] = {}
    for dtype, cache in ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, needs.FP8[0])):
        for tile in (launch.ROWS_16, launch.ROWS_32):
            run = launch.SplitVerify(2, 4, 8, 32, cores=4, device="cpu", tile=tile)
            found["check"][f"{cache} {tile.block_m}"] = check.difference(
                run, tokens=4, heads=8, width=32, rope=16, dtype=dtype, cache_dtype=cache
            )
    # bfloat16 is left to a GPU: the interpreter's tl.dot gives 1e10 for two tiles of it.
    for dtype in (torch.float16, torch.float8_e4m3fn):
        given = problem("one long among short", torch.float16)
        given["cache"] = given["cache"].to(dtype)
        found[str(dtype)] = {"split": call(given, 4).float(), "reference": reference(given)}
    return found


def backend() -> dict[Any, Any]:
    from captured_states import Target, make_runner
    from ranks import free_port

    runner = make_runner(0, 1, free_port())
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sliced_verify import drafts

    found: dict[Any, Any] = {}
    target = Target(runner)
    generator = torch.Generator().manual_seed(11)
    with torch.inference_mode():
        batch = drafts(target, "chain", [1, 133, 40], generator)

        def verify(name: str) -> None:
            patch.backends.calls.clear()
            for layer in range(12):
                runner.token_to_kv_pool.get_key_buffer(layer)[batch.out_cache_loc] = 0
            output = runner.forward(batch).logits_output
            found[name] = {
                "logits": output.next_token_logits.clone(),
                "hidden": output.hidden_states.clone(),
                "calls": patch.backends.figures().get("calls"),
                "outcome": _outcome.outcomes().get(patch.PATCH),
            }

        verify("torch_native")
        runner.attn_backend = TritonAttnBackend(runner)
        found["on a CPU"] = (runner.attn_backend.use_verify_shared_kv, _outcome.outcomes()[patch.PATCH])
        # As on a GPU, as far as the gate looks. Each launched program costs the interpreter 10 ms.
        os.environ[patch.SPLITS_VARIABLE] = "3"
        gate.capability = lambda model_runner: (9, 0)
        needs.COMPUTE = (torch.float32,)  # the type this target computes in
        runner.attn_backend = TritonAttnBackend(runner)
        verify("split")
        draft = SimpleNamespace(**{**vars(runner), "is_draft_worker": True, "decode_num_tokens_per_req": lambda: 4})
        found["draft's"] = TritonAttnBackend(draft).use_verify_shared_kv
        os.environ[patch.VARIABLE] = "off"
        found["off"] = TritonAttnBackend(runner).use_verify_shared_kv
    return found


if __name__ == "__main__":
    torch.save({"kernels": kernels, "backend": backend}[sys.argv[1]](), sys.argv[2])
