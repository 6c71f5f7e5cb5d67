"""`bench compare-upstream`: pristine upstream beside no patch, the default patches and all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_patches.bench import ab, arms, checks, options, plots, pristine, statistics
from sglang_patches.bench import folder as folders
from sglang_patches.bench.app import command
from sglang_patches.bench.journal import Journal, abba, run_turns
from sglang_patches.bench.model import Arm, Result, Turn, Workload
from sglang_patches.bench.turns import Setup
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

PRISTINE = "pristine"
#: The series' start-up hook is there and every patch is off: it must serve as upstream does.
NONE = "none"


@command
def compare_upstream(
    python: Annotated[
        str, typer.Option(help="Interpreter with the pinned sglang and without sglang-patches; '': one is made in OUT.")
    ] = "",
    only: Annotated[str, typer.Option(help="Selections beside pristine, separated by blanks.")] = "none default all",
    rounds: Annotated[int, typer.Option(min=1, help="Servers of each; 4 tell something, 8 tell more.")] = 4,
    margin: Annotated[float, typer.Option(help="Relative difference up to which both count as the same.")] = 0.01,
    allow: options.Allow = None,
    out: options.Out = "compare-upstream",
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
    """Compare upstream without this distribution to `none`, the default patches and all of them, side by side.

    `none` must be the SAME as pristine upstream: off means absent. What the others gain or cost is told against
    pristine too. Needs what upstream alone can serve: a GPU, and a model whose EAGLE-3 works there.

    Example: [bold]sglang-patches bench compare-upstream --model /models/target --draft /models/draft
    --prompt-tokens 256[/bold]

    A run that was stopped goes on with the same command. Exit code: 0 measured, 1 if `none` differs from pristine
    beyond chance and the margin, 2 not measured.
    """
    series = options.installed_series()
    statistics.check_options(margin, ab.CONFIDENCE)
    setup = options.setup(
        out, model=model, draft=draft, tp=tp, server_args=server_args, prompts=prompts, prompt_tokens=prompt_tokens,
        vocabulary=vocabulary, workload_file=workload_file, output_tokens=output_tokens, concurrency=concurrency,
        warm_up=warm_up, seed=seed, ready_timeout=ready_timeout, turn_timeout=turn_timeout,
    )  # fmt: skip
    chosen = [arms.parse(spec.replace("/", "_"), spec, series) for spec in dict.fromkeys(only.split())]
    if not chosen:
        raise PatchError(
            "--only names no selection\n  expected   such as none, default, all\n  remedy     leave it out"
        )
    interpreter = Path(python) if python else pristine.make(setup.folder / "pristine")
    escaped = str(interpreter).replace(",", "\\,")
    first = arms.parse(PRISTINE, f"python:{escaped}", series, taken=[arm.name for arm in chosen])
    result = measure(setup, [first, *chosen], rounds, series, margin=margin, allow=allow or (), seed=seed)
    screen = Console() if Console().is_terminal else Console(width=160)
    for arm in chosen:
        screen.print(ab.table(_pair(result, arm)))
    for note in [*(f"allowed: {text}" for text in result.allowed), *result.analysis["notes"]]:
        typer.echo(note)
    typer.echo(f"{setup.folder}: README.md, result.json, and every request in samples.jsonl")
    typer.echo(result.headline)
    if verdict(result, NONE) in ("FASTER", "SLOWER"):
        raise typer.Exit(1)


def measure(
    setup: Setup, chosen: Sequence[Arm], rounds: int, series: Series, *, margin: float, allow: Sequence[str], seed: int
) -> Result:
    """Measure all arms in blocks of alternating order, check that they may be compared, and write the result.

    Args:
        chosen: the pristine arm first.

    Raises:
        checks.NotComparable: see `checks.check`; the turns are kept.
        PatchError: a turn failed, the folder holds another run, or the pristine arm serves with patches.
    """
    allowed: list[str] = []

    def check(turns: list[Turn], journal: Journal) -> None:
        if turns[-1].arm == PRISTINE and turns[-1].document is not None:
            raise PatchError(
                f"arm {PRISTINE}: its server tells patch set {turns[-1].document.code.id}, so it is not pristine\n"
                f"  expected   an sglang that knows nothing of sglang-patches\n"
                f"  remedy     --python names an interpreter without it, or leave the option out"
            )
        allowed[:] = checks.check(turns, chosen, series, journal.samples, allow)

    turns = run_turns(setup, "compare-upstream", chosen, abba([arm.name for arm in chosen], rounds), check=check)
    result = conclude(turns, chosen, setup.workload, setup.folder, margin=margin, seed=seed, allowed=allowed)
    plots.draw(result, setup.folder)  # first, so that README.md shows it
    folders.write(setup.folder, result)
    return result


def conclude(
    turns: Sequence[Turn],
    chosen: Sequence[Arm],
    workload: Workload | None,
    folder: Path,
    *,
    margin: float,
    seed: int,
    allowed: Sequence[str] = (),
) -> Result:
    """The result of measured turns: every arm against the first, the pristine one."""
    from sglang_patches.document import collect

    compared = {arm.name: ab.compare(turns, [PRISTINE, arm.name], margin, seed) for arm in chosen[1:]}
    looks = checks.looks(folder, "compare-upstream", len({turn.block for turn in turns}))
    analysis: dict[str, Any] = {
        "baseline": PRISTINE,
        "primary": ab.PRIMARY,
        "margin": margin,
        "confidence": ab.CONFIDENCE,
        "seed": seed,
        "comparisons": {
            name: {figure: found.document() for figure, found in figures.items()} for name, figures in compared.items()
        },
        "looks": looks,
        "notes": [*checks.looked(looks), *checks.notes(turns)],
    }
    said = [ab.headline(compared[arm.name], [chosen[0], arm], None, names=(PRISTINE, arm.name)) for arm in chosen[1:]]
    return Result(
        kind="compare-upstream",
        name=folder.name,
        headline="; ".join(said),
        command=options.typed(),
        when=folders.measured(turns, folder),
        arms=list(chosen),
        workload=workload,
        turns=list(turns),
        allowed=list(allowed),
        analysis=analysis,
        document=collect.environment(),
    )


def verdict(result: Result, arm: str) -> str | None:
    """On the primary figure of an arm against pristine; None where it was not compared."""
    found = result.analysis["comparisons"].get(arm, {}).get(result.analysis["primary"])
    return found["verdict"] if found else None


def _pair(result: Result, arm: Arm) -> Result:
    """One arm against pristine, as `ab` has it."""
    analysis = {"a": PRISTINE, "b": arm.name, "comparisons": result.analysis["comparisons"][arm.name]}
    return result.model_copy(update={"arms": [result.arms[0], arm], "analysis": analysis})
