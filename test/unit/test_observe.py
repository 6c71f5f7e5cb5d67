"""Reading a server's metrics: rates, restarts, what is absent, the screen, and the documents made from the names."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml
from pydantic import TypeAdapter
from rich.console import Console
from typer.testing import CliRunner

from sglang_patches.errors import PatchError
from sglang_patches.observe import dashboard, documents, top, upstream
from sglang_patches.observe.figures import Figures, figures
from sglang_patches.observe.scrape import Between, Scrape, fetch, parse
from sglang_patches.observe.view import screen
from sglang_patches.runtime import _metrics

DOCS = Path(__file__).parents[2] / "docs"
RANK = 'tp_rank="{}",pp_rank="0"'


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


def drawn(found: Figures | None, width: int, note: str = "") -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(found, "http://here", width, note))
    return console.export_text()


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


class Answers(BaseHTTPRequestHandler):
    """Answers with what its server holds: a status, and a text that counts up."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        body = self.server.text(len(self.server.asked)).encode()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.asked, made.status, made.text = [], 200, lambda turn: text(passes=10 * turn, tokens=100 * turn) + INFO
    made.url = f"http://127.0.0.1:{made.server_address[1]}"
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, "", "--enable-metrics"),
        (401, "", "SGLANG_API_KEY"),
        (500, "", "look at its log"),
        (200, "", "no metric of SGLang"),
        (200, "python_gc_total 3\n", "no metric of SGLang"),
    ],
)
def test_a_server_that_cannot_be_read_is_refused_with_what_helps(
    server: Any, status: int, answer: str, said: str
) -> None:
    server.status, server.text = status, lambda turn: answer
    with pytest.raises(PatchError) as error:
        fetch(server.url)
    assert said in str(error.value)
    assert "remedy" in str(error.value)


