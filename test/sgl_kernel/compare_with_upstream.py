"""Compare each function with SGLang's Triton kernel of the same meaning; run with TRITON_INTERPRET=1.

Ours are called through SGLang's own functions, with `sgl_kernel` standing for our build as in a served process, so that
argument order, dtypes and shapes are the real ones.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable

import torch
from draft_trees import Batch, make_batch

import sgl_kernel_cpu


def load_as_sgl_kernel() -> None:
    """Let `import sgl_kernel` find our build, as the patch that provides it does."""
    folder = sgl_kernel_cpu.__path__[0]
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["sgl_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


load_as_sgl_kernel()

from sglang.kernels.ops.kvcache import cache_move  # noqa: E402
from sglang.kernels.ops.sampling import murmur_hash  # noqa: E402
from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree  # noqa: E402
from sglang.srt.mem_cache import allocation  # noqa: E402

RNG = random.Random(7)
SHAPES = [(1, 1, 3, 4), (1, 4, 3, 8), (4, 1, 5, 6), (4, 4, 2, 8), (3, 8, 3, 20), (8, 2, 4, 5), (2, 3, 1, 4)]


def same(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for k, (ours, theirs) in enumerate(pairs):
        assert torch.equal(ours, theirs), f"{name}, output {k}:\nours   {ours.tolist()}\ntheirs {theirs.tolist()}"


def build(batch: Batch, seq_lens: torch.Tensor, mode: int, function: Callable[..., object]) -> list[torch.Tensor]:
    bs, n = len(seq_lens), batch.drafts
    size = bs * n * n + (int(seq_lens.sum()) * n if mode == spec_tree.TreeMaskMode.FULL_MASK else 0)
    out = [torch.ones(size, dtype=torch.bool), torch.full((bs * n,), -7), *torch.full((3, bs, n), -1)]
    trees = batch.parent_list, batch.selected_index, seq_lens
    function(*trees, *out, batch.topk, batch.steps, n, spec_tree.TreeMaskMode(mode))
    return out


def compare_trees(bs: int, topk: int, steps: int, drafts: int) -> None:
    batch = make_batch(RNG.randrange(10**6), bs, topk, steps, drafts)
    seq_lens = torch.tensor([RNG.randint(1, 30) for _ in range(bs)])
    for mode in (0, 1):
        ours = build(batch, seq_lens, mode, spec_tree.build_tree_kernel_efficient_func)
        theirs = build(batch, seq_lens, mode, spec_tree.sgl_build_tree_kernel_triton)
        same(f"build_tree mode {mode}", *zip(ours, theirs, strict=True))
    links = ours[2:]
    for _ in range(5):
        tokens, target = torch.randint(0, 3, (2, bs, drafts))

        def verify(
            function: Callable[..., object],
            tokens: torch.Tensor = tokens,
            target: torch.Tensor = target,
        ) -> list[torch.Tensor]:
            out = [torch.full(shape, -9, dtype=torch.int32) for shape in ((bs * drafts,), (bs, steps + 1), (bs,))]
            function(*out, tokens, *links, target)
            return out

        both = zip(verify(spec_tree.verify_tree_greedy_func), verify(spec_tree.verify_tree_greedy_triton), strict=True)
        same("verify_tree_greedy", *both)


def compare_cache_locs(bs: int, topk: int, steps: int, drafts: int) -> None:
    width = 40 + topk * steps
    table = torch.arange(12 * width, dtype=torch.int32).reshape(12, width)
    rows = torch.tensor(RNG.sample(range(12), bs))
    start = torch.tensor([RNG.randint(0, 20) for _ in range(bs)])
    end = start + torch.tensor([RNG.randint(0, drafts) for _ in range(bs)])
    upper = 1 << (bs - 1).bit_length()

    fresh, ours, theirs = torch.arange(int((end - start).sum())) + 9000, table.clone(), table.clone()
    args = start.int(), end.int(), fresh
    allocation.assign_req_to_token_pool_func(rows, ours, *args, bs)
    allocation.assign_req_to_token_pool[(bs,)](rows, theirs, *args, width, upper)
    same("assign_req_to_token_pool", (ours, theirs))

    lens = torch.full_like(start, drafts)
    got = cache_locs.assign_extend_cache_locs_func(rows, table, start, start + lens, bs, drafts, "cpu")
    want = torch.full_like(got, -7)
    cache_locs.assign_extend_cache_locs[(bs,)](rows, table, start, start + lens, want, width, upper)
    same("assign_extend_cache_locs", (got, want))
    got = cache_locs.assign_extend_cache_locs_uniform_func(rows, table, start, bs, drafts, "cpu")
    same("assign_extend_cache_locs, uniform", (got, want))

    slots = torch.randperm(bs * drafts)
    front = torch.tensor([RNG.randint(1, drafts) for _ in range(bs)], dtype=torch.int32)
    got, want = torch.zeros(bs * drafts).long(), torch.zeros(bs * drafts).long()
    cache_locs.fill_front_out_cache_loc_func(front, slots, got)
    window = slots.view(bs, -1)
    cache_locs.assign_extend_cache_locs[(bs,)](
        torch.arange(bs), window, torch.zeros_like(front), front, want, drafts, upper
    )
    same("fill_front_out_cache_loc", (got, want))

    got, want = torch.full((2, bs * topk * steps), -7)
    cache_locs.assign_draft_cache_locs_contiguous_func(rows, table, start, got, topk, steps)
    cache_locs.assign_draft_cache_locs_contiguous[(bs,)](rows, table, start, want, width, topk, steps, BS=bs)
    same("assign_draft_cache_locs_contiguous", (got, want))


def compare_accepted(bs: int, topk: int, steps: int, drafts: int) -> None:
    width = steps + 1
    lens = torch.tensor([RNG.randint(1, width) for _ in range(bs)], dtype=torch.int32)
    tokens = torch.randint(0, 1000, (bs, width), dtype=torch.int32)
    got, want = torch.full((2, bs), -7, dtype=torch.int32)
    eagle.fill_bonus_tokens_func(tokens, lens, got, width, bs)
    eagle.fill_bonus_tokens[(bs,)](tokens, lens, want, width)
    same("fill_bonus_tokens", (got, want))

    index = torch.randint(0, bs * drafts, (bs, width), dtype=torch.int32)
    index[torch.arange(width) >= lens[:, None]] = -1
    slots, size = torch.randperm(bs * drafts), bs * width
    got, want = torch.full((2, size), -7)
    eagle.fill_accept_out_cache_loc_func(index, slots, got, size)
    eagle.fill_accept_out_cache_loc[(size,)](index, slots, want, 1 << (size - 1).bit_length())
    same("fill_accept_out_cache_loc", (got, want))

    starts, fresh = torch.arange(bs) * drafts, torch.randint(0, 99, (bs,))
    for select in (None, starts + torch.randint(0, drafts, (bs,))):
        ids = torch.randint(100, 999, (bs * drafts,))
        got, want = ids.clone(), ids.clone()
        args = starts, torch.full((bs,), drafts), fresh, select
        multi_layer_eagle.rotate_input_ids(got, *args)
        multi_layer_eagle.rotate_input_ids_kernel[(bs,)](want, *args, BLOCK_SIZE=8 if select is None else 4096)
        same("rotate_input_ids", (got, want))


def compare_kv_copy(n: int) -> None:
    config = {"bytes_per_tile": 128, "byte_tiles": 3, "num_warps": 4}
    buffers = [torch.randn(32, 2, 40) for _ in range(4)]
    src, tgt = torch.randint(0, 32, (n,)), torch.randperm(32)[:n]
    results = []
    for ours in (True, False):
        copies = [b.clone() for b in buffers]
        pointers = torch.tensor([b.data_ptr() for b in copies], dtype=torch.uint64)
        strides = torch.tensor([b.stride(0) * b.itemsize for b in copies])
        upper = 1 << (n - 1).bit_length()
        if ours:
            cache_move.copy_all_layer_kv_cache_func(pointers, strides, tgt, src, n, upper, config)
        else:
            grid = len(copies), config["byte_tiles"]
            cache_move.copy_all_layer_kv_cache_tiled[grid](
                pointers, strides, tgt, src, n, upper, BYTES_PER_TILE=config["bytes_per_tile"]
            )
        results.append(copies)
    same("copy_all_layer_kv_cache", *zip(*results, strict=True))


def compare_hash() -> None:
    seeds = torch.tensor([RNG.randrange(2**63) for _ in range(3)], dtype=torch.uint64)
    positions, columns = torch.tensor([0, 17, 2**31 + 5]), torch.arange(50)
    want = torch.empty(3, 50, dtype=torch.uint32)
    murmur_hash.murmur_hash32_kernel[(3, 1)](seeds, positions, columns, want, 3, 50, BLOCK_SIZE=64)
    same("murmur_hash32", (murmur_hash.murmur_hash32(seeds, positions, columns), want))


def main() -> None:
    torch.manual_seed(7)
    for shape in SHAPES:
        compare_trees(*shape)
        compare_cache_locs(*shape)
        compare_accepted(*shape)
    for n in (1, 5, 20):
        compare_kv_copy(n)
    compare_hash()
    print("compared 9 functions and the hash")


if __name__ == "__main__":
    main()
