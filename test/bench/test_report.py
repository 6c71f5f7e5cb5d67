"""The report page: what it shows, that no text becomes markup, that it needs nothing but itself, and how it looks."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.documents import made as document

from bench.html_page import Page, parsed
from bench.results_made import NASTY, ab, bisect, compare_upstream, comparison, factorial, sample, verify_step
from sglang_patches.bench import ab as commands
from sglang_patches.bench import design, findings, folder, tables
from sglang_patches.bench import factorial as factorials
from sglang_patches.bench.model import Arm, Turn
from sglang_patches.bench.report import charts, page, sections
from sglang_patches.bench.tables import Interval
from sglang_patches.document import collect
from sglang_patches.errors import PatchError

ROOT = Path(__file__).parents[2]
COMMITTED = [ROOT / root for root in page.ROOTS]
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def rendered(*roots: Path) -> Page:
    return parsed(page.render(page.find(roots)))


def test_a_result_is_shown_whole(tmp_path: Path) -> None:
    place = tmp_path / "one-against-two"
    place.mkdir()
    (place / "plot.png").write_bytes(PNG)
    result = ab(allowed=["outputs: greedy tokens of 2 of 8 prompts differ"])
    result.turns[-1].outcomes = {"two": {"result": "applied", "detail": "on every rank", "figure": 3}}
    folder.write(place, result, [sample(), sample("b", error="refused")])
    read = rendered(tmp_path)
    ((link, name),) = read.all("a")
    assert name == "one-against-two"
    ((_, shown),) = read.all("section", id_=link["href"][1:])
    for wanted in (
        "b is SLOWER than a: 0.9 of the tokens/s (0.88 to 0.92)", "0.8800 to 0.9200", "93.47", "0 to ∞", "AMBIGUOUS",
        "2 (a: 1, b: 1)", "1 requests failed", "outputs: greedy tokens of 2 of 8 prompts differ",
        "`two` was off in A and on in B",
        "patch set 0123456789ab", "patch set ba9876543210", "on every rank; figure 3", "1x H200", "power limit 700 W",
        "--out 'with space'", "8 prompts of 64 tokens", "SGLANG_PATCHES=+two --x '1 2'", "ABBA", "ababababab",
        "margin 1 %", "turn 3 began late", str(place),
    ):  # fmt: skip
        assert wanted in shown, wanted
    assert [a["alt"] for a, _ in read.all("img")] == ["plot of one-against-two"]
    assert len(read.all("svg", class_="turns")) == 2
    badges = [(a["class"], text) for a, text in read.all("span") if "badge" in a.get("class", "")]
    assert badges.count(("badge bad", "SLOWER")) == 3
    assert badges.count(("badge unclear", "AMBIGUOUS")) == 1


def test_a_factorial_shows_every_effect_with_its_interval(tmp_path: Path) -> None:
    folder.write(tmp_path / "x-and-proto", factorial())
    read = rendered(tmp_path)
    primary, other, _runs = findings.tables(factorial())[:3]
    assert (primary.title, primary.folded, other.title, other.folded) == (
        "tokens/s",
        False,
        "ms per verify cycle",
        True,
    )
    assert [[cell.text for cell in row] for row in primary.rows] == [
        ["x", "SLOWER", "0.9000", "0.8800 to 0.9200", "0.8900 to 0.9100", "main", "-", "2 %"],
        ["env:NCCL_PROTO=LL", "AMBIGUOUS", "1.001", "0.9800 to 1.020", "0.9900 to 1.010", "main", "-", "2 %"],
        ["x : env:NCCL_PROTO=LL", "AMBIGUOUS", "1.001", "0.9800 to 1.020", "0.9900 to 1.010", "interaction", "z : w",
         "2 %"],
    ]  # fmt: skip
    assert "noise 1.3 % a turn, with 9 degrees of freedom" in primary.note
    assert len([a for a, _ in read.all("svg") if a.get("class", "").startswith("bar")]) == 6
    assert ["a", "on", "off"] in cells(read)


def test_what_ab_and_factorial_conclude_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the functions that write it, so that a change of theirs which the page does not know shows here."""
    monkeypatch.setattr(collect, "environment", document)
    pair = ab()
    concluded = commands.conclude(pair.turns, pair.arms, pair.workload, tmp_path / "pair", margin=0.01, seed=0)
    (table,) = findings.tables(concluded)
    assert [row[0].text for row in table.rows] == ["tokens/s", "ms per verify cycle"]
    assert [row[1].text for row in table.rows] == ["SLOWER", "SAME"]
    assert table.columns[4:6] == ["a", "b"]

    square = design.full(["x", "env:Y=1"])
    arms = [Arm(name=f"{run:02b}", spec="") for run in range(4)]
    served = [run for _ in range(2) for run in (0, 1, 2, 3, 3, 2, 1, 0)]
    turns = [
        Turn(
            index=at, block=at // 4, arm=arms[run].name, ready_s=1, output_sha256=None, document=None,
            figures={"tokens_per_s": (90.0 if square.levels[run][0] > 0 else 100.0) + 0.01 * (at % 3)},
        )
        for at, run in enumerate(served)
    ]  # fmt: skip
    options = {"base": "default", "margin": 0.01, "confidence": 0.95, "seed": 0}
    concluded = factorials.conclude(turns, square, arms, None, tmp_path / "square", **options)  # type: ignore[arg-type]
    effects, runs, *_ = findings.tables(concluded)
    assert [cell.text for cell in effects.rows[0][:3]] == ["x", "SLOWER", "0.9000"]
    assert [row[1].text for row in effects.rows[1:]] == ["SAME", "SAME"]
    assert len(runs.rows) == 4
    for result in (pair, concluded):
        folder.write(tmp_path / "results" / result.name, result)
    assert len(rendered(tmp_path / "results").all("section")) == 2


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        (("SAME", "AMBIGUOUS", "SLOWER"), ("SLOWER", "bad")),
        (("AMBIGUOUS", "FASTER", "SAME"), ("FASTER", "good")),
        (("SAME", "SAME", "AMBIGUOUS"), ("AMBIGUOUS", "unclear")),
    ],
)
def test_the_badge_is_the_most_telling_verdict_on_the_primary_figure(
    verdicts: tuple[str, ...], told: tuple[str, str], tmp_path: Path
) -> None:
    result = factorial()
    for effect, verdict in zip(result.analysis["effects"]["tokens_per_s"]["effects"], verdicts, strict=True):
        effect["verdict"] = verdict
    folder.write(tmp_path / "effects", result)
    assert sections.of(folder.load(tmp_path / "effects"), tmp_path).verdict == told
    result = compare_upstream()
    none, last = ({"tokens_per_s": comparison(one), "verify_ms": comparison("SLOWER")} for one in verdicts[1:])
    result.analysis["comparisons"] = {"none": none, "all": last}
    folder.write(tmp_path / "upstream", result)
    wanted = min(verdicts[1:], key=["SLOWER", "FASTER", "AMBIGUOUS", "SAME"].index)
    assert sections.of(folder.load(tmp_path / "upstream"), tmp_path).verdict[0] == wanted


