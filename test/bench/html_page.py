"""A page's HTML, read strictly."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Elements of a page: (tag, attributes, text), and whether its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, Any], list[str]]] = []
        self.elements: list[tuple[str, dict[str, Any], str]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {[tag for tag, _, _ in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self.elements.append((tag, dict(attrs), ""))
        else:
            self.open.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        opened, attributes, texts = self.open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        text = "".join(texts)
        self.elements.append((tag, attributes, text))
        if self.open:
            self.open[-1][2].append(text)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1][2].append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, Any], str]]:
        """(attributes, text) of the elements with this tag and these attributes."""
        return [
            (found, " ".join(text.split()))
            for name, found, text in self.elements
            if name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
        ]


def parsed(html: str) -> Page:
    """The page, which must be sound: balanced, self-contained, with unique ids that its links name, and no script."""
    read = Page(html)
    ids = [attributes["id"] for _, attributes, _ in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    tags = {tag for tag, _, _ in read.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for tag, attributes, _ in read.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        if "src" in attributes:
            assert attributes["src"].startswith("data:image/png;base64,")
        if "href" in attributes:
            assert attributes["href"][0] == "#"
            assert attributes["href"][1:] in ids
    assert "url(" not in html
    assert "@import" not in html
    policy = [a["content"] for a, _ in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    return read
