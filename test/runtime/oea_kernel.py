"""Runs the kernel of oea-topk on the CPU, interpreted, beside the reference and upstream's router; see
`test_oea_topk_kernel.py`, which starts it. A process of its own: Triton decides once whether it interprets.

    python oea_kernel.py        (a line for each case that differs, and the number of cases at the end)
"""

from __future__ import annotations

import itertools
import os
import random

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

import torch

from sglang_patches.runtime.oea_topk import kernel, reference
from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

# The last has more rows than the kernel looks at at once.
SIZES = [(1, 8, 2), (5, 24, 4), (9, 384, 3)]
RULES = [
    Rule(k0=1),
    Rule(k0=2),
    Rule(k0=2, k_max=2),
    Rule(k0=1, rank_cap=5),
    Rule(k0=2, p=0.493),
    Rule(k0=2, p=0.871, rank_cap=4, k_max=2),
    Rule(k0=1, least=4, most=8),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def inputs(rows: int, experts: int, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, experts, generator=generator) * 2
    bias = torch.randn(experts, generator=generator) * 0.2
    if kind == "ties":
        logits, bias = logits.round().clamp(-1, 1), torch.zeros(experts)
    if kind == "odd":  # not-a-number, infinities, both zeros after the bias, negative scores
        logits[:, 0], logits[0, 1], logits[-1, 2], logits[-1, 3] = 0.0, float("nan"), float("inf"), -float("inf")
        bias[0], bias[4:] = -0.5, bias[4:] - 1
    return logits, bias


def differs(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> str:
    if not torch.equal(got[1], wanted[1]):
        return f"ids {got[1].tolist()} instead of {wanted[1].tolist()}"
    if not torch.allclose(got[0], wanted[0], rtol=1e-6, atol=1e-7, equal_nan=True):
        return f"weights {got[0].tolist()} instead of {wanted[0].tolist()}"
    return ""


def against_the_reference() -> int:
    chance, done = random.Random(0), 0
    for (rows, experts, top_k), rule, kind in itertools.product(SIZES, RULES, ("plain", "ties", "odd")):
        scoring = chance.choice(["sigmoid", "sigmoid", "softmax"]) if kind != "odd" else "sigmoid"
        if rows == max(SIZES)[0] and (kind == "odd" or rule not in RULES[::3]):
            continue  # the largest takes most of the time
        router = Router(
            top_k, scoring, chance.random() < 0.7, chance.choice([1.0, 2.827]), chance.choice([0, 0, 1]), 0.354
        )
        dtype = chance.choice(list(DTYPES.values()))
        logits, bias = inputs(rows, experts, kind, done)
        logits = logits.to(dtype)
        real = torch.tensor(chance.choice([rows, rows, rows // 2, 0]), dtype=torch.int32)
        added = bias if scoring == "sigmoid" else None
        # Counting changes nothing of what is chosen, nor does its absence.
        counted = done % 3 > 0
        seen, wanted = torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7])
        got = kernel.choose(logits, added, real, rule, router, seen if counted else None)
        why = differs(got, reference.choose(logits, added, real, rule, router, wanted if counted else None))
        if not torch.equal(seen, wanted):
            why += f" counts {seen.tolist()} instead of {wanted.tolist()}"
        if why:
            print(f"{rows} x {experts} top {top_k}, {real} real, {kind}, {dtype}, {rule}, {router}: {why}")
        done += 1
    return done


def against_upstream() -> int:
    """k0 = k: the ids and the very bits of the weights that upstream's Triton router gives."""
    import triton
    from sglang.kernels.ops.moe import moe_fused_gate as upstream

    done = 0
    for (rows, experts, top_k), kind, renormalize in itertools.product(SIZES, ("plain", "ties", "odd"), (True, False)):
        if rows == max(SIZES)[0] and kind != "ties":
            continue
        logits, bias = inputs(rows, experts, kind, 1000 + done)
        weights, ids = torch.empty(rows, top_k), torch.empty(rows, top_k, dtype=torch.int32)
        block = triton.next_power_of_2(experts)
        upstream._router_triton_kernel[(rows,)](
            logits, bias, bias, ids, ids, weights, ids, ids, rows, 2.827, 0.0,
            N=experts, K=top_k, K_ROUTED=top_k, BLOCK_M=1, BLOCK_N=block, BLOCK_K=triton.next_power_of_2(top_k),
            N_GROUP=1, TOPK_GROUP=1, EXPERTS_PER_GROUP=experts, BLOCK_G=1, SCORING_FUNC=0, SQRTSOFTPLUS_LOG1P=False,
            HAS_SOFTCAP=False, RENORMALIZE=renormalize, APPLY_SCALE=True, HAS_BIAS=True, HAS_TOKEN_BIAS=False,
            BIAS_ALT_TOKEN_ID=0, HAS_PADDING=False, HAS_PACKED=False, RENORMALIZE_EPSILON=0.0, USE_PDL=False,
            stride_bias=1, stride_bias_alt=1, stride_input_ids=1, stride_sm=experts, stride_sn=1, stride_wm=top_k,
            stride_wk=1, stride_im=top_k, stride_ik=1, stride_pm=top_k, stride_pk=1,
        )  # fmt: skip
        rule, router = Rule(k0=top_k, least=1), Router(top_k, renormalize=renormalize, scale=2.827)
        got = kernel.choose(logits, bias, torch.tensor(rows, dtype=torch.int32), rule, router)
        same = torch.equal(got[1], ids) and torch.equal(got[0].view(torch.int32), weights.view(torch.int32))
        if not same:
            print(f"upstream's {rows} x {experts} top {top_k}, {kind}: {differs(got, (weights, ids)) or 'last bits'}")
        done += 1
    return done


if __name__ == "__main__":
    print("cases", against_the_reference(), against_upstream())
