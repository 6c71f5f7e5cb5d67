"""Stand-ins for the tests of sliced verify: a batch whose every value tells its row, and what cuts and replays it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

WIDTH = 4
LENGTHS = [5, 2, 7, 1, 3]


def stand_in(layout: TreeMaskMode | None = TreeMaskMode.FULL_MASK) -> Any:
    """A model runner as far as cutting looks at it."""

    class Translator:
        def own_plan(self, batch: Any) -> Any:
            slots = batch.out_cache_loc
            return SimpleNamespace(bind=lambda batch, reader: setattr(batch, "kv_loc_plan", slots))

    mask = None if layout is None else SimpleNamespace(mode=layout)
    return SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=mask), kv_index_translator=Translator())


def verify_batch(mask: torch.Tensor | None = None, host: bool = True, **changes: Any) -> ForwardBatch:
    count = len(LENGTHS)
    tokens = torch.arange(count * WIDTH)
    lengths = torch.tensor(LENGTHS)
    info = EagleVerifyInput(
        draft_token=tokens,
        custom_mask=mask if mask is not None else torch.ones(1000, dtype=torch.bool),
        positions=tokens + 100,
        retrieve_index=tokens.view(count, WIDTH),
        retrieve_next_token=tokens.view(count, WIDTH),
        retrieve_next_sibling=tokens.view(count, WIDTH),
        retrieve_cum_len=None,
        spec_steps=3,
        topk=1,
        draft_token_num=WIDTH,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=sum(LENGTHS) if host else None,
        seq_lens_cpu=lengths if host else None,
    )
    return ForwardBatch(
        **{
            "forward_mode": ForwardMode.TARGET_VERIFY,
            "batch_size": count,
            "input_ids": tokens,
            "req_pool_indices": torch.arange(count) + 1,
            "seq_lens": lengths,
            "seq_lens_cpu": lengths if host else None,
            "seq_lens_sum": sum(LENGTHS) if host else None,
            "out_cache_loc": tokens + 1000,
            "positions": tokens + 100,
            "spec_info": info,
            "spec_algorithm": SpeculativeAlgorithm.EAGLE3,
            "lora_ids": [None] * count,
            "rids": [str(i) for i in range(count)],
            "global_num_token_non_padded_cpu": count * WIDTH,
            "can_run_decode_cuda_graph": True,
            **changes,
        }
    )


def output(rows: int, value: float, **more: Any) -> LogitsProcessorOutput:
    return LogitsProcessorOutput(
        next_token_logits=torch.full((rows, 3), value), hidden_states=torch.full((rows, 2), value), **more
    )


class Runner:
    """A graph runner with graphs of up to four requests, as far as the policy looks at it."""

    def __init__(self, **changes: Any) -> None:
        self.capture_bs, self.max_bs, self.captured_req_width = [1, 2, 4], 4, WIDTH
        self.require_mlp_tp_gather = self.require_attn_tp_gather = self.require_mlp_sync = False
        self.enable_two_batch_overlap = self.enable_pdmux = self.ragged_verify_mode = False
        self.disable_padding = self.is_encoder_decoder = False
        self.attention_graph_variants = None
        self.attn_backend: Any = type("TritonAttnBackend", (), {})()
        self.model_runner = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.EAGLE3)
        self.device_module = SimpleNamespace(
            synchronize=lambda: None,
            empty_cache=lambda: None,
            current_stream=lambda: SimpleNamespace(synchronize=self.wait),
        )
        self.waited = 0
        self.__dict__.update(changes)

    def wait(self) -> None:
        self.waited += 1

    def can_run_graph(self, batch: Any) -> bool:
        return bool(batch.batch_size <= self.max_bs)

    def execute(self, batch: Any) -> Any:
        return output(batch.batch_size * WIDTH, float(batch.input_ids[0]))


def model(runner: Any, **changes: Any) -> Any:
    made = stand_in()
    made.__dict__.update(
        decode_cuda_graph_runner=runner,
        lora_manager=None,
        model_config=SimpleNamespace(model_is_mrope=False, vocab_size=1000),
        hisparse_coordinator=None,
        canary_manager=None,
        ngram_embedding_manager=SimpleNamespace(enabled=False),
        req_to_token_pool=SimpleNamespace(size=16, req_to_token=torch.zeros(17, 4096)),
        device="cpu",
        gpu_id=0,
    )
    made.__dict__.update(changes)
    return made
