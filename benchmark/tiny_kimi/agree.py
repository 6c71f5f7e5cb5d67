"""Whether two servers of the tiny model give the same greedy tokens, and if not, whether rounding explains it.

    python -m benchmark.tiny_kimi.agree --a http://127.0.0.1:30000 --b http://127.0.0.1:30001 --out agree.json

In float32 the answers must be equal. In bfloat16 another order of the same sums (tensor parallel, verifying instead of
decoding) moves logits a little, and from the first token that differs the texts part for good. So at that position the
float32 model in `transformers` says how far each server's token lies below the best one; rounding explains it if that
is no more than what bfloat16 weights and activations move a logit there.

Each side is a running server, or a file that an earlier run wrote. Ends with 0 if all answers are equal or explained,
else 1. Writes the answers, both servers' code states, and every difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

from benchmark.tiny_kimi.reference import load_text_model
from benchmark.tiny_kimi.speed import PROMPTS, measure

TARGET = Path(__file__).parents[2] / "test/models/tiny-kimi"


def answers(source: str, side: str, texts: list[str], tokens: int) -> dict[str, Any]:
    """``output_ids`` (prompts, tokens) of a server, with the code state it tells; or side `side` of an earlier file."""
    if not source.startswith(("http://", "https://")):
        earlier = json.loads(Path(source).read_text())
        if earlier["prompts"] != texts:
            raise SystemExit(f"{source}: made with other prompts ({len(earlier['prompts'])}); expected the same file's")
        taken: dict[str, Any] = earlier[side]
        return taken
    given = []
    for done, text in enumerate(texts):
        given.append(measure(source, text, tokens)["output_ids"])
        print(f"\r{side}: {done + 1}/{len(texts)} prompts", end="", flush=True)
    print()
    state = httpx.get(f"{source}/server_info", timeout=60).json().get("sglang_patches")
    return {"output_ids": given, "sglang_patches": state}


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first position at which the tokens differ."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)


@torch.inference_mode()
def explain(models: list[DeepseekV3ForCausalLM], ids: list[int], one: int, other: int) -> dict[str, float]:
    """How far each token's float32 logit after `ids` lies below the best, and how far bfloat16 moves any logit there.

    Args:
        models: the target in float32 and in bfloat16.
    """
    exact, rounded = (model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float() for model in models)
    best = exact.max()
    return {
        "a_below_best": float(best - exact[one]),
        "b_below_best": float(best - exact[other]),
        "bfloat16_moves": float((exact - rounded).abs().max()),
    }


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, help="URL of a server, or a file of an earlier run (its side a)")
    parser.add_argument("--b", required=True, help="likewise (a file's side b)")
    parser.add_argument("--prompts", type=int, default=16, help="how many of the 48 held-out prompts (default 16)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer (default 128)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()][: options.prompts]
    sides = {name: answers(getattr(options, name), name, texts, options.tokens) for name in ("a", "b")}
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    models: list[DeepseekV3ForCausalLM] = []
    differences = []
    for index, text in enumerate(texts):
        one, other = (sides[name]["output_ids"][index] for name in ("a", "b"))
        at = first_difference(one, other)
        if at is None:
            continue
        models = models or [load_text_model(TARGET), load_text_model(TARGET, torch.bfloat16)]
        found = explain(models, tokenizer(text)["input_ids"] + one[:at], one[at], other[at])
        explained = max(found["a_below_best"], found["b_below_best"]) <= found["bfloat16_moves"]
        differences.append({"prompt": index, "position": at, **found, "explained": explained})
        told = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        print(f"prompt {index} differs from token {at}: {told}: {'rounding' if explained else 'NOT EXPLAINED'}")
    unexplained = [difference for difference in differences if not difference["explained"]]
    print(
        f"{len(texts) - len(differences)} of {len(texts)} answers equal, {len(unexplained)} not explained by rounding"
    )
    result = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "prompts": texts, **sides}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "differences": differences}) + "\n")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
