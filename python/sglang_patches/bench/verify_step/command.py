"""`sglang-patches bench verify-step`: starts an engine after the other, shows progress, and writes the folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sglang_patches import named_model, provenance, selection
from sglang_patches.bench import shard
from sglang_patches.bench.verify_step import arguments, grid, journal, render, workers
from sglang_patches.document import secrets
from sglang_patches.draft.check import config_of
from sglang_patches.errors import PatchError


def _numbers(text: str, option: str, least: int = 1) -> list[int]:
    """A list like ``1,2,4``; raises PatchError."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = [least - 1]
    if any(number < least for number in numbers):
        raise PatchError(f"{option} {text!r}: not whole numbers from {least}\n  expected   such as {option} 2,4")
    return list(dict.fromkeys(numbers))


# What is told of the share, by --drawn.
_DRAWN = {"routers": "drawn routers", "all": "all values drawn", "nothing": "dummy routers"}


def verify_step(
    out: Annotated[Path, typer.Option(help="Result folder; a bare name lies in benchmark/results. Continues one.")],
    draft_tokens: Annotated[
        str, typer.Option(help="Tokens of a chain, root included (1: no draft); an engine for each.")
    ] = ("2,3,4,8"),
    plain: Annotated[bool, typer.Option(help="Measure one-token decode without speculation, too.")] = True,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16",
    contexts: Annotated[str, typer.Option(help="Prompt tokens.")] = "1024,8192,32768",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 2,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens generated per request and round.")] = 32,
    modes: Annotated[str, typer.Option(help="graph, eager or both; on a CPU only eager exists.")] = "graph,eager",
    eager_everywhere: Annotated[bool, typer.Option(help="Eager for large batches at long contexts, too.")] = False,
    profile: Annotated[bool, typer.Option(help="Tell the kernels of a few cells.")] = True,
    sweep: Annotated[bool, typer.Option(help="First serve every batch size, to see which have graphs.")] = False,
    captured: Annotated[int, typer.Option(help="Largest batch that upstream captures; 0: the sizes measured.")] = 0,
    model: Annotated[
        str, typer.Option(help="The target: folder, or in the hub's cache; else a share of Kimi-K2.5.")
    ] = "",
    draft: Annotated[str, typer.Option(help="Its EAGLE-3 draft, likewise.")] = "",
    layers: Annotated[int, typer.Option(min=6, max=shard.WHOLE, help="Layers of the share.")] = shard.LAYERS,
    weights: Annotated[str, typer.Option(help="Of the share's experts: bf16, or int4 as published.")] = "bf16",
    drawn: Annotated[
        str, typer.Option(help="Of the share's weights: routers (tokens choose apart), all (drafts, too) or nothing.")
    ] = "routers",
    attention_backend: Annotated[str, typer.Option(help="Of the target; torch_native on a CPU.")] = "",
    merge: Annotated[list[Path] | None, typer.Option(help="Add a folder's records, and measure nothing.")] = None,
    server: Annotated[list[str] | None, typer.Argument(metavar="[-- SERVER ARGS]", help="More, and they win.")] = None,
) -> None:
    """Time draft decode, verify, sampling, draft extend and host gap of EAGLE-3 cycles, beside their byte floors.

    One engine per number of draft tokens; batch sizes, contexts, graphs and eager take turns inside it. Random prompts
    are prefilled once and stay in the radix cache. Everything measured is kept at once; the same command continues.

    Example, a rank's share of Kimi-K2.5 on one GPU: [bold]sglang-patches bench verify-step --out h200[/bold]

    On two GPUs each takes half: [bold]CUDA_VISIBLE_DEVICES=0 ... --out a --draft-tokens 2,3[/bold] and
    [bold]CUDA_VISIBLE_DEVICES=1 ... --out b --draft-tokens 4,8 --no-plain[/bold], then
    [bold]... --out h200 --merge benchmark/results/a --merge benchmark/results/b[/bold]

    All of its layers, as published (73 GB): [bold]... --layers 61 --weights int4 --contexts 1024 --out h200-61[/bold]

    Without a GPU, the bundled pair: [bold]... --model test/models/tiny-kimi --draft test/models/tiny-kimi-eagle3
    --contexts 32,96 --batch-sizes 1,2 --out cpu[/bold]

    Exit code: 0 all was measured; 1 an engine died, the others were measured; 2 nothing was.
    """
    folder = out if len(out.parts) > 1 or out.is_absolute() or out.is_dir() else Path("benchmark/results") / out
    if merge:
        folder.mkdir(parents=True, exist_ok=True)
        added = journal.merge(merge, folder)
        typer.echo(f"{folder}: {added} records added")
        typer.echo(render.write(folder, merge).headline)
        return
    if bool(model) != bool(draft) and (draft or _numbers(draft_tokens, "--draft-tokens")):
        raise PatchError("--model and --draft go together\n  remedy     give both, or neither for the rank's share")
    given = [named_model.folder(option, name) for option, name in (("--model", model), ("--draft", draft)) if name]
    for option, word, known in (("--weights", weights, shard.WEIGHTS), ("--drawn", drawn, tuple(_DRAWN))):
        if word not in known:
            raise PatchError(f"{option} {word!r}\n  expected   {' or '.join(known)}")
    share = (layers, weights, drawn)
    if model and share != (shard.LAYERS, "bf16", "routers"):
        raise PatchError(
            "--layers, --weights and --drawn are of the share, and --model is served\n  remedy     one or the other"
        )
    cuda = selection.has_gpu()
    if not (cuda or model):
        raise PatchError(
            "no GPU here, and without --model a share of Kimi-K2.5 would be served, which needs one\n"
            "  remedy     the bundled pair: --model test/models/tiny-kimi --draft test/models/tiny-kimi-eagle3 "
            "--contexts 32,96 --batch-sizes 1,2"
        )
    measured = grid.Grid(
        batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
        contexts=_numbers(contexts, "--contexts"),
        modes=_modes(modes, cuda),
        rounds=rounds,
        tokens=tokens,
        eager_everywhere=eager_everywhere,
        profiled=profile,
        drawn_routers=drawn == "routers" and not model,
        drawn_values=drawn == "all" and not model,
    )
    engines = [*([0] if plain else []), *_numbers(draft_tokens, "--draft-tokens")]
    if not engines or not measured.batch_sizes or not measured.contexts:
        raise PatchError(
            "nothing to measure\n  remedy     give --draft-tokens, --batch-sizes and --contexts, or --plain"
        )
    if model:
        served = {f"--model {model}": config_of(given[0]), f"--draft {draft}": config_of(given[-1])}
    else:
        served = {"the share": shard.target(layers, weights), "its draft": shard.draft(layers)}
    if not any(engines):
        served.popitem()  # no draft is served
    arguments.check_positions(measured, served, server or [])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pair = (given[0], given[-1]) if model else shard.write(Path(scratch), layers, weights)
        chosen = arguments.Chosen(
            target=pair[0],
            draft=pair[1],
            dummy=not model,
            share=f"{layers} layers, {weights}, {_DRAWN[drawn]}" if not model else "a folder",
            cuda=cuda,
            grid=measured,
            captured=captured,
            attention_backend=attention_backend,
            extra=list(server or []),
            command=secrets.again(["sglang-patches", "bench", "verify-step", *_own_words(sys.argv)], os.environ),
        )
        records = journal.read(folder)
        _check_same(records, chosen, engines)
        left = [engine for engine in engines if engine not in journal.done(records)]
        if len(left) < len(engines):
            typer.echo(f"{folder}: {len(engines) - len(left)} of {len(engines)} engines are measured already")
        try:
            failed = workers.measure(left, chosen, folder, Path(scratch), sweep)
        finally:
            result = render.write(folder)
    typer.echo((folder / "table.md").read_text())
    typer.echo(f"{folder}: {result.headline}")
    if failed:
        raise typer.Exit(1 if result.analysis["rows"] else 2)