def test_nothing_that_listens_and_no_url() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(PatchError, match=r"Connection refused\n  remedy     name a running"):
            fetch(f"http://127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(PatchError, match="not the URL of a server"):
        fetch("127.0.0.1:30000")


def test_once_prints_and_the_key_is_sent_from_the_variable(server: Any, tmp_path: Path) -> None:
    run = CliRunner().invoke(
        top.app,
        ["--url", server.url, "--once", "--json", "--interval", "0.1"],
        env={"SGLANG_API_KEY": "secret"},
    )
    assert run.exit_code == 0, run.output
    told = json.loads(run.output)
    assert told["output_tokens_per_s"] == pytest.approx(100 / told["seconds"])
    assert told["phases"]["verify"]["graph_share"] == 0.75
    assert server.asked == [("/metrics", "Bearer secret")] * 2
    (tmp_path / "key").write_text("filed\n")
    file = {"SGLANG_API_KEY_FILE": str(tmp_path / "key")}
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once", "--interval", "0.1"], env=file)
    assert (run.exit_code, server.asked[-1]) == (0, ("/metrics", "Bearer filed")), run.output
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once"], env={"SGLANG_API_KEY_FILE": str(tmp_path)})
    assert (run.exit_code, "cannot be read" in run.output) == (2, True)
    picture = tmp_path / "top.svg"
    run = CliRunner().invoke(top.app, ["--url", server.url, "--once", "--interval", "0.1", "--svg", str(picture)])
    assert run.exit_code == 0, run.output
    assert "acceptance" in picture.read_text()
    shown = CliRunner().invoke(top.app, ["--url", server.url, "--interval", "0.1"])  # no terminal: once
    assert "acceptance" in shown.output
    refused = CliRunner().invoke(top.app, ["--url", server.url, "--json"])
    assert (refused.exit_code, "add --once" in refused.output) == (2, True)
    server.status = 404
    assert CliRunner().invoke(top.app, ["--url", server.url, "--once"]).exit_code == 2


def test_several_servers_have_a_line_each(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    other.asked, other.status, url = [], 200, f"http://127.0.0.1:{other.server_address[1]}"
    # Started anew between the readings, with another patch set.
    other.text = lambda turn: text(passes=1000 // turn**2, tokens=4000 // turn**2) + INFO.replace("abc", "def")
    threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
        arguments = [word for each in (server.url, url, nobody, url) for word in ("--url", each)]
        arguments += ["--once", "--interval", "0.2"]
        monkeypatch.setenv("COLUMNS", "110")
        run = CliRunner().invoke(top.app, arguments, env={"SGLANG_API_KEY": "secret"})
        assert run.exit_code == 0, run.output
        assert server.asked == other.asked == [("/metrics", "Bearer secret")] * 2
        lines = [" ".join(line.split()) for line in run.output.splitlines()]
        (mine,) = [line for line in lines if line.startswith(f"{server.url} ")]
        assert re.fullmatch(rf"{server.url} [\d.]+ 3 - 10% 2\.30 10\.00 75%", mine)
        assert f"{url}: the server was restarted" in lines
        assert f"{nobody} - - - - - - -" in lines
        assert any(line.startswith(f"{nobody}: no answer, asking again: {nobody}/metrics: [Errno") for line in lines)
        assert f"patch sets differ: {server.url} abc, {url} def" in lines
        told = json.loads(CliRunner().invoke(top.app, [*arguments, "--json"]).output)
        assert list(told) == [server.url, url, nobody]
        assert (told[server.url]["patch_set_id"], told[nobody]) == ("abc", None)
        assert told[url]["restarted"]
        none = CliRunner().invoke(top.app, ["--url", nobody, "--url", f"{nobody}/x", "--once"])
        assert (none.exit_code, none.output.count("Connection refused")) == (2, 2)
    other.shutdown()
    other.server_close()


def test_a_server_that_goes_away_and_comes_back_is_watched_on() -> None:
    answers: list[Scrape | PatchError] = [
        parse(text(), 0.0),
        parse(text(passes=50), 2.0),
        PatchError("here: Connection refused\n  remedy  none"),
        parse(text(passes=4), 9.0),
        parse(text(passes=8), 10.0),
    ]

    def read() -> Scrape:
        answer = answers.pop(0)
        if isinstance(answer, PatchError):
            raise answer
        return answer

    watch = top.Watch(read)
    watch.look()
    assert watch.found is None
    watch.look()
    assert watch.found is not None
    before = watch.found
    watch.look()
    assert (watch.found, watch.note) == (before, "no answer, asking again: here: Connection refused")
    watch.look()
    assert (watch.found, watch.note) == (before, "")
    watch.look()
    assert (watch.found.seconds, watch.found.restarted) == (1.0, False)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_the_live_view_runs_in_a_terminal_and_ends_by_a_key(server: Any, key: bytes) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sglang_patches.cli", "top", "--url", server.url, "--interval", "0.2"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # The terminal that Ctrl-C comes from must be the process's own.
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "60"},
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 60
        while b"acceptance" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.5)[0]:
                seen += os.read(ours, 65536)
        assert b"acceptance" in seen
        os.write(ours, key)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the other side is closed
                    seen += os.read(ours, 65536)
        assert process.returncode == 0
        assert b"\x1b[?1049l" in seen, "the screen that was there before is shown again"


def test_every_expression_is_promql_over_metrics_and_labels_that_exist() -> None:
    known = promql.declared()
    asked = [selector for expression in promql.expressions() for selector in promql.selectors(expression)]
    assert len(asked) > 20
    for name, labels in asked:
        assert name in known or name in upstream.ALL, name
        if name in known:
            assert labels - promql.SCRAPED <= known[name], name
    # Whatever a patch tells is somewhere on the dashboard.
    names = {name for name, _ in asked}
    for metric in _metrics.ALL:
        assert names & set(_metrics.series_names(metric)), f"{metric.name} is on no panel"


def test_the_dashboard_can_be_imported() -> None:
    made = dashboard.document()
    identifiers = [panel["id"] for panel in made["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    variables = {variable["name"] for variable in made["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]


def test_documentation_is_up_to_date() -> None:
    made = documents.documents()
    page = (DOCS / documents.TABLE).read_text()
    what = "run: sglang-patches metrics --write docs"
    assert documents.with_table(page, made[documents.TABLE]) == page, what
    for name in (documents.DASHBOARD, documents.ALARMS):
        assert (DOCS / name).read_text() == made[name], what
    assert json.loads(made[documents.DASHBOARD]) == dashboard.document()
    assert yaml.safe_load(made[documents.ALARMS]) == dashboard.alarms()
    for metric in _metrics.ALL:
        assert (DOCS / "patches" / f"{metric.patch}.md").is_file()
        assert page.count(f"| `{metric.name}` |") == 1


def test_documents_are_printed_and_written(tmp_path: Path) -> None:
    run = CliRunner()
    assert json.loads(run.invoke(documents.app, ["--dashboard"]).output) == dashboard.document()
    assert "AcceptLengthNearOne" in run.invoke(documents.app, ["--alarms"]).output
    assert run.invoke(documents.app, []).output == documents.table()
    (tmp_path / documents.TABLE).write_text(f"before\n{documents.BEGIN}old\n{documents.END}\nbehind\n")
    assert run.invoke(documents.app, ["--write", str(tmp_path)]).exit_code == 0
    assert (tmp_path / documents.TABLE).read_text().count("\n") == documents.table().count("\n") + 4
    (tmp_path / documents.TABLE).write_text("no marks")
    refused = run.invoke(documents.app, ["--write", str(tmp_path)])
    assert (refused.exit_code, "no place for the table" in refused.output) == (2, True)


def test_the_picture_in_the_docs_is_what_top_draws_now(tmp_path: Path) -> None:
    """From the figures that were committed with it. Where this fails: docs/metrics.md has the command that draws it."""
    picture = (DOCS / "top.svg").read_text()
    found = TypeAdapter(Figures).validate_python(json.loads((DOCS / "top.json").read_text()))
    url = re.search(r"http://127\.0\.0\.1:\d+", words_of(picture))
    assert url is not None
    console = Console(record=True, width=112, file=io.StringIO())
    console.print(screen(found, url[0], console.width))
    console.save_svg(str(tmp_path / "now.svg"), title="sglang-patches top", unique_id="top")
    assert words_of((tmp_path / "now.svg").read_text()) == words_of(picture)


def words_of(svg: str) -> str:
    """What is written in a picture, without where it stands."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", svg[svg.index("</style>") :])).split())