def test_a_detectable_difference_beyond_all_measure_is_said_as_such() -> None:
    for value, text in ((0.02, "2 %"), (3.5, "350 %"), (1e9, "> 1000 %")):
        assert tables.said("smallest_detectable", value).text == text
    assert tables.percentage(0.004) == "0.4 %"
    assert tables.percentage(4.2) == "420 %"


def test_compare_upstream_shows_each_arm_against_pristine(tmp_path: Path) -> None:
    folder.write(tmp_path / "pristine", compare_upstream())
    none, everything = findings.tables(compare_upstream())[:2]
    assert (none.title, everything.title) == ("none against pristine", "all against pristine")
    assert none.columns == ["", "verdict", "ratio", "interval", "pristine", "none", "smallest detectable", "rounds"]
    assert [cell.text for cell in everything.rows[0]][:5] == [
        "tokens/s",
        "SLOWER",
        "0.9000",
        "0.8800 to 0.9200",
        "91.49",
    ]
    assert "no code state was told by: pristine" in [text for _, text in rendered(tmp_path).all("p", class_="warning")]


def test_a_bisection_shows_the_culprits_and_every_step(tmp_path: Path) -> None:
    folder.write(tmp_path / "found", bisect())
    read = rendered(tmp_path)
    blamed = findings.tables(bisect())[0]
    assert blamed.title == "to blame"
    assert [cell.text for cell in blamed.rows[0]][:3] == ["p, q", "1.380", "1.330 to 1.440"]
    assert blamed.margin == 0.05
    assert ["p", "good", "1.000", "0.9700 to 1.030", "", "suspect", "q", "29.00", "2"] in cells(read)
    assert [text for _, text in read.all("figcaption")] == ["ms per verify cycle"]
    steps = [row for row in cells(read) if "is bad worse?" in row]
    assert ["the server ended" in row for row in steps] == [False, False, True]
    assert ["1.380" in row for row in steps] == [True, False, False]
    assert {a["class"] for a, text in read.all("span") if text in ("bad", "good")} == {"badge bad", "badge good"}
    assert "Step 2 could not be measured: the server ended" in [text for _, text in read.all("p", class_="warning")]


