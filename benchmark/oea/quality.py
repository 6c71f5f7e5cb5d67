"""How far patch oea-topk moves the bundled target's next-token distributions, on a CPU, in 2 to 4 minutes.

    SGLANG_PATCHES=+oea-topk SGLANG_PATCHES_OEA_K0=1 python -m benchmark.oea.quality --out benchmark/results/NAME

The target continues held-out prompts greedily as upstream does. Then upstream's own `ModelRunner` is fed these
continuations, in batches of verify and decode passes as a server runs them, with the rule and without: the same tokens,
the same batches, float32. Of each position: the divergence KL(without || with) in nats, and whether both have the same
best token. Of each pass: the different experts that a layer loads. The folder gets `table.md`, and `samples.json` with
everything behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import captured_states
import numpy as np
import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_patches import provenance
from sglang_patches.runtime import oea_topk
from sglang_patches.runtime.oea_topk.settings import Rule

REPO = Path(__file__).parents[2]
PROMPT, CONTINUATION, WIDTH = 24, 32, 4
RULES: dict[str, Rule | None] = {"off": None, "k0=1": Rule(k0=1, least=1), "k0=1, none added": Rule(1, 1, least=1)}
#: Phase and requests of a pass; a verify pass has `WIDTH` tokens of each.
PASSES = [("verify", requests) for requests in (1, 2, 4, 8, 16)] + [("decode", requests) for requests in (4, 16)]
Ids = list[list[int]]


class Model:
    """The target, and the experts that its layers load."""

    def __init__(self) -> None:
        self.target = captured_states.Target(captured_states.make_runner(0, 1, captured_states.free_port()))
        self.loaded: list[int] = []
        self.watched = False
        for module in self.target.runner.model.modules():
            if isinstance(module, TopK):
                module.register_forward_hook(self._count)

    def _count(self, _module: Any, _inputs: Any, output: Any) -> None:
        if self.watched:
            self.loaded.append(len(torch.unique(output.topk_ids)))

    def prefill(self, prompts: Ids) -> torch.Tensor:
        """Begin anew with these requests; the best next token of each."""
        self.target.free = 1
        logits = self._run(ForwardMode.EXTEND, [0] * len(prompts), prompts)
        return logits.argmax(-1)

    def _run(self, mode: ForwardMode, lengths: list[int], new: Ids, **more: Any) -> torch.Tensor:
        rows = list(range(1, len(new) + 1))
        batch = self.target.batch(mode, rows, lengths, new, **more)
        return self.target.runner.forward(batch).logits_output.next_token_logits

    def decode(self, length: int, tokens: Ids) -> torch.Tensor:
        """One more token of each request, behind `length` of each; logits ``[requests, vocabulary]``."""
        return self._run(ForwardMode.DECODE, [length] * len(tokens), tokens)

    def verify(self, length: int, chains: Ids) -> torch.Tensor:
        """A chain of each request; logits ``[requests * width, vocabulary]``."""
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        count, width = len(chains), len(chains[0])
        positions, empty = torch.arange(length, length + width).repeat(count), torch.empty(0, dtype=torch.long)
        info = EagleVerifyInput(
            draft_token=torch.tensor(chains).flatten(),
            custom_mask=torch.ones(width, width, dtype=torch.bool).tril().expand(count, -1, -1).flatten(),
            positions=positions, retrieve_index=empty, retrieve_next_token=empty, retrieve_next_sibling=empty,
            retrieve_cum_len=empty, spec_steps=width - 1, topk=1, draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=length * count,
            seq_lens_cpu=torch.tensor([length] * count),
        )  # fmt: skip
        return self._run(ForwardMode.TARGET_VERIFY, [length] * count, chains, positions=positions, spec_info=info)

    def continuations(self, prompts: Ids, tokens: int) -> Ids:
        """Greedy ones."""
        chosen = [self.prefill(prompts)]
        for at in range(tokens - 1):
            chosen.append(self.decode(PROMPT + at, chosen[-1][:, None].tolist()).argmax(-1))
        return torch.stack(chosen, 1).tolist()  # type: ignore[no-any-return]

    def forced(self, phase: str, prompts: Ids, continuations: Ids) -> torch.Tensor:
        """Logits after each token of the continuations, fed as they stand: ``[requests, tokens, vocabulary]``.

        The experts that passes load are in `loaded`.
        """
        self.watched = False
        self.prefill(prompts)
        self.watched, found = True, []
        width = WIDTH if phase == "verify" else 1
        step = self.verify if phase == "verify" else self.decode
        for at in range(0, len(continuations[0]), width):
            logits = step(PROMPT + at, [tokens[at : at + width] for tokens in continuations])
            found.append(logits.view(len(prompts), width, -1).clone())
        self.watched = False
        return torch.cat(found, 1)


def read_prompts(count: int) -> Ids:
    """The first tokens of so many held-out prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REPO / "test/models/tiny-kimi")
    texts = [json.loads(line)["text"] for line in (REPO / "test/models/prompts.jsonl").open()]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:PROMPT] for text in texts]
    long = [one for one in ids if len(one) == PROMPT][:count]
    if len(long) < count:
        raise SystemExit(
            f"quality: {len(long)} prompts have {PROMPT} tokens, {count} are wanted\n  remedy     --prompts"
        )
    return long


