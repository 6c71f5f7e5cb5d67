"""Runs the real target on the CPU, one process a tensor-parallel rank, and writes what it captured; see
`test_deepseek_v2_embedding_capture_states.py`, which starts it. A process of its own: upstream publishes its arguments
and its parallel groups once a process.

    python captured_states.py TP FOLDER LIST...      (a LIST is ids in layer-output numbers: -1,5,8)

For every list and every kind of forward, ``FOLDER/rank<r>.pt`` gets the sequences (each a list of token ids whose last
token a row is for) and the captured states of their last tokens, (rows, K * hidden size); "deferred" has how often a
layer left its sum over the ranks to the next, None where this upstream's layers do not on a CPU.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import runners
import torch
from ranks import free_port
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

Batch = list[tuple[list[int], int]]


def make_runner(rank: int, tp: int, port: int) -> Any:
    """The target's `ModelRunner` of rank ``rank``, ready for forwards."""
    _, runner = runners.start(port, rank, tp)
    if runners.RELEASE == "0.5.9":  # with pools and backends from the start
        return runner
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


# A batch has them where attention backends have not.
POOLS = ("req_to_token_pool", "token_to_kv_pool", "attn_backend")


def fields_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


class Target:
    """Requests of a `ModelRunner`, placed in its pools by hand: row r of the table for request r."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.table = runner.req_to_token_pool.req_to_token
        self.free = 1  # slot 0 is padding

    def run(self, mode: ForwardMode, rows: list[int], prefixes: list[int], new: list[list[int]], **more: Any) -> Any:
        """One forward of ``new`` tokens behind ``prefixes`` committed ones; (tokens, K * hidden size) captured."""
        return self.runner.forward(self.batch(mode, rows, prefixes, new, **more)).logits_output.hidden_states.clone()

    def batch(self, mode: ForwardMode, rows: list[int], prefixes: list[int], new: list[list[int]], **more: Any) -> Any:
        """The `ForwardBatch` of ``new`` tokens behind ``prefixes`` committed ones, with fields ``more``."""
        for row, prefix, tokens in zip(rows, prefixes, new, strict=True):
            self.table[row, prefix : prefix + len(tokens)] = torch.arange(self.free, self.free + len(tokens))
            self.free += len(tokens)
        lengths = [len(tokens) for tokens in new]
        slots = torch.cat([self.table[r, p : p + n] for r, p, n in zip(rows, prefixes, lengths, strict=True)]).long()
        # Upstream counts the new tokens in, except for verify.
        totals = [p if mode.is_target_verify() else p + n for p, n in zip(prefixes, lengths, strict=True)]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.tensor([token for tokens in new for token in tokens]),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(totals),
            seq_lens_cpu=torch.tensor(totals),
            out_cache_loc=slots,
            seq_lens_sum=sum(totals),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_algorithm=self.runner.spec_algorithm,
        )
        if "positions" not in more:
            spans = [torch.arange(p, p + n) for p, n in zip(prefixes, lengths, strict=True)]
            more["positions"] = torch.cat(spans)
        if mode.is_extend() and not mode.is_target_verify():
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            more |= {
                "extend_num_tokens": sum(lengths),
                "extend_seq_lens": torch.tensor(lengths),
                "extend_prefix_lens": torch.tensor(prefixes),
                "extend_start_loc": torch.tensor(starts),
                "extend_seq_lens_cpu": lengths,
                "extend_prefix_lens_cpu": prefixes,
                "extend_logprob_start_lens_cpu": lengths,
            }
        more |= {name: getattr(self.runner, name) for name in POOLS if name in fields_of(ForwardBatch)}
        for name, value in more.items():
            setattr(batch, name, value)
        return batch


def record(runner: Any) -> dict[str, tuple[list[list[int]], torch.Tensor]]:
    """By kind of forward: the sequence that each row ends, and what was captured for it."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    generator = torch.Generator().manual_seed(7)

    def text(n: int) -> list[int]:
        return torch.randint(13, 4096, (n,), generator=generator).tolist()

    target = Target(runner)
    a, b = text(37), text(21)
    found: dict[str, tuple[list[list[int]], torch.Tensor]] = {}

    def ends(*sequences: tuple[list[int], int]) -> list[list[int]]:
        """Every sequence that begins as given and ends at one of the tokens from a place on."""
        return [tokens[: end + 1] for tokens, start in sequences for end in range(start, len(tokens))]

    states = target.run(ForwardMode.EXTEND, [1, 2], [0, 0], [a, b])
    found["prefill"] = ends((a, 0), (b, 0)), states
    first = target.run(ForwardMode.EXTEND, [3], [0], [a[:17]])
    second = target.run(ForwardMode.EXTEND, [3], [17], [a[17:]])
    found["chunked prefill"] = ends((a, 0)), torch.cat([first, second])
    # A hit of the radix cache: another request's slots stand in the table, only the rest is computed.
    c = a[:30] + text(6)
    target.table[4, :30] = target.table[1, :30]
    found["cached prefix"] = ends((c, 30)), target.run(ForwardMode.EXTEND, [4], [30], [c[30:]])
    next_a, next_b = text(1), text(1)
    states = target.run(ForwardMode.DECODE, [1, 2], [len(a), len(b)], [next_a, next_b])
    a, b = a + next_a, b + next_b
    found["decode"] = [a, b], states

    def verify(topk: int, drafts: list[list[int]], depths: list[int], mask: torch.Tensor) -> torch.Tensor:
        lengths = [len(a), len(b)]
        positions = torch.cat([torch.tensor(depths) + length for length in lengths])
        empty = torch.empty(0, dtype=torch.long)
        links = [name for name in fields_of(EagleVerifyInput) if name.startswith("retri")]
        if hasattr(EagleVerifyInput, "tree_topk"):
            cells = mask.expand(2, 4, 4).flatten()
        else:  # 0.5.9: committed tokens are part of the mask
            cells = torch.cat([torch.cat([mask.new_ones(4, n), mask], 1).flatten() for n in lengths])
        info = EagleVerifyInput(
            draft_token=torch.tensor(drafts).flatten(),
            custom_mask=cells,
            positions=positions,
            **dict.fromkeys(links, empty),
            spec_steps=3,
            topk=topk,
            draft_token_num=4,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor(lengths),
        )
        return target.run(ForwardMode.TARGET_VERIFY, [1, 2], lengths, drafts, positions=positions, spec_info=info)

    drafts = [text(4), text(4)]
    states = verify(1, drafts, [0, 1, 2, 3], torch.ones(4, 4, dtype=torch.bool).tril())
    found["verify a chain"] = ends((a + drafts[0], len(a)), (b + drafts[1], len(b))), states
    # Nodes 1 and 2 are children of 0, node 3 of 1.
    paths = [[0], [0, 1], [0, 2], [0, 1, 3]]
    mask = torch.zeros(4, 4, dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    states = verify(2, drafts, [len(path) - 1 for path in paths], mask)
    trees = [base + [draft[i] for i in path] for base, draft in zip((a, b), drafts, strict=True) for path in paths]
    found["verify a tree"] = trees, states
    return found


@contextmanager
def fused_all_reduce(sums: bool = True) -> Iterator[list[int]]:
    """Upstream's path for fused all-reduce; the kernel is its definition in torch: sum over ranks, add, RMSNorm.

    Args:
        sums: whether that kernel sums over the ranks at all.

    Yields:
        The rows of each call.
    """
    from sglang.srt.layers import flashinfer_comm_fusion
    from sglang.srt.layers.layer_boundary.residual import add_norm
    from sglang.srt.runtime_context import get_exec

    calls: list[int] = []

    def kernel(
        input_tensor: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        max_token_num: int,
        use_attn_tp_group: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(input_tensor))
        _, _, group = flashinfer_comm_fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)
        summed = input_tensor.clone()
        if sums:
            torch.distributed.all_reduce(summed, group=group.cpu_group)
        whole = summed + residual
        return whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + eps) * weight, whole

    with (
        mock.patch.multiple(add_norm, _is_sm90_supported=True, _is_flashinfer_available=True),
        mock.patch.object(flashinfer_comm_fusion, "flashinfer_allreduce_residual_rmsnorm", kernel),
        get_exec().comm.override(flashinfer_allreduce_fusion_backend="trtllm"),
    ):
        yield calls


