"""`sglang-patches`: see, check and change the patches on the installed SGLang."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_patches import editing, elsewhere, hunks, selection, series, upstream
from sglang_patches.errors import PatchError, told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Switchable patches on a pinned SGLang release.

    The variable [bold]SGLANG_PATCHES[/bold] says which patches are on, wherever `sglang` is imported next:
    unset or `default` (each patch's default), `none`, `all`, a list `a,b`, or changes `+a,-b` (also `none,+a` and
    `all,-b`).
    A patch that is off is absent: its lines are not in the process.

    Change a patch: `edit NAME DIR`, edit the files in DIR, `refresh NAME DIR`, `verify`.
    """,
)

Name = Annotated[str, typer.Argument(help="A patch, as `sglang-patches list` names it.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def console() -> Console:
    """Where results go; wide enough for tables when it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def context() -> tuple[upstream.Upstream, series.Series]:
    """The installed upstream and its series.

    Raises:
        PatchError: SGLang is missing, or there is no series for its release.
    """
    installed = upstream.locate()
    if installed is None:
        raise PatchError("SGLang is not installed here\n  remedy     pip install sglang-patches, which pins it")
    return installed, series.load(installed.release)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a subcommand whose PatchErrors and failed file operations end it with a message and exit code 2."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        with told():
            function(*args, **kwargs)

    app.command(name=function.__name__.rstrip("_").replace("_", "-"))(run)
    return function


@command
def list_(as_json: AsJson = False) -> None:
    """Show every patch of the series: default, whether it is on now, why it exists and what it touches."""
    _installed, patches = context()
    on = {patch.name for patch in selection.select(patches)}
    if as_json:
        rows = [
            {"name": p.name, "default": p.default, "on": p.name in on, "why": p.field("Why"), "touches": p.touches}
            for p in patches.patches
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(
        "Patch", "Default", "Now", "Description", "Why", "Touches", title=f"patches on sglang {patches.release}"
    )
    for patch in patches.patches:
        now = "[green]on[/green]" if patch.name in on else "off"
        files = "\n".join(path.removeprefix("sglang/") for path in patch.touches)
        cells = (patch.summary, patch.field("Why"), files)
        table.add_row(f"[bold]{patch.name}[/bold]", patch.default, now, *map(escape, cells))
    console().print(table)


@command
def show(name: Name, context_lines: Annotated[int, typer.Option("--context", "-U", min=0)] = 3) -> None:
    """Print a patch with lines of context, taken from the installed upstream."""
    installed, patches = context()
    patch = patches[name]
    out = [patch.header.encode()]
    for path, insertions in patch.insertions.items():
        data = installed.read(path)
        if data is None or upstream.digest(data) != patch.pre_images[path]:
            typer.echo(f"sglang-patches: {path} is not the file the patch was made against: no context", err=True)
            out.append(hunks.render(path, insertions))
        else:
            out.append(hunks.render(path, insertions, data, context_lines))
    text = b"".join(out).decode("utf-8", "replace")
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        console().print(Syntax(text, "diff", word_wrap=True))
    else:
        typer.echo(text, nl=False)


@command
def status(as_json: AsJson = False) -> None:
    """Say for this environment whether each patch is applied, off, not needed or mismatched.

    Exit code: 0 all selected patches apply, 1 some cannot, 2 the selection or the installation is unusable.
    """
    from sglang_patches.status import report

    ok = report(*context(), as_json=as_json)
    raise typer.Exit(0 if ok else 1)


@command
def verify(as_json: AsJson = False) -> None:
    """Check the whole series: pre-images, every patch alone, all pairs, all together, headers, files.

    Exit code: 0 all checks passed, 1 some failed.
    """
    from sglang_patches.verify import report

    try:
        ok = report(*context(), as_json=as_json)
    except PatchError as error:
        typer.echo(f"sglang-patches: {error}", err=True)
        ok = False
    raise typer.Exit(0 if ok else 1)


@command
def build(
    directory: Annotated[Path, typer.Argument(help="A new folder.", metavar="DIR")],
) -> None:
    """Write the complete patched `sglang` package to DIR/sglang, for auditing or an image.

    A process that imports that tree (PYTHONPATH=DIR) must run with SGLANG_PATCHES=none: it is patched already.
    """
    from sglang_patches.status import build_tree

    installed, patches = context()
    state = build_tree(installed, selection.select(patches), directory)
    typer.echo(f"{directory / 'sglang'}: sglang {state['release']} with patch set {state['id']}")


@command
def warm() -> None:
    """Write the patched files of the current selection to the cache folder; print each upstream path and its copy.

    For an image whose file system is read-only when it runs. Exit code 2 where the cache folder cannot be used.
    """
    from sglang_patches import cache
    from sglang_patches.overlay import Overlay

    installed, patches = context()
    overlay = Overlay(installed, selection.select(patches))
    for path in overlay.by_path:
        copy = overlay.store(path, installed.read(path), installed.path(path))
        if not Path(copy).is_relative_to(cache.folder()):
            # This process's own folder is gone when it ends.
            raise PatchError(f"{cache.folder()} was not used\n  remedy     see the warning above")
        typer.echo(f"{path}\t{copy}")


@command
def new(
    name: Annotated[str, typer.Argument(help="Lower-case words joined with hyphens.", metavar="NAME")],
    directory: Annotated[Path, typer.Argument(help="A new folder to edit in.", metavar="DIR")],
    files: Annotated[list[str], typer.Argument(help="Upstream files: sglang/srt/server_args.py", metavar="FILE...")],
) -> None:
    """Begin a patch: write upstream's FILEs and a header to fill in to DIR; `refresh NAME DIR` then exports it."""
    installed, patches = context()
    series.check_name(name)
    if name in patches.by_name:
        raise PatchError(f"{name} exists\n  remedy     change it with: sglang-patches edit {name} DIR")
    written = editing.check_out(installed, directory, files)
    header = directory / editing.HEADER
    header.write_text(editing.draft_header(name), encoding="utf-8")
    typer.echo("\n".join(map(str, [header, *written])))
    typer.echo(
        f"Fill in the header, add lines (only add) to the files, then: sglang-patches refresh {name} {directory}"
    )


@command
def edit(
    name: Name,
    directory: Annotated[Path, typer.Argument(help="A new folder to edit in.", metavar="DIR")],
    file: Annotated[list[str] | None, typer.Option(help="A further upstream file to edit (repeatable).")] = None,
) -> None:
    """Write upstream's files with this patch (and no other) applied to DIR; `refresh NAME DIR` then re-exports it."""
    installed, patches = context()
    written = editing.check_out(installed, directory, file or [], patches[name])
    typer.echo("\n".join(map(str, written)))
    typer.echo(f"Edit these files (only add lines), then: sglang-patches refresh {name} {directory}")


@command
def refresh(
    name: Name,
    directory: Annotated[Path | None, typer.Argument(help="The folder `edit` or `new` wrote.", metavar="[DIR]")] = None,
) -> None:
    """Re-export a patch from the files edited in DIR, or from itself: then the committed file must not change."""
    installed, patches = context()
    changed = editing.write(patches, name, editing.export(patches, installed, name, directory))
    typer.echo("\n".join(f"{file}: written" for file in changed) or f"{name}: unchanged")


@command
def port(
    to: Annotated[
        str, typer.Option("--to", help="A release such as 0.5.24; with --dry-run also A..B, A.. or ..B.", metavar="REL")
    ],
    source: Annotated[
        str | None, typer.Option("--from", help="The lane to carry; by default the newest.", metavar="REL")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no lane; over a range, print the matrix.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the lane if there is one.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(help="Write the files of patches that are left out here, to finish by hand.", metavar="DIR"),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Put the matrix into this Markdown file, between its marks.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Carry the series to another upstream release and write its lane, patches/REL (docs/lanes.md).

    Both releases are taken from the package index as wheels and kept in the cache folder; nothing is installed.

    Exit code: 0 every patch was carried and can run, 1 some not (those that can are written), 2 nothing was done.
    """
    from sglang_patches.port import app as porting
    from sglang_patches.port import lane, matrix, needs, report, wheels

    many = ".." in to
    if many and not dry_run:
        raise PatchError("a range of releases can only be looked at\n  remedy     add --dry-run, or name one release")
    if (many and work) or (write and not dry_run):
        raise PatchError("--work is for one release, --write for --dry-run\n  remedy     leave that option out")
    releases = wheels.between(to)
    if not dry_run:
        lane.check_free(series.patches_folder(), releases[0], force)
    carried = porting.lane_to_port(source, releases[0])
    done = porting.carry(carried, releases, lambda line: typer.echo(line, err=True))
    columns: matrix.Columns = {release: ported for release, (_, ported) in done.items()}
    if as_json:
        typer.echo(report.as_json([report.document(carrier, ported) for carrier, ported in done.values()]))
    else:
        if not many:
            typer.echo(report.text(*done[releases[0]]))
        console().print(matrix.table(carried.release, columns))
    if write:
        changed = matrix.replace(write, matrix.markdown(carried.release, columns))
        typer.echo(f"{write}: {'written' if changed else 'unchanged'}", err=True)
    carrier, ported = done[releases[0]]
    if work:
        for tree, to_do in lane.write_work(carrier, ported, work).items():
            then = f"with sglang=={releases[0]} installed: sglang-patches refresh {tree.name} {tree}"
            typer.echo(f"{tree}: {to_do}; {then}", err=True)
    for said in sorted(set(needs.adapter_missing(carrier.new)) - set(needs.adapter_missing(carrier.old))):
        typer.echo(
            f"sglang_patches/lane: imports {said}, which sglang {releases[0]} lacks: override it there", err=True
        )
    if not dry_run:
        folder = lane.write(carried, carrier.new, ported, force)
        typer.echo(f"{folder}: written and verified; it is used where sglang=={releases[0]} is installed", err=True)
    whole = all(entry.data is not None and not entry.missing for ported in columns.values() for entry in ported)
    raise typer.Exit(0 if whole else 1)


@command
def stop(
    port: Annotated[int, typer.Option(help="Port of the server to end.", min=1, max=65535)],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a clean end before killing.", min=0)] = 60,
) -> None:
    """End the SGLang server that listens on a port, and its child processes, and nothing else."""
    from sglang_patches.stop import stop_server

    stop_server(port, timeout, echo=typer.echo)


@command
def provenance(
    server: Annotated[str, typer.Option(help="Ask a running server, such as http://127.0.0.1:30000")] = "",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    with_time: Annotated[bool, typer.Option("--with-time", help="Add the time.")] = False,
    with_host: Annotated[bool, typer.Option("--with-host", help="Add the host name.")] = False,
    api_key: Annotated[
        str, typer.Option(help="The server's API key; else SGLANG_API_KEY_FILE or SGLANG_API_KEY.")
    ] = "",
) -> None:
    """Write the provenance document: code, libraries, environment, models and machine, without secrets.

    Of this environment (docs/provenance.md; takes seconds), or of a running server.
    """
    from sglang_patches import api_key as keys
    from sglang_patches.document import collect
    from sglang_patches.document import server as servers

    if server:
        document = servers.ask(server, keys.of_requests(api_key), with_time, with_host)
    else:
        document = collect.environment(with_time, with_host)
    text = document.model_dump_json(indent=2)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


@command
def diff(
    a: Annotated[
        Path, typer.Argument(help="A provenance document, a result that embeds one, or its folder.", metavar="A")
    ],
    b: Annotated[Path, typer.Argument(help="Another.", metavar="B")],
    as_json: AsJson = False,
) -> None:
    """Say in plain words what differs between two provenance documents, most telling first.

    Of two results, arm by arm, those that both have.

    Exit code: 0 nothing that matters differs, 1 something does, 2 a file is not such a document.
    """
    from dataclasses import asdict

    from sglang_patches.document import diff as differ
    from sglang_patches.document import schema

    told, lines, every = [], [], []
    compared, left = schema.pairs(a, b)
    for arm, one, other in compared:
        found = differ.diff(one, other)
        said = f"{f'arm {arm}: ' if arm else ''}{differ.summary(one, other, found)}"
        told.append({"arm": arm, "summary": said, "differences": [asdict(entry) for entry in found]})
        lines += [said, *(f"  {'*' if entry.matters else '-'} {entry}" for entry in found)]
        every += found
    if as_json:
        by_arm = {"arms": told, "not_compared": left}
        whole = by_arm if told[0]["arm"] else {name: told[0][name] for name in ("summary", "differences")}
        typer.echo(json.dumps(whole, indent=2))
    else:
        typer.echo("\n".join(lines))
        if left:
            typer.echo(f"not compared: {', '.join(left)} (no arm of both, or its servers told no code state)")
        if not all(entry.matters for entry in every):
            typer.echo("(* matters, - taken not to matter)")
    raise typer.Exit(1 if any(entry.matters for entry in every) else 0)


elsewhere.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