def compare(off: torch.Tensor, on: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(off || on) in nats and equality of the best token, ``[requests, tokens]`` each."""
    one, other = off.double().log_softmax(-1), on.double().log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1), off.argmax(-1) == on.argmax(-1)


def interval(by_prompt: np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% bootstrap interval; whole prompts are drawn, for their tokens belong together."""
    means = by_prompt.mean(1)
    drawn = np.random.default_rng(0).choice(means, (4000, len(means))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(means.mean()), float(low), float(high)


def measure(model: Model, prompts: Ids) -> Iterator[dict[str, Any]]:
    """A row for each kind of pass and rule."""
    oea_topk.settings.rule = lambda: None  # type: ignore[misc, assignment]
    whole = [prompts[at : at + 16] for at in range(0, len(prompts), 16)]
    continuations = [one for group in whole for one in model.continuations(group, CONTINUATION)]
    for phase, requests in PASSES:
        logits: dict[str, torch.Tensor] = {}
        loaded: dict[str, list[int]] = {}
        for name, rule in RULES.items():
            oea_topk.settings.rule = lambda rule=rule: rule  # type: ignore[misc, assignment]
            model.loaded = []
            groups = [slice(at, at + requests) for at in range(0, len(prompts), requests)]
            logits[name] = torch.cat([model.forced(phase, prompts[g], continuations[g]) for g in groups])
            loaded[name] = model.loaded
        for name in RULES:
            kl, same = compare(logits["off"], logits[name])
            yield {
                "phase": phase,
                "requests": requests,
                "tokens": requests * (WIDTH if phase == "verify" else 1),
                "rule": name,
                "kl": interval(kl.numpy()),
                "kl_p99": float(np.quantile(kl.numpy(), 0.99)),
                "agreement": interval(same.double().numpy()),
                "experts_per_layer": float(np.mean(loaded[name])),
                "samples": {
                    "kl": [[float(f"{value:.4g}") for value in row] for row in kl.tolist()],
                    "same_best_token": same.int().tolist(),
                    "experts": np.bincount(loaded[name]).tolist(),
                },
            }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| pass | tokens | rule | experts a layer loads | KL, nats | its 99% quantile | same best token |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        kl, same = row["kl"], row["agreement"]
        lines.append(
            f"| {row['phase']} of {row['requests']} | {row['tokens']} | {row['rule']} "
            f"| {row['experts_per_layer']:.2f} | "
            f"{kl[0]:.4f} ({kl[1]:.4f}-{kl[2]:.4f}) | {row['kl_p99']:.3f} | "
            f"{same[0]:.1%} ({same[1]:.1%}-{same[2]:.1%}) |"
        )
    return lines


def main() -> None:
    """Measure and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for table.md and samples.json")
    parser.add_argument("--prompts", type=int, default=48, help="a multiple of 16")
    given = parser.parse_args()
    state = provenance.code_state()
    if "oea-topk" not in [patch["name"] for patch in state["patches"]] or oea_topk.settings.rule() is None:
        raise SystemExit("quality: the patch is off\n  remedy     SGLANG_PATCHES=+oea-topk SGLANG_PATCHES_OEA_K0=1")
    from sglang_patches.nccl.provenance import whole

    prompts = read_prompts(given.prompts)
    begun = time.monotonic()
    told: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.oea.quality", *sys.argv[1:]],
        "code_state": state,
        "provenance": whole(),
        "prompts": len(prompts),
        "positions": len(prompts) * CONTINUATION,
        "rows": [],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    model = Model()  # weights are loaded outside of inference mode
    with torch.inference_mode():
        for row in measure(model, prompts):
            told["rows"].append(row)
            told["seconds"] = round(time.monotonic() - begun, 1)
            print(table([row])[-1], file=sys.stderr, flush=True)
            (given.out / "samples.json").write_text(json.dumps(told) + "\n")
            (given.out / "table.md").write_text("\n".join(table(told["rows"])) + "\n")


if __name__ == "__main__":
    main()
