"""The draft steps that give most tokens a second, by batch size, and whether any beat no speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from sglang_patches.errors import PatchError
from sglang_patches.spec.acceptance import Acceptance
from sglang_patches.spec.costs import PLAIN, Costs


@dataclass(frozen=True)
class Choice:
    """What is best for one batch size.

    Attributes:
        batch_size: requests.
        measured: the batch size whose times it has.
        plain_ms: of a decode step without speculation.
        gain: tokens a second over those of a server without speculation, by draft steps; 0 steps is a server that
            speculates and drafts nothing for this batch.
        best: draft steps, above 0, of most tokens a second.
        pays: whether these beat no speculation by the margin.
        break_even: accept length at which `best` gains nothing, which is its cycle in decode steps.
    """

    batch_size: int
    measured: int
    plain_ms: float
    gain: dict[int, float]
    best: int
    pays: bool
    break_even: float

    @property
    def steps(self) -> int:
        """Of a server for batches of this size alone; 0: without speculation."""
        return self.best if self.pays else 0

    @property
    def adaptive(self) -> int:
        """Of a server that changes them by batch size, for which drafting nothing is not free."""
        return self.best if self.gain[self.best] >= self.gain[0] else 0


@dataclass(frozen=True)
class Plan:
    """Choices for batch sizes from 1 on.

    Attributes:
        context: cached tokens of a request.
        margin: share by which drafting must win to pay.
        fixed: the number of steps that loses least against the best of each batch size, where one serves all of them;
            0: no speculation.
    """

    context: float
    margin: float
    choices: tuple[Choice, ...]
    fixed: int

    def ranges(self, of: Callable[[Choice], int]) -> list[tuple[int, int, int]]:
        """Runs of batch sizes with the same steps, as `of` tells them: first and last size, steps."""
        runs = [(steps, list(same)) for steps, same in groupby(self.choices, of)]
        return [(same[0].batch_size, same[-1].batch_size, steps) for steps, same in runs]

    def pays(self) -> bool:
        """Whether any batch size gains by drafting."""
        return any(choice.pays for choice in self.choices)

    def worst(self) -> Choice:
        """The batch size at which `adaptive_config` gains least; below 1 it is slower than no speculation there."""
        return min(self.choices, key=lambda choice: choice.gain[choice.adaptive])

    def adaptive_config(self, made_by: str) -> dict[str, Any]:
        """For upstream's ``--speculative-adaptive-config``, with one candidate a batch size, so that it only switches
        by batch size (sglang 0.5.23 ``speculative/adaptive_spec_params.py``: the entry of the largest key that is not
        above the batch, which is first padded to the next size of ``--cuda-graph-bs-decode`` where that is given; keys
        that are no numbers are not read)."""
        entries = {
            str(first): {"candidate_steps": [steps]} for first, _last, steps in self.ranges(lambda one: one.adaptive)
        }
        return {"made_by": made_by, **entries}

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        choices = [{**asdict(choice), "steps": choice.steps, "adaptive": choice.adaptive} for choice in self.choices]
        return {"context": self.context, "margin": self.margin, "fixed": self.fixed, "choices": choices}


def make(costs: Costs, acceptance: Acceptance, batch_sizes: Sequence[int], context: float, margin: float) -> Plan:
    """Choose for each batch size.

    Args:
        margin: from 0; drafting pays only if it gives more tokens a second than no speculation by this share, and more
            steps are taken only if they give more than fewer by it.

    Raises PatchError: a batch size or the context is outside of what was measured.
    """
    choices = tuple(_choose(costs, acceptance, batch, context, margin) for batch in batch_sizes)
    return Plan(context, margin, choices, _fixed(choices, margin))


def _choose(costs: Costs, acceptance: Acceptance, batch: int, context: float, margin: float) -> Choice:
    plain = costs.milliseconds(PLAIN, batch, context)
    if plain is None:
        raise PatchError(
            f"decode without speculation was not measured at batch {costs.measured(batch)}, context {context:g}\n"
            "  remedy     --context or --max-batch-size within what was; eager cycles of large batches are measured by "
            "bench verify-step --eager-everywhere"
        )
    gain: dict[int, float] = {}
    cycles: dict[int, float] = {}
    for steps in sorted({0, *costs.steps}):
        cycle = costs.milliseconds(steps, batch, context)
        if cycle is not None and steps <= len(acceptance.by_position):
            cycles[steps] = cycle
            gain[steps] = acceptance.tokens(steps) * plain / cycle
    drafting = sorted(set(gain) - {0})
    if not drafting:
        raise PatchError(
            f"at batch {batch} only {costs.steps} draft steps were measured, and acceptance is known for "
            f"{len(acceptance.by_position)} positions\n  remedy     give more positions, or measure fewer draft tokens"
        )
    best = drafting[0]
    for steps in drafting[1:]:
        # More steps hold more memory and depend more on the text, so an equal gain is none.
        if gain[steps] > gain[best] * (1 + margin):
            best = steps
    pays = gain[best] > 1 + margin
    return Choice(batch, costs.measured(batch), plain, gain, best, pays, cycles[best] / plain)


def _fixed(choices: Sequence[Choice], margin: float) -> int:
    """One number of steps for all: the one whose worst ratio to the best of each batch size is the highest."""
    common = set.intersection(*(set(choice.gain) for choice in choices)) - {0}

    def worst(steps: int) -> float:
        # No speculation at all gains 1 everywhere.
        return min(
            (choice.gain[steps] if steps else 1.0) / max(1.0, *(choice.gain[at] for at in common)) for choice in choices
        )

    best = 0
    for steps in sorted(common):
        if worst(steps) > worst(best) * (1 + margin):
            best = steps
    return best
