"""What a server's metrics say, for tests: the text, two readings of it, and the screen that is drawn of them."""

from __future__ import annotations

import os

from rich.console import Console

from sglang_patches.observe import upstream
from sglang_patches.observe.figures import Figures
from sglang_patches.observe.scrape import Between, parse
from sglang_patches.observe.view import screen
from sglang_patches.runtime import _metrics


def text(passes: int = 10, tokens: int = 100, rank: int = 0, replica: int = 0) -> str:
    """Metrics of one rank that has verified so many requests: 3 in 4 first drafts accepted, half of the second."""
    own = f'tp_rank="{rank}",dp_rank="{replica}",model_name="m"'
    return f"""
{upstream.TOKENS}{{{own},mode="decode"}} {tokens}
{upstream.TOKENS}{{{own},mode="prefill_compute"}} {tokens // 10}
{upstream.RUNNING}{{{own},priority=""}} 3
{upstream.RUNNING}{{{own},priority="5"}} 3
{upstream.TOKEN_USAGE}{{{own}}} 0.{replica + 1}
{upstream.KV_MAX}{{{own}}} 1000
{_metrics.VERIFIED.name}{{{own}}} {passes}
{_metrics.DRAFTED.name}{{{own},position="1"}} {passes}
{_metrics.DRAFTED.name}{{{own},position="2"}} {passes}
{_metrics.ACCEPTED.name}{{{own},position="1"}} {passes * 3 // 4}
{_metrics.ACCEPTED.name}{{{own},position="2"}} {passes // 2}
{_metrics.SPEC_FORWARD.name}{{{own},phase="verify",path="graph",reason="padded"}} {passes * 3}
{_metrics.SPEC_FORWARD.name}{{{own},phase="verify",path="eager",reason="width"}} {passes}
{_metrics.SPEC_PHASE_SECONDS.name}_sum{{{own},phase="verify",clock="device"}} {passes / 100}
{_metrics.SPEC_PHASE_SECONDS.name}_count{{{own},phase="verify",clock="device"}} {passes}
{_metrics.ALLREDUCE.name}{{{own},group="tp",path="pynccl",up_to_bytes="16384",when="eager"}} {passes}
{_metrics.ALLREDUCE.name}{{{own},group="tp",path="ca",up_to_bytes="2048",when="captured"}} 122
"""


INFO = f'{_metrics.INFO.name}{{patch_set_id="abc",release="0.5.23",patches="provenance,oea-topk"}} 1\n'


def between(first: str, last: str, seconds: float = 2.0) -> Between:
    return Between(parse(first, 100.0), parse(last, 100.0 + seconds))


def drawn(found: Figures | None, width: int, note: str = "") -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(found, "http://here", width, note))
    return console.export_text()
