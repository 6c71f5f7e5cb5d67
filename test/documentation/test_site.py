"""docs/ as a site: it builds without a warning and without the network, every page is listed, every link leads
somewhere, and the pages look there as they do on a code host."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from .commands import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# A proxy where nothing listens: a build that fetches something fails.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def configuration() -> dict[str, Any]:
    """mkdocs.yml."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def mkdocs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict` there, offline and without its notice of what follows mkdocs."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *arguments],
        cwd=folder, env={**os.environ, **OFFLINE, "NO_MKDOCS_2_WARNING": "1"},
        text=True, capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    made = tmp_path_factory.mktemp("site")
    if importlib.util.find_spec("mkdocs") is None:
        pytest.fail("mkdocs-material is not installed: make setup, or pip install 'mkdocs-material>=9.6'")
    done = mkdocs(ROOT, "--site-dir", str(made))
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    assert done.returncode == 0, f"mkdocs build --strict:\n{said}"
    return made


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """scripts/site_hooks.py, which needs mkdocs."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts/site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _listed(nav: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += _listed(value) if isinstance(value, list) else [value]
    return found


def test_every_page_has_its_place() -> None:
    listed = _listed(configuration()["nav"])
    newest = max(
        (ROOT / "patches").glob("*/series"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.parent.name)]
    )
    series = [line.removesuffix(".patch") for line in newest.read_text().splitlines() if line.endswith(".patch")]
    wrong = [f"{page} is listed in mkdocs.yml and is not in docs/" for page in listed if page not in PAGES]
    wrong += [f"{page} is listed twice in mkdocs.yml" for page, count in Counter(listed).items() if count > 1]
    for page in PAGES:
        name = page.removeprefix("patches/").removesuffix(".md")
        if page.startswith("patches/") and name != "index" and name not in series:
            wrong.append(f"docs/{page}: no patch of that name is in {newest.relative_to(ROOT)}")
        elif page not in listed and (name == page.removesuffix(".md") or name == "index"):
            wrong.append(
                f"docs/{page} is not in the nav of mkdocs.yml: add a line `- {page}` where readers look for it"
            )
    wrong += [
        f"patch {name} has no page docs/patches/{name}.md" for name in series if f"patches/{name}.md" not in PAGES
    ]
    assert not wrong, "\n".join(wrong)


def test_it_builds_without_a_warning_and_fetches_nothing(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= built
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(https?:)?//[^"'> ]+""")
    for page in sorted(built):
        text = (site / page).read_text(encoding="utf-8")
        assert not (found := loads.search(text)), f"{page} loads {found and found[0]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_what_is_no_page_is_warned_of(tmp_path: Path) -> None:
    """That a warning ends the build: of a link, an anchor, and a page that is not listed."""
    broken = configuration() | {
        "nav": ["index.md", "other.md"],
        "docs_dir": str(tmp_path / "docs"),
        "site_dir": str(tmp_path / "site"),
    }
    del broken["hooks"], broken["extra_css"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[one](none.md), [two](other.md#nothing)\n")
    (tmp_path / "docs/other.md").write_text("# B\n")
    (tmp_path / "docs/unlisted.md").write_text("# C\n")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(broken))
    done = mkdocs(tmp_path)
    assert done.returncode != 0
    warnings = "\n".join(line for line in done.stderr.splitlines() if line.startswith("WARNING"))
    for part in ("'none.md'", "'#nothing'", 'not included in the "nav"'):
        assert part in warnings, done.stderr


class _Outline(HTMLParser):
    """Counts the elements that make a page's structure, and collects its anchors."""

    COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "pre", "code", "strong", "em", "img")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for value in (named.get("id"),) if value}
        if tag in self.COUNTED:
            self.counts[tag] += 1


def outline(html: str) -> _Outline:
    """The structure of a page or a part of one."""
    read = _Outline()
    read.feed(html)
    return read


def test_readme_links_lead_somewhere(site: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        if not (ROOT / path).exists():
            wrong.append(f"README.md: there is no {path}")
        elif anchor and path.startswith("docs/"):
            built = site / path.removeprefix("docs/").replace(".md", ".html")
            if anchor not in outline(built.read_text(encoding="utf-8")).anchors:
                wrong.append(f"README.md: {path} has no heading #{anchor}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_the_site_shows_a_page_as_commonmark_does(page: str, hooks: ModuleType) -> None:
    """mkdocs reads Markdown by other rules than code hosts do; lists, tables and code must come out the same."""
    import markdown

    text = (DOCS / page).read_text(encoding="utf-8")
    by_host = outline(MarkdownIt("commonmark").enable("table").render(text))
    names = [
        name
        for entry in configuration()["markdown_extensions"]
        for name in (entry if isinstance(entry, dict) else [entry])
    ]
    as_shown = markdown.markdown(hooks.as_python_markdown(text), extensions=[name for name in names if name != "toc"])
    by_site = outline(as_shown)
    assert by_site.counts == by_host.counts, (
        f"docs/{page}: written in a way that mkdocs reads otherwise than code hosts"
    )


def test_make_docs_does_what_is_tested_here() -> None:
    """`make docs` and `make docs-serve`, of which only what they would run is looked at."""
    done = subprocess.run(
        ["make", "-n", "docs", "docs-serve", f"VENV={sys.prefix}"], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "-m mkdocs build --strict" in done.stdout
    assert "-m mkdocs serve" in done.stdout


def test_lists_as_mkdocs_wants_them(hooks: ModuleType) -> None:
    text = "Text:\n- one\n  more\n\n  | a |\n  |---|\n\n      code\n- two\n  1. three\n     deeper\nlazy\n\nend\n"
    made = (
        "Text:\n\n-   one\n    more\n\n    | a |\n    |---|\n\n        code\n\n"
        "-   two\n    1.  three\n        deeper\nlazy\n\nend\n"
    )
    assert hooks.as_python_markdown(text) == made


def test_links_that_leave_docs(hooks: ModuleType) -> None:
    assert hooks._on_site("../benchmark/x/README.md", "nccl.md", "docs/nccl.md") == "benchmark/x/README.md"
    assert hooks._on_site("../../docs/nccl.md", "benchmark/x/README.md", "benchmark/x/README.md") == "../../nccl.md"
    assert hooks._on_site("../nccl.md", "patches/a.md", "docs/patches/a.md") == "../nccl.md"
    assert hooks._on_site("plot.png", "benchmark/x/README.md", "benchmark/x/README.md") == "plot.png"
