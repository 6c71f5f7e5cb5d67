"""Server arguments of an engine: the same for every number of draft tokens, but for speculation itself."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_patches.bench.verify_step.grid import Grid
from sglang_patches.document import secrets
from sglang_patches.draft import conventions
from sglang_patches.draft.check import positions
from sglang_patches.errors import PatchError

# Upstream drafts nothing, and keeps the draft's KV cache up to date, only in its adaptive mode.
_NO_DRAFTS = Path(__file__).parent / "no-drafts.json"
# Upstream's default; longer prompts are prefilled whole, since a chunk with a prefix takes MLA's slower path.
_LEAST_PREFILL = 8192


def check_positions(grid: Grid, models: Mapping[str, Mapping[str, Any]], extra: Sequence[str]) -> None:
    """Refuse contexts that no engine would start with, or that its draft would be refused at.

    Args:
        models: ``config.json`` of each that is served, by how a message names it.
        extra: server arguments that win over those of `Chosen.arguments`.

    Raises:
        PatchError: a model has fewer positions than a request needs, and upstream is not told to serve more.
    """
    if os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "").lower() in ("1", "true", "yes", "y"):
        return
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--context-length", default="")
    asked = own.parse_known_args(list(extra))[0].context_length
    longest = max(grid.contexts)
    needed = max(longest + grid.room, int(asked) if asked.isdecimal() else 0)
    for what, raw in models.items():
        draft = conventions.architecture(raw) is not None
        config = conventions.read_config(raw, None).config if draft else dict(raw)
        allowed = positions(config.get("text_config") or config)
        if allowed < needed:
            least = allowed - grid.room
            remedy = f"--contexts of at most {least}" if least > 0 else "a model with more positions"
            if longest + grid.room <= allowed:
                raise PatchError(
                    f"--context-length {asked}: {what} allows {allowed} positions\n"
                    f"  remedy     leave it out, since {longest + grid.room} are needed; or at most {allowed}"
                )
            raise PatchError(
                f"--contexts {longest}: with {grid.room} tokens of room for what is generated (--tokens) and verified, "
                f"{needed} positions are needed\n"
                f"  seen       {what} allows {allowed} (config.json max_position_embeddings)\n"
                f"  remedy     {remedy}; SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 stretches rotary tables instead"
            )


@dataclass(frozen=True)
class Chosen:
    """What is served, and how."""

    target: Path
    draft: Path
    dummy: bool
    cuda: bool
    grid: Grid
    captured: int = 0
    attention_backend: str = ""
    share: str = "a folder"  # or which share of Kimi-K2.5, in words
    extra: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)  # as typed, secrets masked

    def vocabulary(self) -> int:
        """Number of token ids of the target."""
        config = json.loads((self.target / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])

    def arguments(self, draft_tokens: int) -> list[str]:
        """Of ``sglang.launch_server``; 0 draft tokens: without speculation."""
        grid = self.grid
        longest = max(grid.contexts)
        chunk = str(max(longest, _LEAST_PREFILL))
        # Every prompt and what follows it, and room for answers of former rounds, which the radix cache keeps a while.
        pool = grid.requests * (longest + grid.room) + 8 * grid.requests * grid.room
        made = ["--model-path", str(self.target), "--skip-tokenizer-init", "--grammar-backend", "none"]
        made += ["--random-seed", "0", "--log-level", "warning", "--context-length", str(longest + grid.room)]
        made += ["--max-running-requests", str(grid.requests), "--max-total-tokens", str(pool)]
        made += ["--chunked-prefill-size", chunk, "--max-prefill-tokens", chunk]
        if self.dummy:
            made += ["--load-format", "dummy"]
        if self.cuda:
            made += ["--attention-backend", self.attention_backend or "triton", "--mem-fraction-static", "0.7"]
            sizes = [str(size) for size in sorted(grid.batch_sizes)]
            made += ["--cuda-graph-bs-prefill", "64", "128"]
            if self.captured:
                made += ["--cuda-graph-max-bs-decode", str(self.captured)]
            else:
                made += ["--cuda-graph-bs-decode", *sizes]
        else:
            made += ["--device", "cpu", "--attention-backend", self.attention_backend or "torch_native"]
            made += ["--sampling-backend", "pytorch", "--dtype", "float32"]
        if draft_tokens:
            made += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.draft)]
            made += ["--speculative-num-steps", str(draft_tokens - 1), "--speculative-eagle-topk", "1"]
            made += ["--speculative-num-draft-tokens", str(draft_tokens)]
        if draft_tokens == 1:
            made += ["--speculative-adaptive", "--speculative-adaptive-config", str(_NO_DRAFTS)]
        return [*made, *self.extra]

    def shown(self, draft_tokens: int) -> list[str]:
        """The same as it is kept: secrets masked, and the shard's temporary folder named ``<shard>``."""
        home = str(self.target.parent) if self.dummy else "\0"
        words = (word.replace(str(_NO_DRAFTS), _NO_DRAFTS.name) for word in self.arguments(draft_tokens))
        return [word.replace(home, "<shard>") for word in secrets.command(list(words))]

    def environment(self) -> dict[str, str]:
        """Of the engine's process."""
        from sglang_patches import import_path
        from sglang_patches.serve import cpu_environment

        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        import_path.settle(environ)
        return environ if self.cuda else {**cpu_environment(), **environ}
