"""`sglang-patches nccl`: what NCCL took of its settings, and which settings are fast on this host.

Also ``python -m sglang_patches.nccl``, which needs torch, NumPy, typer and rich, but neither upstream nor the series.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from sglang_patches.errors import PatchError
from sglang_patches.nccl import candidates as contestants
from sglang_patches.nccl import profile as profiles
from sglang_patches.nccl import topology as topologies
from sglang_patches.nccl.group import Job
from sglang_patches.nccl.settings import with_profile, without_profile
from sglang_patches.nccl.topology import Topology

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See which settings NCCL really took (check), and find the ones that are fast on this host (tune).",
)

Backend = Literal["nccl", "gloo"]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Ranks: the tensor-parallel size of the server.")]
Hidden = Annotated[int, typer.Option(min=8, help="Hidden size of the model.")]
BackendOption = Annotated[Backend, typer.Option(help="gloo runs on the CPU, to try the command; it measures no NCCL.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for one process group; then it is ended and recorded.")]

_LOAD_TIMEOUT = 180.0  # seconds to import torch from a cold disk
_HOST_TOPOLOGY = Topology(absent="the group runs on the CPU")


def console(wide: int = 200) -> Console:
    """Where results go; wide enough for tables when it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=wide)


def fail(error: Exception) -> typer.Exit:
    """Print an error that is the user's to mend; raise what this returns."""
    typer.echo(f"sglang-patches: {error}", err=True)
    return typer.Exit(2)


def host(backend: Backend, tp: int) -> Topology:
    """The topology of the GPUs that ranks 0 .. tp - 1 use.

    Raises:
        PatchError: there are fewer GPUs than ranks.
    """
    if backend == "gloo":
        return _HOST_TOPOLOGY
    found = topologies.read()
    if len(found.gpus) < tp:
        raise PatchError(
            f"--tp {tp}: this host shows {found.describe()}\n  expected   {tp} GPUs, one a rank\n"
            f"  remedy     a smaller --tp, another CUDA_VISIBLE_DEVICES, or --backend gloo to try the command"
        )
    return found.subset(range(tp))