def test_verify_step_shows_phases_floors_and_kernels(tmp_path: Path) -> None:
    folder.write(tmp_path / "grid", verify_step())
    (tmp_path / "grid/samples.jsonl").write_text('{"record": "cycles"}\n' * 3 + '{"record": "routing"}\n')
    read = rendered(tmp_path)
    rows = cells(read)
    wanted = ["4", "1,024", "16", "graph", "1.74 (3.5x)", "1.74", "1.000-3.000", "0.5000", "1.250", "31.50", "-",
              "1.000", "60"]  # fmt: skip
    assert wanted in rows
    assert ["4", "1,024", "1", "graph", "void gemm<float, 3>(int)", "verify", "812.5", "61.00"] in rows
    assert ["tokens-4", "yes", "NVIDIA H200", "4,100", "61.00", ""] in rows
    assert [text for _, text in read.all("figcaption")] == [
        "ms per cycle by batch size, context 1,024, graph", "ms per cycle by batch size, context 1,024, eager",
    ]  # fmt: skip
    assert "4 (cycles: 3, routing: 1)" in [text for _, text in read.all("dd")]


def cells(read: Page) -> list[list[str]]:
    """The texts of every row of every table."""
    rows: list[list[str]] = []
    row: list[str] = []
    for tag, attributes, text in read.elements:
        if tag == "td":
            row.append("" if attributes.get("class") == "drawn" else " ".join(text.split()))
        elif tag == "tr":
            rows.append(row)
            row = []
    return rows


@pytest.mark.parametrize("make", [ab, compare_upstream, factorial, bisect, verify_step])
def test_a_kind_whose_analysis_lost_a_part_is_still_shown(make: Any) -> None:
    whole = make()
    for missing in list(whole.analysis):
        for instead in (None, [], {}, [None], {"x": 1}, "text"):
            result = whole.model_copy(update={"analysis": {**whole.analysis, missing: instead}})
            parsed(page.render(page.Found([sections.of(result, Path("/nowhere"))])))


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    nasty = f'{NASTY} "quoted" onload=x'
    arms = [Arm(name=nasty, spec=nasty, patches=nasty, environment={nasty: nasty}, arguments=[nasty], python=nasty)]
    arms.append(Arm(name="b", spec="b"))
    documents = [document(id=nasty, kernel=nasty, release=nasty), document(server_args={nasty: nasty})]
    turns = [
        Turn(
            index=at, block=0, arm=arms[at % 2].name, ready_s=1, figures={nasty: 2.0, "verify_ms": 1.0 + at},
            output_sha256=nasty, document=documents[at % 2], outcomes={nasty: {"result": nasty, nasty: [nasty]}},
            log=nasty,
        )
        for at in range(4)
    ]  # fmt: skip
    analysis = {
        nasty: comparison(verdict=nasty),
        "rows": [{nasty: nasty, "batch": 1, "verify": 2.0, "mode": nasty}] * 2,
    }
    result = ab(headline=nasty, when=nasty, command=[nasty], allowed=[nasty], arms=arms, turns=turns, analysis=analysis)
    folder.write(tmp_path / "nasty", result, [sample(nasty)])
    (tmp_path / "nasty/plot.png").write_text(nasty)
    read = rendered(tmp_path)
    text = " ".join(text for tag, _, text in read.elements if tag == "main")
    assert text.count("<script>alert('x')</script>") > 20
    assert "plot.png is no PNG" in text


@pytest.mark.parametrize("kind", folder.KINDS)
def test_a_result_without_optional_parts_is_shown(tmp_path: Path, kind: str) -> None:
    bare = ab(kind=kind, arms=[], turns=[], workload=None, analysis={}, document=None, command=[], headline="bare")
    folder.write(tmp_path / "bare", bare)
    ((_, text),) = rendered(tmp_path).all("p", class_="headline")
    assert text == "bare"


