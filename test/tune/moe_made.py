"""Sizes, configurations and samples of `tune moe` for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_patches.tune.moe import journal, parent
from sglang_patches.tune.moe.geometry import GEMMS, Geometry, kimi_k25
from sglang_patches.tune.moe.space import Config

COMMITTED = Path(__file__).parents[2] / "benchmark/results/h200-moe-tune"
COMMITTED_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
KIMI = kimi_k25()
INT4 = Geometry(384, 7168, 256, 8, "int4_w4a16", (0, 32))
FP8 = Geometry(384, 7168, 256, 8, "fp8_w8a8", (128, 128))
OWN = Config(16, 32, 64, 1, 0, 0)
FAST, SLOW = Config(16, 32, 256, 1, 2, 4), Config(16, 64, 128, 1, 4, 3)


def cell(record: str, config: Config, gemm: str = "down", tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {"record": record, "gemm": gemm, "tokens": tokens, "config": str(config), **more}


def layers(*pairs: tuple[float, float], tokens: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        {"record": "layer", "tokens": tokens, "us": {"upstream": [theirs], "tuned": [ours]}, "differs": 0.0, **more}
        for theirs, ours in pairs
    ]


def facts(own: dict[int, Config], kept: dict[int, Config]) -> dict[str, Any]:
    return {
        "record": "facts", "device": "Imagined GPU", "bandwidth": 4e12, "layers": 4, "triton": "3.8.0", "torch": "2",
        "sglang": "0.5.23",
        "names": {"gate_up": "T.json", "down": "T_down.json"},
        "upstream": {str(at): {gemm: str(config) for gemm in GEMMS} for at, config in own.items()},
        "beyond": {str(at): {gemm: str(config) for gemm in GEMMS} for at, config in kept.items()},
    }  # fmt: skip


def final(tokens: int, **us: dict[Config, float]) -> dict[str, Any]:
    told = {gemm: {str(config): [value] for config, value in of.items()} for gemm, of in us.items()}
    return {"record": "final", "tokens": tokens, "round": 0, "us": told}


def measured_by_two(folder: Path) -> parent.Request:
    """A run on two GPUs: ours is faster at 1 token, no faster at 8, and 16 were not reached."""
    pair = {"gate_up": str(FAST), "down": str(FAST)}
    halves = [
        [
            facts({1: OWN}, {3: OWN}),
            final(1, gate_up={OWN: 20.0, FAST: 12.0}, down={OWN: 10.0, FAST: 7.0}),
            *layers((40, 30), (41, 31), (40, 30.1), pair=pair),
        ],
        [
            facts({8: OWN, 16: OWN}, {18: OWN, 385: SLOW}),
            final(8, gate_up={OWN: 20.0, FAST: 19.0}, down={OWN: 10.0, FAST: 10.0}),
            *layers((40, 39), (40, 41), (40, 40), tokens=8, pair={"gate_up": str(FAST), "down": str(OWN)}),
            final(16, gate_up={OWN: 20.0, FAST: 12.0}, down={OWN: 10.0, FAST: 7.0}),
            cell("failed", SLOW, tokens=8, why="out of shared memory"),
        ],
    ]
    for place, records in enumerate(halves):
        for record in records:
            journal.append(folder / f"samples-{place}.jsonl", record)
    return parent.Request(KIMI, (1, 8, 16), folder, ("0", "1"))


def one_count(folder: Path, final_: dict[str, Any], *layers_: dict[str, Any]) -> Any:
    """The result of samples of one token count."""
    for record in (facts({1: OWN}, {3: OWN}), final_, *layers_):
        journal.append(folder / "samples.jsonl", record)
    return parent.result(parent.Request(KIMI, (1,), folder, ("0",)))


FASTER = {"gate_up": {OWN: 20.0, FAST: 12.0}, "down": {OWN: 10.0, FAST: 7.0}}
SLOWER = {"gate_up": {OWN: 12.0, FAST: 20.0}, "down": {OWN: 7.0, FAST: 10.0}}
BOTH = {"gate_up": str(FAST), "down": str(FAST)}
