"""What is measured: engines (one per number of draft tokens), and in each its cells and turns."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

#: Beyond this batch size eager cycles of long contexts are left out: they take the host's time, which short ones show.
EAGER_BATCH = 4
#: An eager cycle costs about as much as this many from graphs; for the time left only.
_EAGER_COST = 8


class Turn(BaseModel):
    """One generation: a batch at a context, with graphs or eager. Round 0 is not counted."""

    model_config = ConfigDict(frozen=True)

    round: int
    context: int
    batch_size: int
    mode: str
    tokens: int

    @property
    def cost(self) -> int:
        """Weight for the time left."""
        return self.tokens * (_EAGER_COST if self.mode != "graph" else 1)


class Grid(BaseModel):
    """The cells of one engine and how often they are measured."""

    model_config = ConfigDict(extra="forbid")

    batch_sizes: list[int]
    contexts: list[int] = Field(description="Prompt tokens; all prompts of a request are prefixes of its longest.")
    modes: list[str] = Field(description="graph, eager; on a CPU eager alone.")
    rounds: int
    tokens: int = Field(description="Generated per request, round and cell.")
    eager_everywhere: bool = False
    profiled: bool = True
    drawn_routers: bool = Field(
        default=False, description="Routers that spread tokens over all experts; `routers` says why."
    )
    drawn_values: bool = Field(
        default=False, description="All weights drawn, so that drafted tokens differ, too; `values` says why."
    )

    @property
    def requests(self) -> int:
        """The largest batch."""
        return max(self.batch_sizes)

    @property
    def room(self) -> int:
        """Tokens a request may have beyond its longest prompt: what is generated, and a chain being verified."""
        return self.tokens + 64

    def has(self, context: int, batch_size: int, mode: str) -> bool:
        """Whether a cell is measured."""
        if mode not in self.modes:
            return False
        slow = mode == "eager" and context > min(self.contexts) and batch_size > EAGER_BATCH
        return not slow or self.eager_everywhere or "graph" not in self.modes

    def cells(self) -> list[tuple[int, int]]:
        """Contexts and batch sizes."""
        return [(context, size) for context in sorted(self.contexts) for size in sorted(self.batch_sizes)]

    def turns(self) -> Iterator[Turn]:
        """All counted rounds, after one of warm-up; modes change places every round, so that a drift cancels."""
        for turn in range(self.rounds + 1):
            modes = self.modes if turn % 2 == 0 else self.modes[::-1]
            for context, size in self.cells():
                for mode in modes:
                    if self.has(context, size, mode):
                        # An eager cycle takes the host's time, which varies little beside its length.
                        whole = math.ceil(self.tokens / 2) if mode == "eager" and len(self.modes) > 1 else self.tokens
                        tokens = min(8, whole) if turn == 0 else whole
                        yield Turn(round=turn, context=context, batch_size=size, mode=mode, tokens=tokens)

    def profiles(self) -> list[tuple[int, int]]:
        """Contexts and batch sizes whose kernels are told: the corners, without the most expensive."""
        if not self.profiled:
            return []
        short, long = min(self.contexts), max(self.contexts)
        small, large = min(self.batch_sizes), max(self.batch_sizes)
        return list(dict.fromkeys([(short, small), (long, small), (short, large)]))


def key(draft_tokens: int) -> str:
    """The name of an engine: ``4 tokens``, or ``plain`` for 0."""
    return f"{draft_tokens} tokens" if draft_tokens else "plain"
