"""Upstream's FlashInfer MLA backend with the patch and without, in one process, over pools and requests of our making.

Shared by the measurement (`run.py`) and the comparison of outputs (``test/runtime/gathered_attention.py``). Upstream's
backends, indices updaters, translator, pools and verify input are the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

REPO = Path(__file__).parents[2]
PATCH = "flashinfer-mla-gather-cast"
_one_rank = ExitStack()  # to the end of the process


@dataclass(frozen=True)
class Sizes:
    """``captured``: requests of the graphs; ``width``: tokens a request of a verify; ``steps``: of a draft."""

    device: str
    latent: int
    rope: int
    heads: int
    layers: int
    context: int
    captured: int
    width: int
    steps: int

    @property
    def dim(self) -> int:
        return self.latent + self.rope


def publish_arguments(device: str) -> None:
    """Upstream's process-wide arguments, which its backends ask."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    backend, dtype = ("torch_native", "float32") if device == "cpu" else ("flashinfer", "bfloat16")
    arguments = ServerArgs(
        model_path=str(REPO / "test" / "models" / "tiny-kimi"), device=device, attention_backend=backend, dtype=dtype,
        sampling_backend="pytorch", grammar_backend="none", log_level="warning",
    )  # fmt: skip
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    else:  # resolved as they are made; ranks are asked of torch.distributed, where there is one
        runtime_context.publish(arguments, role="scheduler")
        _one_rank.enter_context(runtime_context.get_parallel().override(attn_tp_size=1))


def modules() -> tuple[ModuleType, ModuleType]:
    """Upstream's module as it is installed, and the patched one.

    Raises:
        RuntimeError: the patch is not switched on in this process.
    """
    import sglang.srt
    from sglang.srt.layers.attention import flashinfer_mla_backend as patched

    path = Path(sglang.srt.__path__[0]) / "layers" / "attention" / "flashinfer_mla_backend.py"
    if patched.__file__ == str(path):
        raise RuntimeError(
            f"the patch is off in this process: {patched.__file__} is upstream's\n  remedy     SGLANG_PATCHES=+{PATCH}"
        )
    spec = importlib.util.spec_from_file_location("upstreams_flashinfer_mla_backend", path)
    assert spec is not None
    assert spec.loader is not None
    upstreams = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = upstreams
    spec.loader.exec_module(upstreams)
    return upstreams, patched


def _translator(requests: Any, pool: Any, page: int, device: str) -> Any:
    """Upstream's, from places in the request table to slots of the pool; None in lanes whose backends do it alone."""
    if importlib.util.find_spec("sglang.srt.mem_cache.kv_index_translator") is None:
        return None
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    return KVIndexTranslator(
        req_to_token=requests.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=page,
        device=device,
    )


class Server:
    """A target backend and a draft's, over one pool (`pool`, or a new one of ``slots`` token slots)."""

    def __init__(
        self, module: ModuleType, sizes: Sizes, page: int, slots: int, requests: int, pool: Any = None
    ) -> None:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

        self.sizes, device = sizes, sizes.device
        self.pool = pool or MLATokenToKVPool(
            slots, page, torch.float8_e4m3fn, sizes.latent, sizes.rope, sizes.layers, device, False
        )
        self.requests = ReqToTokenPool(requests, sizes.context, device, False)
        self.translator = _translator(self.requests, self.pool, page, device)
        config = SimpleNamespace(
            num_attention_heads=sizes.heads, context_len=sizes.context, qk_nope_head_dim=128, v_head_dim=128,
            qk_rope_head_dim=sizes.rope, kv_lora_rank=sizes.latent, scaling=sizes.dim**-0.5,
        )  # fmt: skip
        runner = SimpleNamespace(
            model_config=config, device=device, req_to_token_pool=self.requests, token_to_kv_pool=self.pool,
            kv_index_translator=self.translator, page_size=page, dtype=torch.bfloat16, token_to_kv_pool_allocator=None,
            server_args=SimpleNamespace(enable_pdmux=False, page_size=page),
        )  # fmt: skip
        self.backend = module.FlashInferMLAAttnBackend(runner)
        self.backend.init_cuda_graph_state(sizes.captured, sizes.captured * sizes.width)
        self.draft = module.FlashInferMLAMultiStepDraftBackend(runner, 1, sizes.steps)
        self.draft.init_cuda_graph_state(sizes.captured, sizes.captured)

    def batch(self, mode: ForwardMode, rows: list[int], lens: list[int], **more: Any) -> Any:
        """One forward's batch: the requests in ``rows`` of the request table, of ``lens`` tokens."""
        host, device = torch.tensor(lens), self.sizes.device
        lengths, indices = host.to(device), torch.tensor(rows, device=device)
        plan = self.translator and self.translator.plan(
            req_pool_indices=indices, seq_lens=lengths, seq_lens_cpu=host, write_virtual=None
        )
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(rows), req_pool_indices=indices, seq_lens=lengths, seq_lens_cpu=host,
            seq_lens_sum=sum(lens), kv_loc_plan=plan, attn_attend_prefix_cache=None, attn_dcp_metadata=None,
            out_cache_loc=None,
            **({"spec_info": None, "positions": torch.zeros(len(rows), dtype=torch.int64, device=device)} | more),
        )  # fmt: skip

    def forward(self, backend: Any, batch: Any, q: torch.Tensor, split: bool) -> list[torch.Tensor]:
        """One step of all layers over ``q``, [layers, tokens, heads, latent + rope]; outputs by layer.

        ``split`` hands the two parts of a query over by themselves, as upstream's MLA models do.
        """
        method = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        outs, sizes = [], self.sizes
        for layer_id in range(sizes.layers):
            layer = SimpleNamespace(
                layer_id=layer_id, tp_q_head_num=sizes.heads, tp_k_head_num=1, tp_v_head_num=1, head_dim=sizes.dim,
                v_head_dim=sizes.latent, scaling=sizes.dim**-0.5, logit_cap=0.0,
            )  # fmt: skip
            whole = q[layer_id]
            rope = {"q_rope": whole[..., sizes.latent :]} if split else {}
            query = whole[..., : sizes.latent] if split else whole
            outs.append(method(query, None, None, layer, batch, save_kv_cache=False, **rope))
        return outs


def verify_input(n: int, device: str) -> Any:
    """A verify of ``n`` tokens a request."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return EagleVerifyInput(
        draft_token=nothing, custom_mask=nothing.bool(), positions=nothing, retrieve_index=nothing,
        retrieve_next_token=nothing, retrieve_next_sibling=nothing, retrieve_cum_len=nothing, spec_steps=n - 1, topk=1,
        draft_token_num=n, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=0, seq_lens_cpu=nothing,
    )  # fmt: skip


def draft_input() -> Any:
    """What the draft backend asks of upstream's draft input."""
    return SimpleNamespace(is_draft_input=lambda: True, ragged_verify_layout=None, kv_indptr=None, kv_indices=None)


def extend_input(rows: int, n: int) -> Any:
    """A draft extend of ``n`` tokens for each of ``rows`` requests."""
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    spec = object.__new__(EagleDraftInput)
    spec.num_correct_drafts, spec.num_tokens_per_req = torch.zeros(rows, dtype=torch.int64), n
    return spec
