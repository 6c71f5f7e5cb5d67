"""The documents that are made from the metrics' names: dashboard, alarms, table, and the picture of the screen."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path

import promql
import yaml
from pydantic import TypeAdapter
from rich.console import Console
from typer.testing import CliRunner

from sglang_patches.observe import dashboard, documents, upstream
from sglang_patches.observe.figures import Figures
from sglang_patches.observe.view import screen
from sglang_patches.runtime import _metrics

DOCS = Path(__file__).parents[2] / "docs"


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
