"""Verifies batches whole and in slices with the real target on the CPU, and writes both; see
`test_eagle_verify_cuda_graph_slices.py`, which starts it. A process of its own: upstream publishes its arguments once a
process.

    python sliced_verify.py FILE

A CPU has no CUDA graphs: `Graphs` is upstream's runner as far as its decisions go, and runs a slice eager in place of a
replay, into buffers that the next slice overwrites as a replay overwrites a graph's outputs.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from captured_states import Target, make_runner  # sets the environment first
from ranks import free_port

import torch  # isort: skip
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # isort: skip
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner  # isort: skip

from sglang_patches.runtime.eagle_verify_cuda_graph import counting, slice_policy, slice_timing

WIDTHS = {"chain": 4, "tree": 8}
# Nodes of a tree of four branches: the parent of each of eight.
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 5]


class Graphs(DecodeCudaGraphRunner):
    """Captured up to ``largest`` requests, of ``width`` tokens each."""

    def __init__(self, model_runner: Any, largest: int, width: int) -> None:
        # Upstream's own __init__ captures.
        self.model_runner = model_runner
        self.attn_backend = model_runner.attn_backend
        self.device_module = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
        self.capture_bs, self.max_bs, self.captured_req_width = [1, largest], largest, width
        self.disable_padding = self.ragged_verify_mode = self.is_encoder_decoder = False
        self.enable_two_batch_overlap = self.enable_pdmux = self.record_nolora_graph = False
        self.require_mlp_tp_gather = self.require_attn_tp_gather = self.require_mlp_sync = False
        self.attention_graph_variants = None
        self.executed: list[int] = []
        self.fail_at = 0
        self.buffers: dict[str, torch.Tensor] = {}

    def execute(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
        self.executed.append(forward_batch.batch_size)
        if len(self.executed) == self.fail_at:
            raise RuntimeError("this replay fails")
        output = self.model_runner.forward(forward_batch).logits_output
        for name in ("next_token_logits", "hidden_states"):
            value = getattr(output, name)
            buffer = self.buffers.setdefault(
                name, value.new_empty((self.max_bs * self.captured_req_width, value.shape[1]))
            )
            buffer[: len(value)] = value
            buffer[len(value) :] = float("nan")  # padding
            setattr(output, name, buffer[: len(value)])
        return output


def drafts(target: Target, kind: str, lengths: list[int], generator: torch.Generator) -> Any:
    """Requests of these committed lengths, in the pools, and the batch that verifies a draft of each."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    width, count = WIDTHS[kind], len(lengths)
    first = 1 if kind == "chain" else 20
    rows = list(range(first, first + count))

    def text(n: int) -> list[int]:
        return torch.randint(13, 4096, (n,), generator=generator).tolist()

    target.run(ForwardMode.EXTEND, rows, [0] * count, [text(length) for length in lengths])
    mask, depths = torch.eye(width, dtype=torch.bool), [0] * width
    for node in range(1, width):
        parent = node - 1 if kind == "chain" else PARENTS[node]
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    tokens = [text(width) for _ in rows]
    positions = torch.cat([torch.tensor(depths) + length for length in lengths])
    nodes = torch.arange(count * width).view(count, width)
    info = EagleVerifyInput(
        draft_token=torch.tensor(tokens).flatten(),
        custom_mask=mask.expand(count, width, width).flatten(),
        positions=positions,
        retrieve_index=nodes,
        retrieve_next_token=nodes,
        retrieve_next_sibling=nodes,
        retrieve_cum_len=None,
        spec_steps=3,
        topk=1 if kind == "chain" else 4,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=torch.tensor(lengths),
    )
    more = {"lora_ids": [None] * count, "rids": [str(row) for row in rows], "sampling_info": SimpleNamespace()}
    return target.batch(ForwardMode.TARGET_VERIFY, rows, lengths, tokens, positions=positions, spec_info=info, **more)


def main(file: str) -> None:
    runner = make_runner(0, 1, free_port())
    target = Target(runner)
    generator = torch.Generator().manual_seed(11)
    found: dict[Any, Any] = {}

    def verify(batch: Any) -> dict[str, Any]:
        counting.passes.counts.clear()
        counting.passes.failures.clear()
        written = [runner.token_to_kv_pool.get_key_buffer(layer) for layer in (0, 11)]
        for buffer in written:
            buffer[batch.out_cache_loc] = 0
        output = runner.forward(batch).logits_output
        return {
            "logits": output.next_token_logits.clone(),
            "hidden": output.hidden_states.clone(),
            "kv": torch.cat([buffer[batch.out_cache_loc].flatten() for buffer in written]),
            "counts": {tuple(part.value for part in key): n for key, n in counting.passes.counts.items()},
            "failures": dict(counting.passes.failures),
            "executed": list(graphs.executed),
            "decided": slice_policy.figures(),
        }

    with torch.inference_mode():
        for kind, lengths, largest in (("chain", [5, 17, 9, 30, 1, 12, 22], 3), ("tree", [7, 19, 3, 26, 11], 2)):
            batch = drafts(target, kind, lengths, generator)
            graphs = Graphs(runner, largest, WIDTHS[kind])
            runner.decode_cuda_graph_runner = graphs
            slice_policy.set_decision(slice_policy.Decision(len(lengths), "the test", graphs))
            found[kind, "sliced"] = verify(batch)
            slice_policy.set_decision(None)
            graphs.executed.clear()
            found[kind, "whole"] = verify(batch)
            slice_policy.set_decision(slice_policy.Decision(len(lengths), "the test", graphs))
            graphs.fail_at = 2
            found[kind, "failing"] = verify(batch)
            graphs.executed.clear()
            found[kind, "after a failure"] = verify(batch)
        slice_policy.SLICEABLE = (*slice_policy.SLICEABLE, "TorchNativeAttnBackend")
        graphs = Graphs(runner, 2, 4)
        runner.decode_cuda_graph_runner = graphs
        runner.req_to_token_pool.size = 5
        counting.passes.failures.clear()
        worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=runner), spec_v2_attn_backends=())
        slice_timing.decide(worker)
        found["measured"] = slice_policy.figures(), graphs.executed, dict(counting.passes.failures)
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