def record_fused(runner: Any) -> dict[str, Any]:
    """What `main` writes about the fused path."""
    from sglang_patches.runtime.allreduce_fusion_gate import captured

    found: dict[str, Any] = {}
    captured.expect()
    with fused_all_reduce() as calls:
        found["fused"] = record(runner)
    found |= {"fused calls": len(calls), "alike": captured._Expected.share, "parts": ""}
    captured.expect()
    with fused_all_reduce(sums=False):
        try:
            record(runner)
        except captured.PartialSumCaptured as error:
            found["parts"] = str(error)
    return found


def main(rank: int, tp: int, port: int, folder: Path, lists: list[str]) -> None:
    from sglang_patches.runtime.deepseek_v2_embedding_capture.layer_ids import LayerIds, Request

    runner = make_runner(rank, tp, port)
    found: dict[str, Any] = {"deferred": None}
    # In other lanes no layer defers anything without the GPU's fused kernel.
    if defers := find_spec("sglang.srt.layers.layer_boundary"):
        from sglang.srt.layers.layer_boundary.residual.stream import OwedOutput

        found["deferred"] = 0

        def count(_: Any, __: Any, output: tuple[Any, Any]) -> None:
            found["deferred"] += isinstance(output[0], OwedOutput)

        for layer in runner.model.language_model.model.layers:
            layer.register_forward_hook(count)
    for text in lists:
        ids = tuple(int(part) for part in text.split(","))
        runner.model.set_eagle3_layers_to_capture(LayerIds(Request(ids, "the test", "layer-output", "the test")))
        with torch.inference_mode():
            found[text] = record(runner)
    if tp > 1 and defers:
        text = lists[0]
        ids = tuple(int(part) for part in text.split(","))
        runner.model.set_eagle3_layers_to_capture(LayerIds(Request(ids, "the test", "layer-output", "the test")))
        with torch.inference_mode():
            found |= record_fused(runner)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    size, out = int(sys.argv[1]), Path(sys.argv[2])
    others = torch.multiprocessing.get_context("spawn")
    chosen = free_port()
    workers = [others.Process(target=main, args=(r, size, chosen, out, sys.argv[3:])) for r in range(1, size)]
    for worker in workers:
        worker.start()
    main(0, size, chosen, out, sys.argv[3:])
    for worker in workers:
        worker.join()
    sys.exit(max((worker.exitcode or 0 for worker in workers), default=0))
