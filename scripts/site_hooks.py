"""What mkdocs needs to build the site from pages that are written for a code host too (mkdocs.yml, `hooks`).

- Pages are CommonMark, as code hosts read it. mkdocs renders with Python-Markdown, to which a list needs a blank line
  before it, and what belongs to an item four columns of indentation.
- The measured figures in benchmark/ are pages of the site, so that links to them work in both places.
- Every patch of the newest series gets its place in the navigation, and the table of them in README.md is shown.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# A link or image whose target is neither an address nor an anchor of the page itself.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
_TABLE_OF_PATCHES = "<!-- the table of README.md -->"
_INDENT = 4


def on_config(config: Any) -> Any:
    """List the patches of the newest lane behind patches/index.md."""
    lanes = sorted((ROOT / "patches").glob("*/series"), key=_release)
    lines = lanes[-1].read_text(encoding="utf-8").splitlines()
    names = [line.removesuffix(".patch") for line in lines if line.endswith(".patch")]
    (patches,) = (entry["Patches"] for entry in config["nav"] if isinstance(entry, dict) and "Patches" in entry)
    patches += [f"patches/{name}.md" for name in names]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of benchmark/ and the plots beside them."""
    for page in sorted(ROOT.glob("benchmark/**/README.md")):
        for path in (page, *page.parent.glob("*.png")):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File(uri, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make one page's text what Python-Markdown reads as CommonMark does, with links as they are on the site."""
    uri = page.file.src_uri
    inside = Path(page.file.abs_src_path).is_relative_to(config["docs_dir"])
    if not inside:  # figures, which have every word in them: found after the pages that explain them
        page.meta["search"] = {"boost": 0.1}
    if _TABLE_OF_PATCHES in markdown:
        markdown = markdown.replace(_TABLE_OF_PATCHES, _table_of_patches())
    markdown = _LINK.sub(lambda match: _on_site(match[1], uri, f"docs/{uri}" if inside else uri), markdown)
    return as_python_markdown(markdown)


def _release(series: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", series.parent.name))


def _table_of_patches() -> str:
    """The table of README.md, with links as from docs/patches/."""
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    start = next(at for at, row in enumerate(rows) if row.startswith("| patch |"))
    end = next((at for at, row in enumerate(rows) if at > start + 1 and not row.startswith("| [")), len(rows))
    return "\n".join(rows[start:end]).replace("(docs/patches/", "(").replace("(docs/", "(../")


def _on_site(target: str, uri: str, path: str) -> str:
    """A link's target as seen from the page `uri` of the site, whose file in the repository is `path`."""
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    on_site = meant.removeprefix("docs/")
    return posixpath.relpath(on_site, posixpath.dirname(uri) or ".")


def as_python_markdown(text: str) -> str:
    """The same text with a blank line before each list, and items' content indented by multiples of four columns."""
    lines = text.split("\n")
    # By line: columns to take away and to put there, for each item it is in, the outermost first.
    shift: dict[int, list[tuple[int, int]]] = {}
    # By line that begins an item: width of its marker.
    first: dict[int, int] = {}
    before: set[int] = set()
    depth, blank_inside = 0, False  # the latter of the item before
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("bullet_list_open", "ordered_list_open"):
            assert token.map is not None
            if depth == 0 and token.map[0] and lines[token.map[0] - 1].strip():
                before.add(token.map[0])
            depth, blank_inside = depth + 1, False
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            depth -= 1
        elif token.type == "list_item_open":
            assert token.map is not None
            start, end = token.map
            taken = sum(columns for columns, _ in shift.get(start, []))
            marker = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", lines[start][taken:])
            if marker is None:  # an empty item
                continue
            if start and lines[start - 1].strip() and blank_inside:
                before.add(start)
            blank_inside = any(not line.strip() for line in lines[start : end - 1])
            first[start] = marker.end()
            for at in range(start + 1, end):
                shift.setdefault(at, []).append((marker.end(), _INDENT))
    out = []
    for at, line in enumerate(lines):
        taken, put = 0, 0
        for columns, indent in shift.get(at, []):
            if line[taken : taken + columns].strip():  # a paragraph's line that was not indented
                break
            taken, put = taken + columns, put + indent
        content = line[taken:]
        if at in first and content.strip():
            width = first[at]
            content = content[:width].strip().ljust(_INDENT) + content[width:]
        if at in before:
            out.append("")
        out.append(" " * put + content if content.strip() else "")
    return "\n".join(out)
