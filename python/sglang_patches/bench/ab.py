"""`bench ab`: two selections on alternating servers, and a verdict on each figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_patches.bench import arms, checks, options, plots, statistics, tables
from sglang_patches.bench import folder as folders
from sglang_patches.bench.app import command
from sglang_patches.bench.journal import Journal, abba, run_turns
from sglang_patches.bench.model import HIGHER_IS_BETTER, Arm, Result, Turn, Workload
from sglang_patches.bench.turns import Setup
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

#: The figure that the headline is about; the others are judged together, each with a wider interval for it.
PRIMARY = "tokens_per_s"
CONFIDENCE = 0.95

Selection = Annotated[str, typer.Option(metavar="SEL", help="A selection, such as -pcie-nccl-allreduce or default.")]


@command
def ab(
    a: Selection,
    b: Selection,
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each; 4 tell something, 8 tell more.")] = 4,
    margin: Annotated[float, typer.Option(help="Relative difference up to which both count as the same.")] = 0.01,
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
    """Say whether B is FASTER, SLOWER or the SAME as A, or that these rounds cannot tell (AMBIGUOUS).

    Servers of A and B are started in turn (ABBA), warmed up, and asked the same prompts greedily; every server counts
    once. Nothing is compared if the tokens differ, or if more differs than what the two selections say.

    Example: [bold]sglang-patches bench ab --a default --b -pcie-nccl-allreduce --model /models/Kimi-K2.5
    --draft /models/draft --tp 8 --prompt-tokens 1024 -- --mem-fraction-static 0.9[/bold]

    A run that was stopped goes on with the same command. Exit code: 0 measured, whatever the verdict; 2 not.
    """
    series = options.installed_series()
    statistics.check_options(margin, CONFIDENCE)
    pair = [arms.parse("a", a, series), arms.parse("b", b, series, taken=["a"])]
    setup = options.setup(
        out or options.name("ab", a, b), model=model, draft=draft, tp=tp, server_args=server_args, prompts=prompts,
        prompt_tokens=prompt_tokens, vocabulary=vocabulary, workload_file=workload_file, output_tokens=output_tokens,
        concurrency=concurrency, warm_up=warm_up, seed=seed, ready_timeout=ready_timeout, turn_timeout=turn_timeout,
    )  # fmt: skip
    result = measure(setup, pair, rounds, series, margin=margin, allow=allow or (), seed=seed)
    screen = Console() if Console().is_terminal else Console(width=160)
    screen.print(table(result))
    for note in [*(f"allowed: {text}" for text in result.allowed), *result.analysis["notes"]]:
        typer.echo(note)
    typer.echo(f"{setup.folder}: README.md, result.json, and every request in samples.jsonl")
    typer.echo(result.headline)


def measure(
    setup: Setup, pair: Sequence[Arm], rounds: int, series: Series, *, margin: float, allow: Sequence[str], seed: int
) -> Result:
    """Measure two arms in ABBA order into the setup's folder, check that they may be compared, and write the result.

    Raises:
        NotComparable: see `checks.check`; the turns are kept.
        PatchError: a turn failed, or the folder holds another run.
    """
    allowed: list[str] = []

    def check(turns: list[Turn], journal: Journal) -> None:
        allowed[:] = checks.check(turns, pair, series, journal.samples, allow)

    schedule = abba([arm.name for arm in pair], rounds)
    turns = run_turns(setup, "ab", pair, schedule, check=check)
    result = conclude(turns, pair, setup.workload, setup.folder, margin=margin, seed=seed, allowed=allowed)
    plots.draw(result, setup.folder)  # first, so that README.md shows it
    folders.write(setup.folder, result)
    return result


def conclude(
    turns: Sequence[Turn],
    pair: Sequence[Arm],
    workload: Workload | None,
    folder: Path,
    *,
    margin: float,
    seed: int,
    allowed: Sequence[str] = (),
) -> Result:
    """The result of measured turns: a comparison of every figure that both arms have in all rounds."""
    from sglang_patches.document import collect

    compared = compare(turns, [arm.name for arm in pair], margin, seed)
    looks = checks.looks(folder, "ab", len({turn.block for turn in turns}))
    analysis: dict[str, Any] = {
        "a": pair[0].name,
        "b": pair[1].name,
        "primary": PRIMARY,
        "margin": margin,
        "confidence": CONFIDENCE,
        "seed": seed,
        "comparisons": {name: comparison.document() for name, comparison in compared.items()},
        "looks": looks,
        "notes": [*checks.looked(looks), *checks.notes(turns)],
    }
    return Result(
        kind="ab",
        name=folder.name,
        headline=headline(compared, pair, workload),
        command=options.typed(),
        when=folders.measured(turns, folder),
        arms=list(pair),
        workload=workload,
        turns=list(turns),
        allowed=list(allowed),
        analysis=analysis,
        document=collect.environment(),
    )


def compare(turns: Sequence[Turn], names: Sequence[str], margin: float, seed: int) -> dict[str, statistics.Comparison]:
    """By figure, the second arm against the first over their blocks.

    Left out are figures that an arm lacks in a block, and those that are 0 throughout (a graph share on a CPU).
    """
    blocks = sorted({turn.block for turn in turns})
    at = {(turn.block, turn.arm): turn.figures for turn in turns}
    whole = [block for block in blocks if all((block, name) in at for name in names)]
    pairs: dict[str, list[list[float]]] = {}
    for figure in HIGHER_IS_BETTER:
        if all(figure in at[block, name] for block in whole for name in names):
            values = [[at[block, name][figure] for block in whole] for name in names]
            if all(value > 0 for side in values for value in side):
                pairs[figure] = values
    others = max(1, len(pairs) - (PRIMARY in pairs))
    return {
        figure: statistics.compare(
            a, b, higher_is_better=HIGHER_IS_BETTER[figure], margin=margin, confidence=CONFIDENCE,
            comparisons=1 if figure == PRIMARY else others, seed=seed, figure=figure,
        )
        for figure, (a, b) in pairs.items()
    }  # fmt: skip


def headline(
    compared: Mapping[str, statistics.Comparison],
    pair: Sequence[Arm],
    workload: Workload | None,
    names: Sequence[str] = (),
) -> str:
    """The finding on the primary figure, in one sentence; arms go by their selections unless `names` are given."""
    if PRIMARY not in compared:
        raise PatchError(f"{PRIMARY} was not measured in any whole round, so there is nothing to say")
    found = compared[PRIMARY]
    a, b = names or [f"{name} ({arm.spec or 'default'})" for name, arm in zip("AB", pair, strict=True)]
    words = {
        "FASTER": f"{b} is FASTER than {a}",
        "SLOWER": f"{b} is SLOWER than {a}",
        "SAME": f"{b} and {a} are the SAME within {tables.percentage(found.margin)}",
        "AMBIGUOUS": f"AMBIGUOUS, {b} against {a} is not decided",
    }
    at = f", {workload.concurrency} at a time" if workload else ""
    said = f"{words[found.verdict]}: {found.ratio:.4g} times the tokens per second"
    if found.rounds < 2:
        return f"{said} in one round{at}, which gives no interval: 2 give one, 4 a useful one"
    interval = f"{found.confidence:.0%} interval {found.low:.4g} to {found.high:.4g}"
    less = tables.unseen("differences", found.smallest_detectable)
    return f"{said} ({interval}, {found.rounds} rounds{at}); {less}"


def table(result: Result) -> Table:
    """Every compared figure: both arms' means, ratio, interval, verdict and what could have been seen."""
    names = [result.analysis["a"], result.analysis["b"]]
    averages = tables.means(result)
    title = f"{result.name}: A = {result.arms[0].spec}, B = {result.arms[1].spec}"
    shown = Table(title=Text(title, style="table.title"))
    for column in ("figure", "A", "B", "B / A", "interval", "verdict", "smallest detectable"):
        shown.add_column(column, justify="left" if column in ("figure", "verdict") else "right")
    for figure, found in result.analysis["comparisons"].items():
        means = [averages[name][figure] for name in names]
        low, high = found["low"], found["high"]
        shown.add_row(
            f"[bold]{figure}[/bold]" if figure == PRIMARY else figure,
            f"{means[0]:.4g}",
            f"{means[1]:.4g}",
            f"{found['ratio']:.4f}",
            f"{tables.number(low)} .. {'∞' if high is None else tables.number(high)}",
            found["verdict"],
            "-" if found["smallest_detectable"] is None else tables.percentage(found["smallest_detectable"]),
        )
    return shown
