"""Subcommands of `sglang-patches` that are apps of their own: which there are, and how they are handed their words.

Their options are read where they are defined, and only the one that is called is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

#: By name: the module whose `app` it is, and what `sglang-patches --help` says of it.
ELSEWHERE = {
    "nccl": (
        "sglang_patches.nccl.app",
        "NCCL on this host: `nccl check` shows which settings it took, `nccl tune` finds the fast ones.",
    ),
    "bench": (
        "sglang_patches.bench.app",
        "Measure on real servers what patches, variables and arguments do: `bench ab` compares two selections.",
    ),
    "tune": (
        "sglang_patches.tune.app",
        "Find the fast settings of upstream's kernels on this GPU: `tune moe` writes tables of fused-MoE tiles.",
    ),
    "draft": (
        "sglang_patches.draft.app",
        "Say what an EAGLE-3 draft checkpoint is and whether it fits a target, offline: `draft check TARGET DRAFT`.",
    ),
    "spec": (
        "sglang_patches.spec.app",
        "Say how many tokens to draft at each batch size, and where not to, from measured times: `spec plan`.",
    ),
    "doctor": (
        "sglang_patches.doctor.app",
        "Say what of this machine will slow a server down or keep it from starting: GPUs, links, memory, patches.",
    ),
    "launch": (
        "sglang_patches.launch",
        "Serve by recipe: run `doctor`, print the exact `python -m sglang.launch_server` line, and execute it.",
    ),
    "top": (
        "sglang_patches.observe.top",
        "Watch a server: tokens/s, accept length by position, time of verify and draft, CUDA graphs, all-reduce, KV.",
    ),
    "metrics": (
        "sglang_patches.observe.documents",
        "Print the Prometheus metrics of all patches as a table, or a Grafana dashboard of them (docs/metrics.md).",
    ),
}


def register(app: typer.Typer) -> None:
    """Add them all to an app."""
    for name, (module, says) in ELSEWHERE.items():
        app.command(
            name=name,
            help=says,
            add_help_option=False,
            context_settings={
                "allow_extra_args": True,
                "ignore_unknown_options": True,
                "allow_interspersed_args": False,
            },
        )(_hand_on(name, module))


def _hand_on(name: str, module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        import_module(module).app(context.args, prog_name=f"sglang-patches {name}")

    return run
