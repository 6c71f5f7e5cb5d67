"""Runs the real target on the CPU with patch oea-topk on, and writes what came of it; see `test_oea_topk_model.py`,
which starts it. A process of its own: patches are chosen, and upstream's arguments published, once a process.

    SGLANG_PATCHES=+oea-topk SGLANG_PATCHES_OEA_K0=1 python oea_model.py FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import captured_states
import torch
from drafts import TARGET
from oea_paper import PREFIX, REQUESTS, RULES, WIDTH, text
from ranks import free_port
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_patches.runtime import _outcome, oea_topk


def passes(target: captured_states.Target) -> tuple[list[int], Callable[[], Any], Callable[[], Any]]:
    """Two requests are prefilled; one verify of chains and one decode of both, each to be run again and again."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    rows = [1, 2]
    target.run(ForwardMode.EXTEND, rows, [0, 0], [text(row, PREFIX) for row in rows])
    drafts = [text(10 + row, WIDTH) for row in rows]
    empty = torch.empty(0, dtype=torch.long)

    def verify() -> Any:
        mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
        positions = torch.arange(PREFIX, PREFIX + WIDTH).repeat(REQUESTS)
        info = EagleVerifyInput(
            draft_token=torch.tensor(drafts).flatten(),
            custom_mask=mask.expand(REQUESTS, WIDTH, WIDTH).flatten(),
            positions=positions,
            retrieve_index=empty,
            retrieve_next_token=empty,
            retrieve_next_sibling=empty,
            retrieve_cum_len=empty,
            spec_steps=3,
            topk=1,
            draft_token_num=WIDTH,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=PREFIX * REQUESTS,
            seq_lens_cpu=torch.tensor([PREFIX] * REQUESTS),
        )
        lengths = [PREFIX] * REQUESTS
        batch = target.batch(ForwardMode.TARGET_VERIFY, rows, lengths, drafts, positions=positions, spec_info=info)
        return target.runner.forward(batch).logits_output.next_token_logits.clone()

    def decode() -> Any:
        batch = target.batch(ForwardMode.DECODE, rows, [PREFIX] * REQUESTS, [draft[:1] for draft in drafts])
        return target.runner.forward(batch).logits_output.next_token_logits.clone()

    return [token for draft in drafts for token in draft], verify, decode


def calls() -> dict[str, Any]:
    """What upstream's patched places call that no pass of this model goes through, in the order they do."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.hash_topk import HashTopK
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.server_args import ServerArgs

    weights, ids, logits = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 8)
    router = topk.TopK(2, layer_id=1, is_draft=False)
    router.topk_config.output_format = topk.TopKOutputFormat.TRITON_KERNEL
    with (
        mock.patch.object(oea_topk, "bypassed") as bypassed,
        mock.patch.object(topk, "routing", return_value=[None] * 5, create=True),
    ):
        topk.BypassedTopKOutput(logits, logits, router.topk_config).router_logits  # noqa: B018
        router.forward_cuda(logits, logits)
        topk.build_precomputed_topk_output(weights, ids, router.topk_config, 1)
    hashed = HashTopK(2, 8, vocab_size=16, layer_id=1, is_draft=False)

    order: list[str] = []
    backend = SimpleNamespace(replay_session=nullcontext, replay=lambda *_: order.append("replay"))
    runner = mock.MagicMock(backend=backend, model_context=nullcontext)
    runner.model_runner.device_timer = None
    runner.load_batch.side_effect = lambda *_: order.append("load")
    runner._process_output_after_replay.side_effect = InterruptedError
    with (
        mock.patch.object(oea_topk, "before_replay", side_effect=lambda _: order.append("told")),
        suppress(InterruptedError),
    ):
        DecodeCudaGraphRunner.execute(runner, mock.MagicMock(forward_mode=ForwardMode.DECODE))

    refused = ""
    try:
        ServerArgs(
            model_path=str(TARGET), device="cpu", attention_backend="torch_native",
            enable_torch_compile=True,
        ).resolve_once()  # fmt: skip
    except oea_topk.settings.BadSetting as error:
        refused = str(error)
    told = [call.args[1] for call in bypassed.call_args_list]
    return {"bypassed": told, "hash routing": oea_topk._KEY in vars(hashed), "replay": order, "refused": refused}


def main(out: Path) -> None:
    runner = captured_states.make_runner(0, 1, free_port())
    target = captured_states.Target(runner)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        _, verify, decode = passes(target)
        for name, rule in RULES.items():
            counted = None if rule is None else replace(rule, count=True)
            oea_topk.settings.rule = lambda rule=counted: rule  # type: ignore[misc, assignment]
            before, oea_topk.experts = oea_topk.counts.passes.copy(), oea_topk.Experts()
            logits = {"verify": verify(), "decode": decode()}
            passes_new = dict(oea_topk.counts.passes - before)
            found[name] = {"logits": logits, "passes": passes_new, "experts": oea_topk.experts.figures()}
    outcome = _outcome.outcomes()["oea-topk"]
    oea_topk.settings.rule = lambda: RULES["one"]  # type: ignore[assignment]
    torch.save({"found": found, "outcome": outcome, "calls": calls()}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
