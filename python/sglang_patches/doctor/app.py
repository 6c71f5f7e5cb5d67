"""The command line of ``sglang-patches doctor``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_patches import ports
from sglang_patches.doctor import models, report
from sglang_patches.doctor.checks import examine
from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host
from sglang_patches.doctor.read import read
from sglang_patches.doctor.sharing import unnamed
from sglang_patches.errors import told

# What a recorded host holds already.
_OF_THIS_MACHINE = (
    "model", "draft", "tp", "port", "host", "context_length", "mem_fraction_static", "base_gpu_id", "gpu_id_step",
    "record",
)  # fmt: skip

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder or hub name of the target model.")] = "",
    draft: Annotated[str, typer.Option(help="Folder or hub name of the EAGLE-3 draft.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor parallel size: GPUs to use.", min=1)] = 1,
    port: Annotated[int, typer.Option(help="Port to serve on.", min=1, max=65535)] = 30000,
    context_length: Annotated[
        int | None, typer.Option(help="Positions to serve (by default all of the model).", min=1)
    ] = None,
    mem_fraction_static: Annotated[float, typer.Option(help="As the server's.", min=0.05, max=1)] = 0.9,
    base_gpu_id: Annotated[int, typer.Option(help="As the server's: the first GPU to use.", min=0)] = 0,
    gpu_id_step: Annotated[int, typer.Option(help="As the server's: GPUs from one rank to the next.", min=1)] = 1,
    recorded: Annotated[
        Path | None, typer.Option("--recorded", help="Examine a host that --record wrote, not this machine.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="As the server's: the address or name to listen at.", metavar="ADDRESS")
    ] = ports.DEFAULT_HOST,
    record: Annotated[Path | None, typer.Option(help="Write all that was read of this machine to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what of this machine will slow a server down or keep it from starting: GPUs, links, NCCL, memory, patches.

    Takes seconds, changes nothing. Exit code: 0 no failure, 1 a failure, 2 usage.
    """
    renamed = recorded is None and (os.sep in host or Path(host).suffix == ".json" or Path(host).is_file())
    if renamed:  # it was the name of --recorded
        recorded = Path(host)
    if recorded is not None:
        of_machine = [name for name in _OF_THIS_MACHINE if not (renamed and name == "host")]
        sources = {name: context.get_parameter_source(name) for name in of_machine}
        # By its name: newer versions of typer have a ParameterSource of their own beside click's.
        given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        if given:
            options = ", ".join("--" + name.replace("_", "-") for name in given)
            typer.echo(
                f"sglang-patches: {options} with --recorded {recorded}: that file says what was to be served and how\n"
                f"  remedy     leave {options} out, or record again with it",
                err=True,
            )
            raise typer.Exit(2)
    with told():
        ok = run(
            model, draft, tp, port, mem_fraction_static, context_length, recorded, record, as_json,
            base_gpu=base_gpu_id, gpu_step=gpu_id_step, bind=host,
        )  # fmt: skip
    raise typer.Exit(0 if ok else 1)


def run(
    model: str,
    draft: str,
    tp: int,
    port: int,
    memory_fraction: float = 0.9,
    context_length: int | None = None,
    recorded: Path | None = None,
    record: Path | None = None,
    as_json: bool = False,
    environ: Mapping[str, str] | None = None,
    forgiven: Collection[str] = (),
    base_gpu: int = 0,
    gpu_step: int = 1,
    bind: str = ports.DEFAULT_HOST,
) -> bool:
    """Examine this machine, or one that was recorded, and print the report; whether no finding is a failure.

    Args:
        recorded: a file that `record` wrote; the arguments before it are then those of that file.
        record: a file to write the host to, without what says which machine it is; `as_json` leaves that out, too.
        environ: of the server, where it is not that of this process.
        forgiven: checks whose failures are shown and do not count.
        base_gpu, gpu_step: the first GPU, and from one rank's to the next one's.
        bind: address or name at which the server will listen.

    Raises:
        PatchError: `recorded` is no host.
    """
    if recorded is not None:
        host = Host.read(recorded)
    else:
        wanted = models.serving(
            model, draft, tp, port, memory_fraction, context_length, base_gpu, gpu_step, environ, bind
        )
        host = read(wanted, environ)
        if record is not None or as_json:
            host = unnamed(host)
    if record is not None:
        record.write_text(host.to_json(), encoding="utf-8")
    findings = examine(host)
    if as_json:
        print(json.dumps(report.document(host, findings), indent=2))
    else:
        report.show(host, findings, Console() if sys.stdout.isatty() else Console(width=160))
    return healthy([finding for finding in findings if finding.check not in forgiven])


def healthy(findings: list[Finding]) -> bool:
    """Whether no finding is a failure."""
    return all(finding.level != "failure" for finding in findings)
