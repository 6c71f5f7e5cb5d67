"""What stands in for flashinfer's wrappers on a CPU, so that upstream's backend runs there, and the patch with it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Upstream names the device "cuda" and pins memory here and there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class Planner:
    """What flashinfer's compiled module does in a plan: it writes the work into the wrapper's integer workspace."""

    def plan(self, _f: Any, workspace: Any, _p: Any, qo: Any, kv: Any, lens: Any, _h: int, _d: int, c: bool) -> None:
        parts = [torch.tensor([len(lens), int(c)]), qo, kv, lens]
        whole = torch.cat([part.flatten().cpu().int() for part in parts])
        workspace[: whole.numel()].copy_(whole)


class Attention:
    """Stands in for ``flashinfer.BatchMLAPagedAttentionWrapper``, with its buffers and rules under CUDA graphs."""

    tape: list[Any] | None = None

    def __init__(
        self,
        workspace: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        self._use_cuda_graph = use_cuda_graph
        self._float_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(512, dtype=torch.int32)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._cached_module = Planner()

    def plan(
        self, qo: Any, kv: Any, indices: Any, lens: Any, heads: int, ckv: int, kpe: int, page: int, causal: bool,
        scale: float, q_type: Any, kv_type: Any,
    ) -> None:  # fmt: skip
        assert page == 1
        assert q_type == kv_type == torch.bfloat16
        assert indices.dtype == torch.int32
        self._sm_scale = scale
        self._cached_module.plan(None, self._int_workspace_buffer, None, qo, kv, lens, heads, ckv, causal)
        if self._use_cuda_graph:
            self._kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._kv_indices_buf = indices

    def run(self, q: Any, q_rope: Any, ckv: Any, kpe: Any, out: Any, return_lse: bool = False) -> torch.Tensor:
        assert ckv.dtype == kpe.dtype == torch.bfloat16
        assert not return_lse
        work = functools.partial(self.attend, q, q_rope, ckv, kpe, out)
        if Attention.tape is not None:
            Attention.tape.append(work)
        work()
        return out  # type: ignore[no-any-return]

    def attend(self, q: Any, q_rope: Any, ckv: Any, kpe: Any, out: Any) -> None:
        batch, causal, *rest = self._int_workspace_buffer.tolist()
        qo, kv, lens = rest[: batch + 1], rest[batch + 1 : 2 * batch + 2], rest[2 * batch + 2 : 3 * batch + 2]
        for b in range(batch):
            rows = self._kv_indices_buf[kv[b] : kv[b] + lens[b]].long()
            keys = torch.cat((ckv[rows, 0], kpe[rows, 0]), dim=-1).float()
            query = torch.cat((q[qo[b] : qo[b + 1]], q_rope[qo[b] : qo[b + 1]]), dim=-1).float()
            scores = torch.einsum("qhd,kd->hqk", query, keys) * self._sm_scale
            n = query.shape[0]
            if causal:
                hidden = torch.ones(n, lens[b], dtype=torch.bool).triu(lens[b] - n + 1)
                scores.masked_fill_(hidden, float("-inf"))
            latent = keys[:, : ckv.shape[-1]]
            out[qo[b] : qo[b + 1]] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), latent).to(out.dtype)


class Ragged:
    """A prefill without a prefix never reads the pool."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def begin_forward(self, **_: Any) -> None: ...


def stand_in(modules: Iterable[ModuleType]) -> None:
    """Have upstream's modules use the stand-ins."""
    for module in modules:
        vars(module).update(BatchMLAPagedAttentionWrapper=Attention, BatchPrefillWithRaggedKVCacheWrapper=Ragged)