def _own_words(argv: list[str]) -> list[str]:
    return argv[argv.index("verify-step") + 1 :] if "verify-step" in argv else argv[1:]


def _modes(text: str, cuda: bool) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words or set(words) - {"graph", "eager"}:
        raise PatchError(f"--modes {text!r}\n  expected   graph, eager or graph,eager")
    return words if cuda else ["eager"]


def _check_same(records: list[dict[str, object]], chosen: arguments.Chosen, engines: list[int]) -> None:
    """Refuse to add to a folder that was measured with other code or arguments.

    Raises PatchError naming what differs.
    """
    now = provenance.code_state()["id"]
    for tokens, of in journal.current(records).items():
        head = next((record for record in of if record["record"] == "engine"), None)
        if head is None:
            continue
        document = head["document"] or {}
        was = document.get("code", {}).get("id", now)
        pairs = [("patch set", was, now)]
        if tokens in engines:
            pairs.append(("server arguments", " ".join(head["arguments"]), " ".join(chosen.shown(tokens))))
        pairs.append(("model", journal.share(head), chosen.share))
        for what, before, after in pairs:
            if before != after:
                raise PatchError(
                    f"this folder was measured with another {what} ({grid.key(tokens)})\n  there      {before}\n"
                    f"  now        {after}\n  remedy     name another folder with --out, or restore the former"
                )
