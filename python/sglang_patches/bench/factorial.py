"""`bench factorial`: what each of several toggles does, and which do something only together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_patches.bench import checks, effects, factors, options, plots, statistics, tables
from sglang_patches.bench import folder as folders
from sglang_patches.bench.app import command
from sglang_patches.bench.design import Design, order
from sglang_patches.bench.design import fraction as fraction_of
from sglang_patches.bench.journal import Journal, run_turns
from sglang_patches.bench.model import HIGHER_IS_BETTER, Arm, Result, Turn, Workload
from sglang_patches.bench.turns import Setup
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

#: The figure that the headline, the table and the plot are about.
PRIMARY = "tokens_per_s"


@command
def factorial(
    factors_: Annotated[
        str, typer.Option("--factors", metavar="A,B,..", help="Patches, or words like env:NAME=VALUE, to toggle.")
    ],
    fraction: Annotated[int, typer.Option(min=1, help="Measure 1 of so many runs: 2, 4, 8, ...")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each run; more show smaller effects.")] = 2,
    base: Annotated[str, typer.Option(metavar="SEL", help="What all runs start from.")] = "default",
    margin: Annotated[float, typer.Option(help="Relative effect up to which a factor does nothing.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    plan: Annotated[bool, typer.Option("--plan", help="Show the design and stop.")] = False,
    allow: options.Allow = None,
    out: options.Out = "",
    seed: options.Seed = 0,
    model: options.Model = options.MODEL,
    draft: options.Draft = None,
    tp: options.Tp = 1,
    workload_file: options.WorkloadFile = None,
    prompts: options.Prompts = 0,
    prompt_tokens: options.PromptTokens = 0,
    vocabulary: options.Vocabulary = 0,
    output_tokens: options.OutputTokens = 128,
    concurrency: options.Concurrency = 1,
    warm_up: options.WarmUp = 4,
    ready_timeout: options.ReadyTimeout = 1800,
    turn_timeout: options.TurnTimeout = 3600,
    server_args: options.ServerArgs = None,
) -> None:
    """Say what each factor does on average, and which pairs do more or less together than each alone lets expect.

    Every setting of the factors (or a fraction that tells main effects apart) is served once a round, in an order drawn
    anew for each by the seed, so that a machine that drifts or wanders feigns no effect.

    Example: [bold]sglang-patches bench factorial --factors eagle-verify-cuda-graph,pcie-nccl-allreduce,
    env:NCCL_PROTO=LL --rounds 4 --model /models/Kimi-K2.5 --draft /models/draft --tp 8[/bold]

    A run that was stopped goes on with the same command. Exit code: 0 measured, whatever was found; 2 not.
    """
    series = options.installed_series()
    toggles = factors.parse(factors_, series)
    design = fraction_of([factor.name for factor in toggles], fraction)
    statistics.check_options(margin, confidence)
    effects.check_freedom(design, rounds)
    arms = factors.make_arms(toggles, design, base, series)
    screen = Console() if Console().is_terminal else Console(width=160)
    if plan:
        screen.print(planned(design, arms, rounds, seed))
        return
    setup = options.setup(
        out or options.name("factorial", factors_), model=model, draft=draft, tp=tp, server_args=server_args,
        prompts=prompts, prompt_tokens=prompt_tokens, vocabulary=vocabulary, workload_file=workload_file,
        output_tokens=output_tokens, concurrency=concurrency, warm_up=warm_up, seed=seed, ready_timeout=ready_timeout,
        turn_timeout=turn_timeout,
    )  # fmt: skip
    result = measure(
        setup, design, arms, rounds, series, base=base, margin=margin, confidence=confidence, allow=allow or (),
        seed=seed,
    )  # fmt: skip
    screen.print(table(result))
    for note in [*(f"allowed: {text}" for text in result.allowed), *result.analysis["notes"]]:
        typer.echo(note)
    typer.echo(f"{setup.folder}: README.md, result.json, and every request in samples.jsonl")
    typer.echo(result.headline)


def measure(
    setup: Setup,
    design: Design,
    arms: Sequence[Arm],
    rounds: int,
    series: Series,
    *,
    base: str,
    margin: float,
    confidence: float,
    allow: Sequence[str],
    seed: int,
) -> Result:
    """Measure all runs of a design into the setup's folder, check that they may be compared, and write the result.

    Raises:
        NotComparable: see `checks.check`; the turns are kept.
        PatchError: a turn failed, or the folder holds another run.
    """
    allowed: list[str] = []

    def check(turns: list[Turn], journal: Journal) -> None:
        allowed[:] = checks.check(turns, arms, series, journal.samples, allow)

    schedule = [
        (at, arms[run].name) for at, runs in enumerate(order(design, rounds, seed)) for run in runs
    ]  # fmt: skip
    # Not the rounds: more of them begin with the same ones, and so go on where fewer ended.
    settings = {"factors": list(design.factors), "generators": list(design.generators), "base": base, "seed": seed}
    turns = run_turns(setup, "factorial", arms, schedule, settings, check)
    result = conclude(
        turns, design, arms, setup.workload, setup.folder, base=base, margin=margin, confidence=confidence, seed=seed,
        allowed=allowed,
    )  # fmt: skip
    plots.draw(result, setup.folder)  # first, so that README.md shows it
    folders.write(setup.folder, result)
    return result


def conclude(
    turns: Sequence[Turn],
    design: Design,
    arms: Sequence[Arm],
    workload: Workload | None,
    folder: Path,
    *,
    base: str,
    margin: float,
    confidence: float,
    seed: int,
    allowed: Sequence[str] = (),
) -> Result:
    """The result of measured turns: the effects on every figure that all turns have."""
    from sglang_patches.document import collect

    found = analyse(turns, design, arms, margin, confidence)
    looks = checks.looks(folder, "factorial", len({turn.block for turn in turns}))
    analysis: dict[str, Any] = {
        "factors": list(design.factors),
        "design": design.describe(),
        "resolution": design.resolution,
        "base": base,
        "rounds": len({turn.block for turn in turns}),
        "runs": {
            arm.name: dict(zip(design.factors, (bool(level > 0) for level in levels), strict=True))
            for arm, levels in zip(arms, design.levels, strict=True)
        },
        "primary": PRIMARY,
        "margin": margin,
        "confidence": confidence,
        "seed": seed,
        "effects": {figure: one.document() for figure, one in found.items()},
        "looks": looks,
        "notes": [*checks.looked(looks), *checks.notes(turns)],
    }
    return Result(
        kind="factorial",
        name=folder.name,
        headline=headline(found, design, workload),
        command=options.typed(),
        when=folders.measured(turns, folder),
        arms=list(arms),
        workload=workload,
        turns=list(turns),
        allowed=list(allowed),
        analysis=analysis,
        document=collect.environment(),
    )


def analyse(
    turns: Sequence[Turn], design: Design, arms: Sequence[Arm], margin: float, confidence: float
) -> dict[str, effects.Effects]:
    """By figure, the effects of the design's terms; left out are figures that a turn lacks or that are 0.

    Args:
        turns: whole rounds, in the order in which they were served.
        arms: of the design's runs, in their order.
    """
    runs = {arm.name: at for at, arm in enumerate(arms)}
    served: dict[int, int] = {}
    places = []
    for turn in turns:
        places.append(served.get(turn.block, 0))
        served[turn.block] = places[-1] + 1
    found = {}
    for figure, better in HIGHER_IS_BETTER.items():
        if not all(turn.figures.get(figure, 0) > 0 for turn in turns):
            continue
        seen = [
            effects.Observation(turn.block, place, runs[turn.arm], turn.figures[figure])
            for turn, place in zip(turns, places, strict=True)
        ]
        found[figure] = effects.fit(
            design, seen, figure=figure, higher_is_better=better, margin=margin, confidence=confidence
        )
    return found


def headline(found: Mapping[str, effects.Effects], design: Design, workload: Workload | None) -> str:
    """The finding on the primary figure, in one sentence."""
    if PRIMARY not in found:
        raise PatchError(f"{PRIMARY} was not measured in every turn, so there is nothing to say")
    all_effects = found[PRIMARY].effects
    shown = [effect for effect in all_effects if effect.verdict in ("FASTER", "SLOWER")]
    at = f" with {workload.concurrency} at a time" if workload else ""
    parts = [
        f"`{effect.name}`{' (or an alias)' if effect.aliases else ''} is {effect.verdict}: {effect.ratio:.4g} times "
        f"({effect.low_adjusted:.4g} to {effect.high_adjusted:.4g})"
        for effect in shown
    ]
    said = "; ".join(parts) or f"no effect of {', '.join(f'`{name}`' for name in design.factors)} is shown"
    least = max(effect.smallest_detectable for effect in all_effects if effect.kind == "main")
    return (
        f"tokens per second{at}, {len(all_effects)} effects judged together at {found[PRIMARY].confidence:.0%}: "
        f"{said}; {tables.unseen('main effects', least)}"
    )


def table(result: Result) -> Table:
    """The effects on the primary figure: ratio, both intervals, verdict, and what they cannot be told from."""
    found = result.analysis["effects"][PRIMARY]
    drift = f", drift {found['drift']:+.2%} a turn" if found["drift"] is not None else ""
    shown = Table(
        title=f"{escape(result.name)}: effects on {PRIMARY}",
        caption=f"{escape(result.analysis['design'])}; {result.analysis['rounds']} rounds, noise "
        f"{found['residual']:.2%} a turn with {found['freedom']} degrees of freedom{drift}. A main effect is on over "
        f"off; an interaction is both together over what each alone lets expect.",
    )
    percent = f"{found['confidence']:.0%}"
    for column in ("effect", "ratio", f"{percent} alone", f"{percent} all together", "verdict", "smallest detectable",
                   "not told from"):  # fmt: skip
        shown.add_column(column, justify="left" if column in ("effect", "verdict", "not told from") else "right")
    for effect in found["effects"]:
        shown.add_row(
            escape(effect["name"]),
            f"{effect['ratio']:.4f}",
            f"{tables.number(effect['low'])} .. {tables.number(effect['high'])}",
            f"{tables.number(effect['low_adjusted'])} .. {tables.number(effect['high_adjusted'])}",
            effect["verdict"],
            tables.percentage(effect["smallest_detectable"]),
            escape(", ".join(effect["aliases"])) or "-",
        )
    return shown


def planned(design: Design, arms: Sequence[Arm], rounds: int, seed: int) -> Table:
    """The runs of a design, and when each is served."""
    orders = order(design, rounds, seed)
    shown = Table(title=f"{escape(design.describe())}; {rounds} rounds: {design.runs * rounds} server starts")
    for column in ("run", *design.factors, "served in place"):
        shown.add_column(escape(column))
    for run, arm in enumerate(arms):
        places = ", ".join(str(at * design.runs + runs.index(run)) for at, runs in enumerate(orders))
        shown.add_row(arm.name, *("on" if level > 0 else "-" for level in design.levels[run]), places)
    return shown
