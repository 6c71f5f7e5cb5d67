"""The expert matrices that one rank holds: their sizes, their type, and how many bytes a forward reads of them.

Upstream keys its tables by experts and by the third dimension of the down projection's weights as they lie in memory:
the intermediate size, or half of it where two int4 numbers share a byte.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_patches.errors import PatchError

Gemm = Literal["gate_up", "down"]
GEMMS: tuple[Gemm, Gemm] = ("gate_up", "down")
Dtype = Literal["bfloat16", "float16", "fp8_w8a8", "int4_w4a16"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "fp8_w8a8", "int4_w4a16")
_BYTES: dict[str, float] = {"bfloat16": 2, "float16": 2, "fp8_w8a8": 1, "int4_w4a16": 0.5}


@dataclass(frozen=True)
class Geometry:
    """One rank's experts.

    Attributes:
        experts: held by the rank (all of them under tensor parallelism, its share under expert parallelism).
        intermediate: columns of one expert's gate projection on this rank.
        top_k: experts a token.
        dtype: of the weights.
        block_shape: rows and columns that share a scale: (128, 128) for fp8, (0, group size) for int4, else None.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    dtype: Dtype = "bfloat16"
    block_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        wanted = {"fp8_w8a8": lambda n, k: n > 0 and k > 0, "int4_w4a16": lambda n, k: n == 0 and k > 0}
        shape, fits = self.block_shape, wanted.get(self.dtype)
        if (shape is not None) != (fits is not None) or (shape and fits and not fits(*shape)):
            raise PatchError(
                f"{self.dtype} experts with block shape {shape}\n"
                "  expected   (rows, columns) for fp8_w8a8, (0, group size) for int4_w4a16, none otherwise\n"
                "  remedy     give --block-shape, or another --dtype"
            )
        if min(self.experts, self.hidden, self.intermediate, self.top_k) < 1 or self.top_k > self.experts:
            raise PatchError(
                f"{self.top_k} of {self.experts} experts a token, hidden {self.hidden}, intermediate "
                f"{self.intermediate}\n  expected   positive numbers, and no more experts a token than there are"
            )

    @property
    def upstream_dtype(self) -> str | None:
        """As upstream's file names have it; bfloat16 and float16 are not told there."""
        return self.dtype if self.dtype in ("fp8_w8a8", "int4_w4a16") else None

    @property
    def table_n(self) -> int:
        """The N of upstream's file names."""
        return self.intermediate // 2 if self.dtype == "int4_w4a16" else self.intermediate

    def shape(self, gemm: Gemm) -> tuple[int, int]:
        """(N, K) of one expert's matrix."""
        return (2 * self.intermediate, self.hidden) if gemm == "gate_up" else (self.hidden, self.intermediate)

    def expert_bytes(self, gemm: Gemm) -> float:
        """Of one expert's matrix, its scales left out."""
        n, k = self.shape(gemm)
        return n * k * _BYTES[self.dtype]

    def element_bytes(self) -> float:
        """Of one weight."""
        return _BYTES[self.dtype]

    def active(self, tokens: int) -> float:
        """Experts that a batch of `tokens` is expected to use, each token `top_k` distinct ones with equal chance."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)

    def document(self) -> dict[str, Any]:
        """JSON-able; `from_document` reads it."""
        return asdict(self)


def from_document(told: dict[str, Any]) -> Geometry:
    """What `Geometry.document` told."""
    shape = told["block_shape"]
    return Geometry(**{**told, "block_shape": tuple(shape) if shape else None})


def kimi_k25() -> Geometry:
    """One of eight ranks' share of Kimi-K2.5 in bfloat16."""
    from sglang_patches.bench import shard

    config = shard.target()
    return Geometry(
        config["n_routed_experts"],
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["num_experts_per_tok"],
    )


def of_model(folder: Path, tp: int, ep: int = 1) -> Geometry:
    """One rank's experts of a checkpoint, from its config.json.

    Args:
        tp: ranks of the server (`--tp-size`); with `ep` groups of experts each matrix is cut into tp / ep.

    Raises:
        PatchError: the file is not JSON, not of a MoE model, or the sizes do not divide.
        OSError: it cannot be read.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PatchError(f"{file}: not JSON: {error}\n  remedy     download the model again") from None
    config = whole.get("text_config", whole)
    quantization = config.get("quantization_config") or whole.get("quantization_config") or {}
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    intermediate = _first(config, "moe_intermediate_size", "intermediate_size")
    top_k = _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token")
    if not (experts and intermediate and top_k and config.get("hidden_size")):
        raise PatchError(
            f"{file}: no sizes of routed experts\n"
            "  remedy     give --experts, --hidden, --intermediate and --top-k in place of --model"
        )
    if tp % ep or experts % ep or intermediate % (tp // ep):
        raise PatchError(
            f"--tp {tp} --ep {ep}: {experts} experts of intermediate size {intermediate} do not divide by it\n"
            "  remedy     the server's own --tp-size and --ep-size"
        )
    dtype, shape = _dtype(quantization, config, whole)
    return Geometry(experts // ep, config["hidden_size"], intermediate // (tp // ep), top_k, dtype, shape)


def _first(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _dtype(
    quantization: dict[str, Any], config: dict[str, Any], whole: dict[str, Any]
) -> tuple[Dtype, tuple[int, int] | None]:
    """Type and block shape of the experts' weights; raises PatchError for one that this does not tune."""
    if shape := quantization.get("weight_block_size"):
        return "fp8_w8a8", (int(shape[0]), int(shape[1]))
    groups: list[dict[str, Any]] = list((quantization.get("config_groups") or {}).values())
    weights: dict[str, Any] = (groups[0].get("weights") if groups else None) or {}
    if weights.get("num_bits") == 4 and weights.get("type", "int") == "int" and weights.get("group_size"):
        return "int4_w4a16", (0, int(weights["group_size"]))
    if quantization:
        raise PatchError(
            f"quantization {quantization.get('quant_method', '?')!r} of this checkpoint is none that this tunes\n"
            "  expected   none, fp8 with weight_block_size, or compressed-tensors with int4 groups\n"
            "  remedy     give the sizes and --dtype yourself, if its experts run on upstream's Triton kernel"
        )
    named = str(config.get("torch_dtype") or config.get("dtype") or whole.get("torch_dtype") or "bfloat16")
    return ("float16" if named.endswith("float16") and not named.endswith("bfloat16") else "bfloat16"), None
