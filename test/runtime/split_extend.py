"""Runs the split extend kernels in triton's interpreter, and writes what they give beside references; see
`test_draft_extend_split_kv.py`, which starts it. A process of its own: triton reads TRITON_INTERPRET when it is
imported.

    python split_extend.py kernels FILE     the kernels alone, over shapes, against float32 attention in torch
    python split_extend.py backend FILE     the bundled draft on the CPU, extending through upstream's TritonAttnBackend
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # isort: skip

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import draft_extend_split_kv as patch
from sglang_patches.runtime._split_kv import check as split_check
from sglang_patches.runtime._split_kv import gate as needs
from sglang_patches.runtime.draft_extend_split_kv import check, gate, launch


class Shape(NamedTuple):
    """Lengths of the cached contexts, new tokens, heads, KV heads, DK, DV, multiprocessors, splits (None: as it
    follows)."""

    lengths: list[int]
    tokens: int
    heads: int
    kv_heads: int
    key_width: int = 32
    width: int = 32
    cores: int = 4
    override: int | None = None


SHAPES = {
    "one token of context": Shape([1], 4, 4, 1),
    "no context": Shape([0, 5], 2, 2, 2),
    "ragged": Shape([1, 200, 63, 64, 65], 4, 4, 2),
    "shorter than a split": Shape([3, 40], 2, 4, 2, cores=12),
    "padded rows of a graph batch": Shape([130, 0, 0], 4, 2, 2),
    "one long among short": Shape([700, 2, 9], 3, 4, 2, cores=8),
    "a head of its own for each": Shape([150], 4, 4, 4),
    "more rows than a block": Shape([150, 3], 5, 8, 2),
    "one token": Shape([150, 3], 1, 4, 2),
    "16 tokens": Shape([70], 16, 3, 3),
    "odd sizes": Shape([77, 140], 5, 6, 2, 24, 40),
    "wider than a merge block": Shape([100], 2, 4, 2, 160, 160),
    "one split": Shape([300, 10], 4, 4, 2, cores=8, override=1),
    "more splits than fit": Shape([300], 2, 2, 1, cores=1000, override=140),
}
# With these tiles; the others with those that follow.
TILES = {"ragged": launch.ROWS_32, "more rows than a block": launch.ROWS_16}


def problem(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Random tensors of a shape; slots that are nobody's are NaN, and slot 0 is far off."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(5)
    batch, total = len(shape.lengths), sum(shape.lengths)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    slots = torch.randperm(2 * total + 1, generator=generator)[:total] + 1

    def cache(width: int) -> torch.Tensor:
        made = torch.full((2 * total + 2, shape.kv_heads, width), float("nan"))
        made[slots] = random(total, shape.kv_heads, width)
        made[0] = 1e3
        return made.to(dtype)

    begins = [0, *torch.tensor(shape.lengths).cumsum(0).tolist()]
    # Parts of one row, as a layer's projection gives them; values apart, so that their strides are others.
    sizes = (shape.heads * shape.key_width, shape.kv_heads * shape.key_width)
    q, k = random(batch * shape.tokens, sum(sizes)).to(dtype).split(sizes, 1)
    v = random(batch * shape.tokens, shape.kv_heads * shape.width).to(dtype)
    return {
        "shape": shape,
        "tensors": (
            q.unflatten(1, (shape.heads, -1)),
            k.unflatten(1, (shape.kv_heads, -1)),
            v.unflatten(1, (shape.kv_heads, -1)),
        ),
        "caches": [cache(shape.key_width), cache(shape.width)],
        "begins": begins,
        "slots": slots,
        "scale": shape.key_width**-0.5,
        "tile": TILES.get(name),
    }


def reference(given: dict[str, Any], **scales: float) -> torch.Tensor:
    """Attention of each new token over its context and the new ones up to it, in float32, row by row, head by head."""
    shape, (q, k, v), out = given["shape"], given["tensors"], []
    for row in range(len(q)):
        request, i = divmod(row, shape.tokens)
        cached = given["slots"][given["begins"][request] : given["begins"][request + 1]]
        seen = slice(request * shape.tokens, request * shape.tokens + i + 1)
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            keys = torch.cat([given["caches"][0][cached, kv].float() * scales.get("k_scale", 1), k[seen, kv].float()])
            values = torch.cat([given["caches"][1][cached, kv].float() * scales.get("v_scale", 1), v[seen, kv].float()])
            out.append((keys @ q[row, head].float() * given["scale"]).softmax(0) @ values)
    return torch.stack(out).unflatten(0, (len(q), shape.heads))


def call(given: dict[str, Any], **scales: float) -> torch.Tensor:
    """The kernels as the hook calls them, with NaN in workspace and output."""
    shape: Shape = given["shape"]
    batch = len(shape.lengths)
    run = launch.SplitExtend(
        batch, *shape[1:6], cores=shape.cores, device="cpu", override=shape.override, tile=given["tile"]
    )
    run.workspace.fill_(float("nan"))
    out = torch.full((batch * shape.tokens, shape.heads, shape.width), float("nan"), dtype=given["tensors"][0].dtype)
    tensors: list[Any] = [*given["tensors"], out, *given["caches"]]
    tensors += [torch.tensor(given["begins"], dtype=torch.int32)]
    tensors += [torch.cat([given["slots"], torch.zeros(50, dtype=torch.int64)])]
    options: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0} | scales
    options |= {"mask": None, "score_mod": None, "sinks": None, "sliding_window_size": -1, "logit_cap": 0.0}
    options |= {"temperature_len": -1, "is_causal": True, "tokens": shape.tokens, "scale": given["scale"]}
    served = patch.Hook(run, shape.tokens)(*tensors, **options)
    assert served, (patch.backends.figures(), _outcome.outcomes().get(patch.PATCH))
    return out


def kernels() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    needs.COMPUTE = (torch.float32, *needs.COMPUTE)  # for a close comparison
    for name in SHAPES:
        given = problem(name)
        found[name] = {"split": call(given), "reference": reference(given)}
    given = problem("one long among short")
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 3.0}
    found["scaled cache"] = {"split": call(given, **scales), "reference": reference(given, **scales)}
    tensors: list[Any] = [*given["tensors"], *given["caches"], given["slots"], given["begins"]]
    found["float32 of the check"] = {
        "split": split_check.attention(*tensors, scale=given["scale"], **scales),
        "reference": reference(given, **scales),
    }
    found["check"] = {}
    for dtype, cache in ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, needs.FP8[0])):
        run = launch.SplitExtend(2, 4, 4, 2, 32, 32, cores=4, device="cpu")
        found["check"][str(cache)] = check.difference(run, tokens=4, dtype=dtype, cache_dtype=cache)
    # bfloat16 is left to a GPU: the interpreter's tl.dot gives 1e10 for two tiles of it.
    for dtype in (torch.float16, torch.float8_e4m3fn):
        given = problem("one long among short", torch.float16)
        given["caches"] = [cache.to(dtype) for cache in given["caches"]]
        found[str(dtype)] = {"split": call(given).float(), "reference": reference(given)}
    return found


def backend() -> dict[Any, Any]:
    import runners
    from ranks import free_port

    arguments, target = runners.start(free_port())
    from captured_states import Target
    from drafts import DRAFT
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    target.alloc_memory_pool()
    config = ModelConfig.from_server_args(arguments, model_path=str(DRAFT), is_draft_model=True)
    shared = {name: getattr(target, name) for name in ("req_to_token_pool", "token_to_kv_pool_allocator")}
    draft = runners.runner(arguments, config, is_draft_worker=True, **shared)
    draft.alloc_memory_pool(target.memory_pool_config)
    draft.model.set_embed(target.model.get_embed_and_head()[0])
    draft.init_attention_backends()
    draft.init_cuda_graphs()

    requests, generator = Target(draft), torch.Generator().manual_seed(11)
    tokens, contexts, rows = 4, [1, 133, 40], [1, 2, 3]
    cache = draft.token_to_kv_pool.get_kv_buffer(0)
    for buffer in cache:
        buffer.normal_(generator=generator)
    for row, context in zip(rows, contexts, strict=True):
        requests.table[row, :context] = torch.arange(requests.free, requests.free + context)
        requests.free += context
    count = tokens * len(rows)
    ids = torch.randint(13, 4096, (len(rows), tokens), generator=generator).tolist()
    info = EagleDraftExtendInput(
        hidden_states=torch.randn(count, 3 * target.model_config.hidden_size, generator=generator),
        num_correct_drafts=torch.tensor([3, 3, 3]),
        num_accept_tokens=torch.tensor([4, 4, 4]),
        num_tokens_per_req=tokens,
        num_tokens_for_logprob_per_req=tokens,
    )
    batch = requests.batch(
        ForwardMode.DRAFT_EXTEND_V2,
        rows,
        contexts,
        ids,
        spec_info=info,
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([tokens] * len(rows)),
        extend_prefix_lens=torch.tensor(contexts),
        extend_start_loc=torch.arange(len(rows)) * tokens,
        extend_seq_lens_cpu=[tokens] * len(rows),
        extend_prefix_lens_cpu=contexts,
        extend_logprob_start_lens_cpu=[tokens] * len(rows),
    )
    found: dict[Any, Any] = {}

    def extend(name: str) -> None:
        patch.backends.calls.clear()
        for buffer in cache:
            buffer[batch.out_cache_loc] = 0
        info.hidden_states = states.clone()
        output = draft.forward(batch).logits_output
        found[name] = {
            "logits": output.next_token_logits.clone(),
            "hidden": output.hidden_states.clone(),
            "calls": patch.backends.figures().get("calls"),
            "outcome": _outcome.outcomes().get(patch.PATCH),
        }

    states = info.hidden_states
    with torch.inference_mode():
        extend("torch_native")
        draft.attn_backend = TritonAttnBackend(draft)
        extend("triton")
        # As on a GPU, as far as the gate looks. Each launched program costs the interpreter 10 ms.
        os.environ[patch.SPLITS_VARIABLE] = "3"
        gate.capability = lambda model_runner: (9, 0)
        needs.COMPUTE = (torch.float32,)  # the type this draft computes in
        draft.attn_backend = TritonAttnBackend(draft)
        extend("split")
        patch.backends.outcomes.clear()
        os.environ[patch.VARIABLE] = "off"
        found["off"] = (hasattr(TritonAttnBackend(draft), patch.ATTRIBUTE), _outcome.outcomes()[patch.PATCH])
        os.environ[patch.VARIABLE] = "on"
        found["target's"] = hasattr(TritonAttnBackend(target), patch.ATTRIBUTE)
        found["a draft step's"] = hasattr(TritonAttnBackend(draft, skip_prefill=True), patch.ATTRIBUTE)
    return found


if __name__ == "__main__":
    torch.save({"kernels": kernels, "backend": backend}[sys.argv[1]](), sys.argv[2])
