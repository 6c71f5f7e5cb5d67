"""`bench bisect`: which of the changes between a good and a bad way to serve cause a regression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_patches.bench import arms, changes, checks, folder, options, suspects
from sglang_patches.bench.app import command
from sglang_patches.bench.bisection import Bisection, Policy
from sglang_patches.bench.deltas import Answer, Findings
from sglang_patches.bench.evidence import Evidence
from sglang_patches.bench.journal import Journal
from sglang_patches.bench.model import HIGHER_IS_BETTER, Arm, Result, Turn
from sglang_patches.bench.turns import Setup
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

_METRICS = ", ".join(HIGHER_IS_BETTER)


@command
def bisect(
    good: Annotated[str, typer.Option(metavar="SEL", help="The selection that is well, such as default.")],
    bad: Annotated[str, typer.Option(metavar="SEL", help="The one that is not, such as '+oea-topk,env:A=B'.")],
    metric: Annotated[str, typer.Option(help=f"What got worse: {_METRICS}.")] = "verify_ms",
    threshold: Annotated[str, typer.Option(help="A set is bad if it is worse than good by more than this.")] = "5%",
    rounds: Annotated[int, typer.Option(min=1, help="Servers of good and of bad at the beginning.")] = 2,
    max_turns: Annotated[int, typer.Option(min=1, help="Servers of one set; then it stays unclear.")] = 6,
    max_servers: Annotated[
        int, typer.Option(min=0, help="Turns in all; then the search ends with what it knows. 0: no limit.")
    ] = 100,
    anchor_every: Annotated[int, typer.Option(min=1, help="Measure good again after so many other servers.")] = 5,
    confidence: Annotated[float, typer.Option(help="Of each interval that an answer is given by.")] = 0.95,
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
    """Find the smallest set of changes that makes BAD worse than GOOD, also changes that hurt only together.

    Patches, variables and arguments in which the two differ are switched one set at a time, each served by a server of
    its own: log2(n) + 2 sets for one of n changes to blame, 2 log2(n) + 5 for two that hurt together. A set is measured
    again where its figure is too near the threshold to tell.

    Example: [bold]sglang-patches bench bisect --good none --bad all --metric verify_ms --threshold 5%
    --model /models/Kimi-K2.5 --draft /models/draft --tp 8 --prompt-tokens 1024[/bold]

    A run that was stopped goes on with the same command. Exit code: 0 found, 1 no regression to find, or not clearly, 2
    not measured.
    """
    series = options.installed_series()
    found = changes.between(arms.parse("good", good, series), arms.parse("bad", bad, series, taken=["good"]), series)
    evidence = Evidence(metric, share(threshold), confidence)
    policy = Policy(rounds, max(rounds, max_turns), anchor_every, max_servers or None)
    setup = options.setup(
        out or options.name("bisect", good, bad), model=model, draft=draft, tp=tp, server_args=server_args,
        prompts=prompts, prompt_tokens=prompt_tokens, vocabulary=vocabulary, workload_file=workload_file,
        output_tokens=output_tokens, concurrency=concurrency, warm_up=warm_up, seed=seed, ready_timeout=ready_timeout,
        turn_timeout=turn_timeout,
    )  # fmt: skip
    result, run = measure(setup, found, evidence, policy, series, allow or ())
    screen = Console() if Console().is_terminal else Console(width=160)
    screen.print(_table(run))
    for note in [*(f"allowed: {text}" for text in result.allowed), *result.analysis["notes"]]:
        typer.echo(note)
    typer.echo(f"{setup.folder}: result.json, every request in samples.jsonl, each server's log in logs/")
    typer.echo(result.headline)
    raise typer.Exit(0 if result.analysis["found"] else 1)


def measure(
    setup: Setup, found: changes.Changes, evidence: Evidence, policy: Policy, series: Series, allow: Sequence[str] = ()
) -> tuple[Result, Bisection]:
    """Run a bisection into the setup's folder, or go on with one, and write its result.

    Raises:
        NotComparable: see `checks.check`; the turns are kept.
        PatchError: good or bad cannot be measured, or the folder holds another run.
    """
    allowed: list[str] = []
    # Not the budget: a run that used it up goes on with a larger one.
    settings = {
        "good": _served(found.good), "bad": _served(found.bad), "metric": evidence.metric,
        "threshold": evidence.threshold, "confidence": evidence.confidence, "rounds": policy.rounds,
        "max_turns": policy.max_turns, "anchor_every": policy.anchor_every,
    }  # fmt: skip
    with Journal(setup, "bisect", settings) as journal:

        def check(turns: list[Turn]) -> None:
            allowed[:] = checks.check(turns, journal.arms, series, journal.samples, allow)

        run = Bisection(found, evidence, policy, journal, check)
        ends = run.ends()
        findings = run.search() if ends is Answer.BAD else None
        told = _arms(journal.arms, run)
    result = conclude(run, ends, findings, setup, told, allowed)
    folder.write(setup.folder, result)
    return result, run


def conclude(
    run: Bisection, ends: Answer, findings: Findings | None, setup: Setup, told: list[Arm], allowed: Sequence[str]
) -> Result:
    """The result of a bisection that ended."""
    from sglang_patches.document import collect

    notes = checks.notes(run.turns)
    if findings:
        notes = suspects.remarks(run, findings) + notes
    analysis: dict[str, Any] = {**suspects.analysis(run, findings), "notes": notes}
    return Result(
        kind="bisect",
        name=setup.folder.name,
        headline=suspects.sentence(run, findings) if findings else suspects.no_regression(run, ends),
        command=options.typed(),
        when=folder.measured(run.turns, setup.folder),
        arms=told,
        workload=setup.workload,
        turns=run.turns,
        allowed=list(allowed),
        analysis=analysis,
        document=collect.environment(),
    )


def share(text: str) -> float:
    """`5%` or `0.05` as 0.05.

    Raises:
        PatchError: it is neither, or a number without % of 1 or more: 5 would be 500 %, which hides any regression.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise PatchError(f"--threshold {text!r}\n  expected   a share of good's figure, such as 5% or 0.05")
    if not match[2] and float(match[1]) >= 1:
        told = f"{100 * float(match[1]):g}"
        raise PatchError(
            f"--threshold {text!r} is {told} %\n  expected   a share of good's figure, such as 5% or 0.05\n"
            f"  remedy     write {match[1]}%, or {told}% if that is what you mean"
        )
    return float(match[1]) / (100 if match[2] else 1)


def _served(arm: Arm) -> dict[str, Any]:
    return arm.model_dump(exclude={"name", "spec"})


def _arms(known: Sequence[Arm], run: Bisection) -> list[Arm]:
    """Those of the folder that this run came to: a folder may hold an arm whose turn was not whole."""
    used = {turn.arm for turn in run.turns} | {step.arm.name for step in run.steps}
    return [arm for arm in known if arm.name in used]


def _table(run: Bisection) -> Table:
    shown = Table(title=f"{run.evidence.metric}: every set against good ({run.evidence.confidence:.0%} intervals)")
    for column in ("step", "served", run.evidence.metric, "answer"):
        shown.add_column(column, justify="right" if column == "step" else "left")
    for row in suspects.table(run):
        shown.add_row(*map(escape, row))
    return shown
