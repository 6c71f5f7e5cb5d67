"""Decode speed of two running servers on the same prompts, request by request in turn, with the code state of both.

    python -m benchmark.tiny_kimi.speed --a http://127.0.0.1:30000 --b http://127.0.0.1:30001 --out speed.json

Greedy, one request at a time. Prints tokens/s of A and B and the ratio A/B with a 95 % bootstrap interval over prompts;
prints what differs between their code states; writes every sample and the whole provenance document of each server.
Servers whose tokens differ are not compared, and a server that tells no such document is not measured: exit status 1.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from sglang_patches.document import diff, schema, server
from sglang_patches.document.unnamed import unnamed
from sglang_patches.errors import PatchError

PROMPTS = Path(__file__).parents[2] / "test/models/prompts.jsonl"


def measure(url: str, text: str, tokens: int) -> dict[str, Any]:
    """One greedy request: seconds from sending to the whole answer, tokens, verify passes (decode steps if none)."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    started = time.perf_counter()
    answer = httpx.post(f"{url}/generate", json={"text": text, "sampling_params": params}, timeout=600)
    seconds = time.perf_counter() - started
    answer.raise_for_status()
    body = answer.json()
    count = body["meta_info"]["completion_tokens"]
    steps = body["meta_info"].get("spec_verify_ct") or count
    return {"seconds": seconds, "tokens": count, "steps": steps, "output_ids": body["output_ids"]}


def rate(samples: list[dict[str, Any]], rows: np.ndarray) -> float:
    """Tokens per second over the samples with these indexes."""
    return sum(samples[i]["tokens"] for i in rows) / sum(samples[i]["seconds"] for i in rows)


def outcomes(url: str) -> dict[str, Any]:
    """What each patch of a server did so far."""
    told = httpx.get(f"{url}/server_info", timeout=60).json()["sglang_patches"]
    found: dict[str, Any] = told.get("outcomes", {})
    return found


def different(a: schema.Document, b: schema.Document) -> str:
    """What differs between the code states of A and B, in one sentence."""
    return diff.summary(a, b, diff.diff(a, b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, help="URL of the first server")
    parser.add_argument("--b", required=True, help="URL of the second server")
    parser.add_argument("--prompts", type=int, default=24, help="how many of the 48 held-out prompts (default 24)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request (default 128)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all samples")
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text().splitlines()][: arguments.prompts]
    urls = {"a": arguments.a, "b": arguments.b}
    try:
        documents = {name: server.ask(url) for name, url in urls.items()}
    except PatchError as error:
        raise SystemExit(f"speed: {error}") from None
    for url in urls.values():
        measure(url, texts[0], 8)  # warm
    samples: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    for done, text in enumerate(texts):
        for name in ("a", "b") if done % 2 == 0 else ("b", "a"):
            samples[name].append(measure(urls[name], text, arguments.tokens))
        print(f"\r{done + 1}/{len(texts)} prompts", end="", flush=True)
    print()
    for text, left, right in zip(texts, samples["a"], samples["b"], strict=True):
        if left.pop("output_ids") != right.pop("output_ids"):
            raise SystemExit(f"the servers' tokens differ on {text!r}: not the same work, so nothing to compare")
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(texts), len(texts)) for _ in range(2000)]
    everything = np.arange(len(texts))
    ratios = [rate(samples["a"], rows) / rate(samples["b"], rows) for rows in draws]
    low, high = np.quantile(ratios, [0.025, 0.975])
    result: dict[str, Any] = {"ratio": rate(samples["a"], everything) / rate(samples["b"], everything)}
    result["interval_95"] = [float(low), float(high)]
    for name, taken in samples.items():
        steps = sum(sample["steps"] for sample in taken)
        result[name] = {
            "tokens_per_s": rate(taken, everything),
            "tokens_per_step": sum(sample["tokens"] for sample in taken) / steps,
            "ms_per_step": 1e3 * sum(sample["seconds"] for sample in taken) / steps,
            "document": unnamed(documents[name].model_dump(mode="json")),
            "outcomes": outcomes(urls[name]),
        }
        print(name, {key: round(value, 3) for key, value in result[name].items() if isinstance(value, float)})
    print(f"ratio a/b {result['ratio']:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    print(different(documents["a"], documents["b"]))
    result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    result["load_average"] = psutil.getloadavg()
    result["samples"] = samples
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
