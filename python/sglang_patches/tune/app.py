"""`sglang-patches tune`: which settings of upstream's kernels are fast on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_patches import named_model
from sglang_patches.errors import PatchError, told

if TYPE_CHECKING:
    from sglang_patches.tune.moe.geometry import Geometry

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Measure which settings of upstream's kernels are fast on this GPU, and write the files that upstream reads.",
)


@app.callback()
def _commands() -> None:
    """Keeps the name of a command needed also where there is one only."""


@app.command()
def moe(
    out: Annotated[Path, typer.Option(help="Result folder. The same command again goes on where it was.")],
    model: Annotated[
        str | None, typer.Option(help="Folder, or in the hub's cache; only its config.json is read.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="The server's --tp-size.")] = 8,
    ep: Annotated[int, typer.Option(min=1, help="The server's --ep-size.")] = 1,
    experts: Annotated[int, typer.Option(min=0, help="In place of --model: experts on a rank (E).")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="In place of --model: hidden size.")] = 0,
    intermediate: Annotated[int, typer.Option(min=0, help="In place of --model: an expert's width on a rank.")] = 0,
    top_k: Annotated[int, typer.Option(min=0, help="In place of --model: experts a token.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, fp8_w8a8 or int4_w4a16; else the model's.")] = "",
    block_shape: Annotated[str, typer.Option(help="With --dtype: 128,128 for fp8; 0,32 for int4 groups of 32.")] = "",
    tokens: Annotated[
        str, typer.Option(help="Batch sizes: requests, times draft tokens in a verify.")
    ] = "1,2,4,8,16,24,32,48,64",
    seconds: Annotated[float, typer.Option(min=1, help="Time to take; the search narrows to fit.")] = 240,
    gpus: Annotated[int, typer.Option(min=0, help="Share the token counts out to so many; 0: all visible.")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="Layers whose weights lie in memory, to be read in turn.")] = 4,
    candidates: Annotated[int, typer.Option(min=0, help="Screen at most so many, by chance; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of weights, routing and order.")] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Interpret the kernel on a CPU, to try the command.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only make the tables anew from the samples.")] = False,
) -> None:
    """Tune upstream's Triton kernel of MoE layers for this GPU, and write the tables that upstream looks for.

    Tiles, warps, stages and TMA for both products of a layer, for each batch size; only what makes the whole layer
    faster beyond chance goes in. Stop servers first: it needs the GPU for itself.

    A rank's share of Kimi-K2.5 in bfloat16, four minutes: [bold]sglang-patches tune moe --out h200-moe[/bold]

    Your model: [bold]... --model /srv/models/MODEL --tp 8[/bold]. Quantized experts that Marlin, DeepGEMM, CUTLASS or
    FlashInfer serve read no table: docs/tune-moe.md says which do.

    Use it: [bold]SGLANG_PATCHES=+moe-config-tables SGLANG_PATCHES_MOE_TABLES=h200-moe[/bold] beside upstream's own
    tables, or [bold]SGLANG_MOE_CONFIG_DIR=h200-moe[/bold] in place of all of them.

    Exit code: 0 measured (whether or not there is a table), 2 not.
    """
    with told():
        from sglang_patches.tune.moe import journal, parent
        from sglang_patches.tune.moe import report as reports

        geometry = _geometry(model, tp, ep, (experts, hidden, intermediate, top_k), dtype, block_shape)
        found = () if cpu else parent.visible()
        if not (found or cpu or report):
            raise PatchError(
                "this process sees no GPU\n  remedy     run it on one (CUDA_VISIBLE_DEVICES), or try the command with "
                "--cpu and small sizes"
            )
        if gpus > len(found) and not cpu and not report:
            raise PatchError(f"--gpus {gpus}: this process sees {len(found)}\n  remedy     a smaller --gpus")
        request = parent.Request(
            geometry, _tokens(tokens), out, found[: gpus or None], seconds, seed, layers, candidates
        )
        before = len(journal.measurements(out))
        try:
            if not report:
                parent.measure(request)
        except KeyboardInterrupt:
            typer.echo("interrupted: what was measured is kept; the same command goes on", err=True)
            raise typer.Exit(130) from None
        result = parent.result(request)
        # What made the samples, also where the same command found that there is nothing left to measure.
        measured_by = reports.measured_by(out) if len(journal.measurements(out)) == before else None
        written = reports.write(result, measured_by or _provenance())
        typer.echo(reports.lines_of(result))
        typer.echo(reports.headline(result))
        if result.broken_floors:
            typer.echo(f"`bytes alone` is above what was measured, at {result.broken_floors} tokens", err=True)
        for file in written:
            typer.echo(str(file))


def _geometry(
    model: str | None, tp: int, ep: int, sizes: tuple[int, int, int, int], dtype: str, block_shape: str
) -> Geometry:
    from dataclasses import replace

    from sglang_patches.tune.moe import geometry as geometries

    if model is not None and any(sizes):
        raise PatchError("--model and sizes\n  remedy     give one of them")
    if any(sizes) and not all(sizes):
        raise PatchError("sizes in part\n  expected   --experts, --hidden, --intermediate and --top-k together")
    if dtype and dtype not in geometries.DTYPES:
        raise PatchError(f"--dtype {dtype}\n  expected   {', '.join(geometries.DTYPES)}")
    shape: tuple[int, int] | None = None
    if block_shape:
        try:
            rows, columns = (int(part) for part in block_shape.split(","))
        except ValueError:
            raise PatchError(f"--block-shape {block_shape}\n  expected   two numbers: 128,128 or 0,32") from None
        shape = (rows, columns)
    if all(sizes):
        return geometries.Geometry(*sizes, dtype or "bfloat16", shape)  # type: ignore[arg-type]
    found = geometries.kimi_k25()
    if model is not None:
        found = geometries.of_model(named_model.folder("--model", model), tp, ep)
    if dtype:
        found = replace(found, dtype=dtype, block_shape=shape)  # type: ignore[arg-type]
    return found


def _tokens(text: str) -> tuple[int, ...]:
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise PatchError(f"--tokens {text!r}\n  expected   positive whole numbers joined with commas: 1,2,4,8")
    return tuple(found)


def _provenance() -> dict[str, object]:
    from sglang_patches.document import collect
    from sglang_patches.document.unnamed import unnamed

    told: dict[str, object] = unnamed(collect.environment(with_time=True).model_dump(mode="json"))
    return told