@given(
    st.dictionaries(
        st.text(max_size=5) | st.sampled_from(["ratio", "low", "high", "verdict", "margin", "batch", "cycle"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inside: (
                st.lists(inside, max_size=3)
                | st.dictionaries(st.sampled_from(["ratio", "low", "high", "a", "batch", "cycle"]), inside, max_size=6)
            ),
            max_leaves=12,
        ),
        max_size=4,
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_analysis_is_rendered(analysis: dict[str, Any]) -> None:
    # As JSON that another tool wrote: with NaN and Infinity.
    result = folder.parse(json.loads(json.dumps({**json.loads(folder.dumps(ab())), "analysis": analysis})), "x")
    parsed(page.render(page.Found([sections.of(result, Path("/nowhere"))])))


def test_figures_that_are_not_finite_are_left_out_of_the_drawing() -> None:
    result = ab()
    for turn, value in zip(result.turns, (math.nan, math.inf, -math.inf, 0.0, 1.0, 1e300, -5.0, 2.0), strict=True):
        turn.figures["tokens_per_s"] = value
    html = page.render(page.Found([sections.of(result, Path("/nowhere"))]))
    parsed(html)
    assert html.count("<title>turn ") == 5 + 8


def test_what_cannot_be_read_is_said_and_the_rest_shown(tmp_path: Path) -> None:
    folder.write(tmp_path / "good", ab())
    for name, content in (("torn", "{"), ("newer", json.dumps({"kind": "ab", "schema_version": 3}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(content)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/turns.jsonl").touch()
    (tmp_path / "notes.json").write_text('{"kind": "notes"}')
    (tmp_path / "list.json").write_text("[]")
    found = page.find([tmp_path])
    assert [section.name for section in found.sections] == ["good"]
    assert len(found.unread) == 2
    assert found.unfinished == [str(tmp_path / "begun")]
    assert found.skipped == [str(tmp_path / "list.json"), str(tmp_path / "notes.json")]
    ((_, trouble),) = parsed(page.render(found)).all("section", id_="trouble")
    for wanted in ("torn/result.json: not JSON", "schema version 3", "begun: the run did not finish"):
        assert wanted in trouble
    with pytest.raises(PatchError, match="no such folder"):
        page.find([tmp_path / "absent"])


def test_what_lies_inside_a_result_folder_is_no_further_result(tmp_path: Path) -> None:
    folder.write(tmp_path / "outer", ab())
    folder.write(tmp_path / "outer/steps/1", ab())
    (tmp_path / "outer/run.json").write_text("{}")
    found = page.find([tmp_path])
    assert [section.name for section in found.sections] == ["outer"]
    assert not found.skipped


def test_the_newest_is_first(tmp_path: Path) -> None:
    for name, when in (("old", "2026-01-01"), ("new", "2026-02-01"), ("untimed", "")):
        folder.write(tmp_path / name, ab(when=when))
    assert [section.name for section in page.find([tmp_path]).sections] == ["new", "old", "untimed"]


def test_bars_of_a_table_share_a_scale_and_what_is_beyond_it_is_an_arrow() -> None:
    narrow, open_ended = Interval(0.9, 0.88, 0.92), Interval(1.0, 0.0, None)
    scale = charts.scale([narrow, open_ended], margin=0.01)
    assert 1.13 < scale.most < 1.2
    assert scale.at(1) == pytest.approx(100)
    assert scale.at(0.88) < scale.at(0.9) < scale.at(0.92) < 100 < scale.at(1.01)
    assert charts.bar(narrow, scale).count("head") == 0
    assert charts.bar(open_ended, scale).count('class="head"') == 2
    assert charts.bar(Interval(None, None, None), scale) == ""
    # One interval that is far wider than the others does not press them together.
    wide = charts.scale([narrow, narrow, narrow, Interval(1.0, 0.01, 100.0)])
    assert wide.most < 2


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((80.3, 97.1), (0.0013, 0.0091), (-3.0, 5.0), (1e6, 1.3e6)):
        found = charts.ticks(low, high)
        assert 2 <= len(found) <= 6
        assert all(low <= tick <= high for tick in found)
        assert all(len(f"{tick:.10g}".lstrip("-").replace(".", "").strip("0")) <= 3 for tick in found)


def command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_patches.cli", "bench", "report", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_the_command_writes_the_page_and_says_what_it_could_not_read(tmp_path: Path) -> None:
    folder.write(tmp_path / "results/good", ab())
    out = tmp_path / "page.html"
    done = command(tmp_path / "results", "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}: 1 results\n"), done.stderr
    parsed(out.read_text())
    (tmp_path / "results/good/result.json").write_text("{")
    done = command(tmp_path / "results", "--out", out)
    assert done.returncode == 1
    assert "good/result.json: not JSON" in done.stderr
    assert "good/result.json: not JSON" in out.read_text()
    for arguments, told in (((), "no results"), ((tmp_path / "absent",), "absent: no such folder")):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr
        assert "Traceback" not in done.stderr
    done = command(tmp_path / "results", "--out", tmp_path / "absent/page.html")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_a_browser_lays_it_out_on_a_phone_without_scrolling_sideways(tmp_path: Path) -> None:
    folder.write(tmp_path / "results" / ("long-" * 20), ab(headline="word " * 60 + "x" * 300))
    html = page.render(page.find([tmp_path / "results", *COMMITTED]))
    told = (
        "<script>addEventListener('load', () => parent.postMessage(document.documentElement.scrollWidth, '*'))</script>"
    )
    without_policy, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', told, html)
    assert count == 1
    (tmp_path / "page.html").write_text(without_policy)
    (tmp_path / "phone.html").write_text(
        "<script>addEventListener('message', event => document.title = 'width ' + event.data)</script>"
        '<iframe src="page.html" style="border:0; width:390px; height:800px"></iframe>'
    )
    line = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    line += ["--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'phone.html'}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    width = re.search(r"<title>width (\d+)</title>", done.stdout)
    assert width, done.stderr[-500:]
    assert int(width[1]) <= 390