@app.command()
def check(
    tp: Tp,
    hidden: Hidden = 7168,
    backend: BackendOption = "nccl",
    timeout: Timeout = 120,
    profile: Annotated[bool, typer.Option(help="Add the profile that the server would use here.")] = True,
    logs: Annotated[Path | None, typer.Option(help="Folder to keep NCCL's logs in, one a rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Set, seen, taken: start a process group, all-reduce in a CUDA graph and eagerly, and read NCCL's own log.

    Exit code: 0 all that is set was taken (or NCCL does not tell), 1 something was not, 2 the command cannot run.
    """
    from sglang_patches.nccl import report
    from sglang_patches.nccl.check import run

    try:
        topology = host(backend, tp)
        settings = with_profile(topology, _nccl_version(backend)) if profile else without_profile()
        result = run(settings, backend=backend, world=tp, hidden=hidden, timeout=timeout, keep=logs)
    except (PatchError, profiles.ProfileError, OSError) as error:
        raise fail(error) from None
    if as_json:
        from sglang_patches.nccl import provenance

        made_by = provenance.document(settings, topology, result.facts.get("versions", {}))
        typer.echo(json.dumps({**result.document(), "provenance": made_by}, indent=2))
    else:
        console().print(report.checked(result))
    raise typer.Exit(1 if result.problems else 0)


@app.command()
def tune(
    tp: Tp,
    hidden: Hidden = 7168,
    rows: Annotated[str, typer.Option(help="Sizes: rows of the hidden size.")] = "1,2,3,4,8,16,32,64",
    backend: BackendOption = "nccl",
    rounds: Annotated[int, typer.Option(min=1, help="Each candidate is measured so often, in fresh processes.")] = 5,
    replays: Annotated[int, typer.Option(min=3, help="Samples per size, candidate and round.")] = 40,
    calls: Annotated[int, typer.Option(min=1, help="All-reduces in a row: in one graph.")] = 50,
    only: Annotated[str, typer.Option(help="Names of the candidates to measure (the baseline always is).")] = "",
    candidates: Annotated[Path | None, typer.Option(help="JSON file of further candidates.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, plot.png and the profile.")] = Path("nccl-tune"),
    save: Annotated[bool, typer.Option(help="Also put the profile where the server looks for it.")] = True,
    timeout: Timeout = 120,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no measurement after so long; 0: no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the data and of the order in each round.")] = 1,
) -> None:
    """Measure NCCL settings and other all-reduces against NCCL as it comes, and keep the best if it is better.

    Every candidate runs in fresh processes, in interleaved rounds, in captured graphs, and its sums are checked. One
    that hangs, crashes or sums wrongly is ended, recorded and out. Ctrl-C keeps what was measured.
    """
    from sglang_patches.nccl import provenance, report
    from sglang_patches.nccl.tune import Measured, Plan, measure
    from sglang_patches.nccl.verdict import MIN_ROUNDS, decide
    from sglang_patches.nccl.verdict import profile as make_profile

    try:
        topology = host(backend, tp)
        chosen = contestants.builtin(backend) + (contestants.from_file(candidates) if candidates else [])
        chosen = contestants.pick(chosen, [name for name in re.split(r"[,\s]+", only) if name])
        job = Job(backend, tp, (), _rows(rows), hidden, calls=calls, replays=replays, seed=seed)
        if candidates:  # only such can name a path that does not exist; it takes torch to know
            from sglang_patches.nccl.paths import path_class

            for candidate in chosen:
                path_class(candidate.path)
        out.mkdir(parents=True, exist_ok=True)
    except (PatchError, ValueError, OSError) as error:
        raise fail(error) from None
    settings = without_profile()
    ahead = max(1, min(6, (os.cpu_count() or 1) // (2 * tp)))
    plan = Plan(job, tuple(chosen), rounds, timeout, seconds, seed, ahead)
    results = out / "results.json"

    def keep(measured: Measured, **more: Any) -> None:
        new = results.with_suffix(".new")
        new.write_text(json.dumps({**measured.document(), **more}) + "\n", encoding="utf-8")
        new.replace(results)

    made_by = provenance.document(settings, topology, {})  # before: what a killed run has measured says its code too
    with _Display() as display:
        measured = measure(plan, settings, progress=display.show, save=partial(keep, provenance=made_by))
    verdict = decide(measured)
    made_by["versions"] |= measured.versions()
    keep(measured, provenance=made_by, verdict=verdict.document())
    screen = console(70 + 19 * len(job.rows))
    screen.print(report.tuned(measured, verdict))
    subtitle = f"{topology.describe()}, NCCL {measured.versions().get('nccl', '-')}"
    if note := report.plot(measured, verdict, out / "plot.png", subtitle):
        screen.print(note)
    typer.echo(f"{results}: raw samples, provenance and verdict")
    if measured.interrupted == "Ctrl-C":
        typer.echo("interrupted: no profile was written")
        raise typer.Exit(130)
    if verdict.rounds < MIN_ROUNDS:
        typer.echo(f"no profile was written: {verdict.rounds} whole rounds, and a verdict needs {MIN_ROUNDS}")
        raise typer.Exit(1)
    # A profile lies where servers read it: it names the code state, which is whole in the results.
    code = (made_by.pop("document") or {}).get("code", {})
    made_by |= {"patch_set_id": code.get("id"), "release": code.get("release")}
    made = make_profile(measured, verdict, topology, {**made_by, "results": str(results), "made": measured.made})
    _write_profile(made, out, save and backend == "nccl", topology)


@app.command(name="report")
def report_(
    results: Annotated[Path, typer.Argument(help="results.json (or .json.gz) of an earlier `tune`.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the plot to this file.")] = None,
) -> None:
    """Show the table, the verdict and the plot of an earlier `tune` again, from its raw samples."""
    from sglang_patches.nccl import report
    from sglang_patches.nccl.tune import load
    from sglang_patches.nccl.verdict import decide

    try:
        measured, made_by = load(results)
    except ValueError as error:
        raise fail(error) from None
    verdict = decide(measured)
    screen = console(70 + 19 * len(measured.plan.job.rows))
    screen.print(report.tuned(measured, verdict))
    subtitle = f"{made_by.get('topology', '-')}, NCCL {measured.versions().get('nccl', '-')}"
    if plot and (note := report.plot(measured, verdict, plot, subtitle)):
        screen.print(note)


def _declined(made: profiles.Profile, out: Path, topology: Topology) -> str:
    """Why a server would not take this profile here, as it lies in `out`; empty if it would.

    Full NVLink, say, or variables that profiles set and that are set by hand, in the environment or in NCCL's own
    files: all candidates ran with those, and the profile does not hold them.
    """
    environ = {name: value for name, value in os.environ.items() if name != profiles.SELECTION}
    taken = profiles.choose(topology, made.nccl_version, environ | {profiles.FOLDER: str(out.absolute())})
    return taken.why if taken.name == profiles.NONE.name else ""


def _write_profile(made: profiles.Profile, out: Path, save: bool, topology: Topology) -> None:
    written = profiles.save(made, out)
    typer.echo(f"{written}: profile {made.name}")
    if why := "" if topology.absent else _declined(made, out, topology):
        typer.echo(f"not installed, as a server would take no profile here: {why}")
        if any(name in why for name in profiles.TUNING):
            typer.echo(
                "  remedy     take them away and tune again: what was measured has them, and the profile does not"
            )
    elif save:
        typer.echo(f"{profiles.save(made)}: the same, where the server looks for it")
    elif topology.absent:
        typer.echo(f"not installed: it says nothing about NCCL ({topology.absent})")
    else:
        typer.echo(f"not installed: copy it to {profiles.folder()} to use it")


def _nccl_version(backend: Backend) -> str | None:
    """Of the NCCL that `import torch` loads. A process of its own asks, so that this one stays small."""
    if backend == "gloo":
        return None
    import subprocess

    code = "import torch; from sglang_patches.nccl.bindings import Nccl; print(Nccl().version())"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=_LOAD_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise PatchError(
            f"the NCCL of this environment did not load in {_LOAD_TIMEOUT:.0f} s\n"
            f"  remedy     see where `{sys.executable} -c 'import torch'` waits: a slow disk, or a driver that hangs"
        ) from None
    if done.returncode != 0:
        raise PatchError(f"the NCCL of this environment does not load: {done.stderr.strip()[-500:]}")
    return done.stdout.split()[-1]


def _rows(text: str) -> tuple[int, ...]:
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise PatchError(f"--rows {text!r}\n  expected   positive whole numbers joined with commas: 1,2,4,8")
    return tuple(found)


class _Display(AbstractContextManager["_Display"]):
    """A bar on a terminal, lines elsewhere; both with the time left."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task: Any = None

    def __enter__(self) -> _Display:
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*failure)

    def show(self, progress: Any) -> None:
        """Take a `tune.Progress`."""
        left = "" if progress.left is None else f"{progress.left:.0f} s left"
        said = f"round {progress.round + 1}: {progress.candidate}"
        if self._bar is None:
            print(f"{progress.done}/{progress.total} {said} {left}", file=sys.stderr, flush=True)
            return
        if self._task is None:
            self._task = self._bar.add_task(said, total=progress.total, left=left)
        self._bar.update(self._task, completed=progress.done, description=said, left=left)
