"""The shell commands of README.md and docs/, as they stand there, and what the page says of how each is tested.

A code block holds commands unless its fence names another language (```text, ```json). In a block whose first line
begins with `$ `, lines that begin so are commands and the others what they print. Above a block may stand

    <!-- needs: 8 gpus -->                   also: gpu, docker, network; nothing runs the commands here
    <!-- needs: a server -->                 test/e2e runs them against a server
    <!-- covered by: test/unit/test_x.py --> that test, which must mention them, does
    <!-- exits: 1 -->                        they are run here, and end with this code in place of 0

each for the commands that contain one of the texts behind `; for: TEXT, TEXT`, or else for all of the block.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("gpu", "8 gpus", "docker", "network", "a server")
# Info strings of fences that hold no commands.
OTHER_LANGUAGES = ("text", "json", "yaml", "python", "diff", "dockerfile", "promql", "ini")
_MARKER = re.compile(r"<!--\s*(needs|covered by|exits):\s*(.*?)\s*(?:;\s*for:\s*(.*?)\s*)?-->", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Marker:
    """What stands above a block: `kind` is `needs`, `covered by` or `exits`; without `only` it holds for all of it."""

    kind: str
    what: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One program of a pipeline: variables set for it, its name (empty: none), its arguments."""

    variables: dict[str, str]
    program: str
    arguments: list[str]


@dataclass(frozen=True)
class Command:
    """One command, over several lines perhaps; `prints` are the lines that the page shows as its output."""

    page: str
    line: int
    text: str
    markers: tuple[Marker, ...] = ()
    prints: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @functools.cached_property
    def stages(self) -> list[Stage]:
        return split(self.text)


@dataclass
class Page:
    """A page's commands in code blocks, its code spans (line, text), and what is wrong with its blocks."""

    commands: list[Command] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def pages() -> list[str]:
    """README.md and all pages of docs/, relative to the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def read(page: str, text: str | None = None) -> Page:
    """All of one page (its `text` is read from the file if not given)."""
    found = Page()
    markers: list[Marker] = []
    for token in _PARSER.parse((ROOT / page).read_text(encoding="utf-8") if text is None else text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            markers += [
                Marker(kind, what, tuple(part.strip() for part in (only or "").split(",") if part.strip()))
                for kind, what, only in _MARKER.findall(token.content)
            ]
            continue
        if token.type in ("fence", "code_block"):
            language = token.info.split()[0] if token.info else "sh"
            first = line + (token.type == "fence")
            if language in OTHER_LANGUAGES:
                if markers:
                    found.problems.append(f"{page}:{line}: a marker above a block of {language}, which has no commands")
            elif language in ("sh", "bash", "shell", "console"):
                found.commands += _in_block(page, first, token.content, tuple(markers))
            else:
                found.problems.append(f"{page}:{line}: unknown language {language!r}: commands are sh, others as text")
        elif token.type == "inline":
            found.spans += [(line, child.content) for child in token.children or [] if child.type == "code_inline"]
        markers = []
    return found


def _in_block(page: str, first: int, text: str, markers: tuple[Marker, ...]) -> Iterator[Command]:
    lines = text.rstrip("\n").split("\n")
    console = lines[0].startswith("$ ")
    at = 0
    while at < len(lines):
        start = at
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        taken = lines[at].removeprefix("$ ") if console else lines[at]
        at += 1
        while not _whole(taken) and at < len(lines):
            taken += "\n" + lines[at]
            at += 1
        prints: list[str] = []
        while console and at < len(lines) and not lines[at].startswith("$ "):
            prints.append(lines[at])
            at += 1
        yield Command(page, first + start, taken, markers, tuple(prints))


def _whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def split(text: str) -> list[Stage]:
    """The programs of a command line in order; redirections are left out. ValueError where it is no shell's."""
    words = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
    words.whitespace_split = True
    words.commenters = "#"
    stages: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word and set(word) <= set("|&;"):
            stages.append([])
        elif word and set(word) <= set("<>&"):
            skip = True
        else:
            stages[-1].append(word)
    return [_stage(found) for found in stages if found]


def _stage(words: list[str]) -> Stage:
    count = next((at for at, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    variables = dict(word.split("=", 1) for word in words[:count])
    rest = words[count:]
    return Stage(variables, rest[0] if rest else "", rest[1:])


def signature(stage: Stage) -> str:
    """What a test that covers a command mentions of it: its subcommand, target, module or path."""
    plain = [word for word in stage.arguments if not word.startswith("-")]
    if stage.program == "sglang-patches":
        groups = ("bench", "nccl", "draft", "spec")
        return " ".join(plain[: 2 if plain and plain[0] in groups else 1])
    if stage.program == "make":
        return f"make {next((word for word in plain if '=' not in word), '')}".strip()
    if stage.program == "python" and "-m" in stage.arguments:
        return stage.arguments[stage.arguments.index("-m") + 1]
    if stage.program == "curl":
        urls = (re.fullmatch(r"(?:http://)?[\w.]+:\d+(/[^?]*)?(?:\?.*)?", word) for word in stage.arguments)
        return next((url[1] or "/" for url in urls if url), "/")
    return stage.program


def mentions(source: str, signature: str) -> bool:
    """Whether a test's source mentions it, be it as one string or as words of a list."""
    plain = re.sub(r"[\s\"',\[\]()]+", " ", source)
    return re.search(rf"(?<![\w-]){re.escape(signature)}(?![\w-])", plain) is not None


def applying(command: Command) -> list[Marker]:
    """The markers that hold for this command."""
    return [m for m in command.markers if not m.only or any(text in command.text for text in m.only)]
