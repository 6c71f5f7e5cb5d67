"""Reading a server's metrics: rates, restarts, what is absent, and the screen."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from sglang_patches.errors import PatchError
from sglang_patches.observe import upstream
from sglang_patches.observe.figures import figures
from sglang_patches.observe.scrape import parse
from sglang_patches.observe.view import screen
from sglang_patches.runtime import _metrics

from .metrics_text import INFO, between, drawn, text


def test_rates_are_what_counted_up_over_the_time_between() -> None:
    found = figures(between(text(), text(passes=50, tokens=300) + INFO))
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s, found.running) == (100.0, 10.0, 3)
    assert found.accept_length == 1 + (37 - 7 + 25 - 5) / 40
    assert found.accepted == [30 / 40, 20 / 40]
    verify = found.phases["verify"]
    assert (verify.graph_share, verify.reasons) == (0.75, {"eager: width": 20.0})
    assert verify.mean_ms == pytest.approx(10.0)
    assert (verify.forwards_per_s, verify.clock) == (80.0, "device")
    assert [(entry.path, entry.up_to_bytes, entry.eager_per_s, entry.captured) for entry in found.allreduce] == [
        ("ca", 2048, 0.0, 122),
        ("pynccl", 16384, 20.0, 0),
    ]
    assert (found.release, found.patch_set_id, found.restarted) == ("0.5.23", "abc", False)


def test_ranks_of_a_replica_count_once_and_replicas_are_added() -> None:
    def server(passes: int) -> str:
        return "".join(text(passes, passes * 10, rank, rank // 2) for rank in range(4))

    found = figures(between(server(10), server(50)))
    assert found.output_tokens_per_s == 2 * 400 / 2
    assert found.running == 6
    assert found.kv_share == 0.2
    assert found.accepted[1] == 0.5
    assert found.phases["verify"].forwards_per_s == 2 * 80.0


def test_a_counter_that_went_back_began_at_zero() -> None:
    found = figures(between(text(passes=1000, tokens=5000), text(passes=20, tokens=40)))
    assert found.restarted
    assert found.output_tokens_per_s == 20.0
    assert found.accept_length == 1 + 25 / 20


def test_no_share_is_more_than_all_where_a_server_started_anew() -> None:
    """Some counters have come further since than they were before, others have not."""
    before = text(passes=10, tokens=5000).replace('position="1"} 7', 'position="1"} 10')
    found = figures(between(before, text(passes=12, tokens=40)))
    assert found.restarted
    assert found.accepted == [9 / 12, 6 / 12]
    assert found.accept_length == 1 + 15 / 12
    assert found.phases["verify"].mean_ms == pytest.approx(10.0)
    assert found.phases["verify"].forwards_per_s == 24.0
    histogram = f"{_metrics.SPEC_PHASE_SECONDS.name}_sum"
    assert between(f"{histogram} 2\n", f"{histogram} 1\n").restarted, "no counter went back, but a sum of times"


def drafted(*by_position: tuple[int, int], passes: int) -> str:
    """Metrics of a server that verified `passes`: by position, for how many it was drafted and how many accepted it."""
    lines = [f"{_metrics.VERIFIED.name} {passes}"]
    for position, (drafted, accepted) in enumerate(by_position, start=1):
        lines.append(f'{_metrics.DRAFTED.name}{{position="{position}"}} {drafted}')
        lines.append(f'{_metrics.ACCEPTED.name}{{position="{position}"}} {accepted}')
    return "\n".join(lines) + "\n"


def test_a_server_that_drafts_one_token() -> None:
    found = figures(between(drafted((0, 0), passes=0), drafted((40, 30), passes=40)))
    assert (found.accepted, found.accept_length) == ([0.75], 1.75)
    shown = drawn(found, 100)
    assert re.search(r"draft token 1 +75%", shown)
    assert "draft token 2" not in shown


def test_positions_that_are_drafted_now_and_then() -> None:
    """--speculative-adaptive: 10 passes with 3 steps, then 90 with 1, and an interval with 1 step only."""
    start = drafted((0, 0), passes=0)
    once = drafted((100, 60), (10, 8), (10, 6), passes=100)
    assert figures(between(start, once)).accepted == [0.6, 0.8, 0.6]
    later = figures(between(once, drafted((150, 85), (10, 8), (10, 6), passes=150)))
    assert later.accepted == [0.5, None, None]
    assert later.accept_length == 1.5
    assert re.search(r"draft token 2 +-", drawn(later, 100))


def test_a_server_that_drafts_nothing_for_now_is_not_in_the_red() -> None:
    once = drafted((100, 60), passes=100)
    for first, last in ((once, drafted((100, 60), passes=150)), (drafted(passes=1), drafted(passes=9))):
        found = figures(between(first, last))
        assert (found.accept_length, found.accepted) == (1.0, [])
        assert found.missing["accepted"] == "nothing was drafted in this interval"
        assert "accept_length" not in found.missing
    console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO())
    console.print(screen(found, "http://here", 100))
    assert "\x1b[31m" not in console.file.getvalue()  # type: ignore[attr-defined]
    poor = figures(between(drafted((0, 0), passes=0), drafted((100, 1), passes=100)))
    console.print(screen(poor, "http://here", 100))
    assert "\x1b[31m1.01" in console.file.getvalue()  # type: ignore[attr-defined]


def test_experts_that_oea_saves() -> None:
    def oea(passes: int, loaded: int, upstreams: int, layers: int) -> str:
        phase = 'phase="verify"'
        return f"""
{_metrics.OEA_PASSES.name}{{{phase},path="graph",result="applied"}} {passes}
{_metrics.OEA_EXPERTS.name}{{{phase},set="loaded"}} {loaded}
{_metrics.OEA_EXPERTS.name}{{{phase},set="upstream"}} {upstreams}
{_metrics.OEA_LAYERS.name}{{{phase}}} {layers}
"""

    found = figures(between(oea(1, 100, 200, 10), oea(5, 412, 716, 110)))
    assert (found.oea_experts, found.oea_upstream) == (3.12, 5.16)
    assert re.search(r"experts a layer +3.1 +of 5.2 without the rule", drawn(found, 100))
    idle = figures(between(oea(5, 1, 2, 1), oea(5, 1, 2, 1)))
    assert (idle.oea_experts, idle.missing["oea_experts"]) == (None, "nothing counted in this interval")
    line = f'{_metrics.OEA_PASSES.name}{{result="applied"}} 3\n'
    assert "SGLANG_PATCHES_OEA_COUNT=on" in figures(between(line, line)).missing["oea_experts"]


def test_what_is_absent_is_none_and_said() -> None:
    found = figures(between("", INFO))
    for name in ("output_tokens_per_s", "running", "kv_share", "accept_length", "accept_alarm", "oea", "allreduce"):
        assert found.missing[name]
        assert getattr(found, name) in (None, [], {})
    assert found.missing["accept_length"] == (
        "no sglang_patches_spec_verified_total: needs patch provenance and speculation"
    )
    assert found.missing["verify.time"]
    idle = figures(between(text(), text()))
    assert idle.missing["accept_length"] == "nothing was verified in this interval"
    assert (idle.phases["verify"].graph_share, idle.output_tokens_per_s) == (None, 0.0)


def test_a_value_that_upstream_does_not_know_is_absent() -> None:
    assert upstream.KV_USED not in parse(f"{upstream.KV_USED} NaN\n", 0.0)
    with pytest.raises(PatchError, match="not Prometheus' text format"):
        parse("<html> { nothing\n", 0.0)


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_the_screen_fits_and_shows_a_dash_for_what_is_not_known(width: int) -> None:
    for found in (None, figures(between("", "")), figures(between(text(), text(passes=50) + INFO))):
        shown = drawn(found, width, "no answer")
        assert max(map(len, shown.splitlines())) <= width
    if width >= 40:
        for label, value in (("output tokens/s", "0.0"), ("draft token 1", "75%"), ("eager: width", "20.0/s")):
            assert re.search(rf"{label} +{value}", shown)
    nothing = drawn(figures(between("", "")), 100)
    assert re.search(r"output tokens/s +-", nothing)
    assert re.search(r"accept length +-", nothing)
    assert "needs patch provenance and speculation" in nothing.replace("\n", " ")


def test_panels_stand_beside_each_other_where_there_is_room() -> None:
    found = figures(between(text(), text(passes=50)))
    wide, narrow = drawn(found, 120), drawn(found, 80)
    assert any("load" in line and "acceptance" in line for line in wide.splitlines())
    assert not any("load" in line and "acceptance" in line for line in narrow.splitlines())
    assert "16 KiB" in wide
    assert "75%" in wide


def test_an_alarm_is_seen() -> None:
    alarm = f"{_metrics.ACCEPT_ALARM.name} 1\n"
    assert "ALARM" in drawn(figures(between(alarm, alarm)), 100)
