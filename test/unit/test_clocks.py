"""Times are measured by clocks that nobody sets: the wall clock may jump by an hour while a server runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(
    file
    for folder in ("python", "benchmark", "sgl-kernel/python", "docker", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)
# Where the time of day itself is meant, by how often it is asked for.
MEANT = {
    "benchmark/endurance/scenarios.py": 2,  # the server's against this machine's
    "python/sglang_patches/verify.py": 1,  # the date in a patch's header against today
}
_LAST = ("time", "time_ns", "now", "utcnow", "today")


def asks_for_the_time_of_day(tree: ast.Module) -> Iterator[str]:
    """Calls of a clock that can be set, but for `datetime.now(...).isoformat(...)`, which is written down as it is."""
    shown = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "isoformat" and isinstance(node.value, ast.Call)
    }
    names = {
        name.asname or name.name: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)) or node in shown:
            continue
        last = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if last not in _LAST and last not in names:
            continue
        called = ast.unparse(node.func)
        if re.search(r"(^|\.)(time\.(time|time_ns)|(datetime|date)\.(now|utcnow|today))$", called):
            yield f"{node.lineno}: {called}"
        elif names.get(called) in ("time", "time_ns"):
            yield f"{node.lineno}: time.{names[called]}"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("import time; begun = time.time()", 1),
        ("import time; begun = time.time_ns()", 1),
        ("from time import time as now; begun = now()", 1),
        ("import datetime; begun = datetime.datetime.now()", 1),
        ("from datetime import datetime, UTC; begun = datetime.now(UTC)", 1),
        ("from datetime import datetime, UTC; when = datetime.now(UTC).isoformat(timespec='seconds')", 0),
        ("import time; begun = time.monotonic() + time.perf_counter() + time.monotonic_ns()", 0),
    ],
)
def test_such_calls_are_found(line: str, count: int) -> None:
    assert len(list(asks_for_the_time_of_day(ast.parse(line)))) == count


def test_nothing_is_measured_by_the_wall_clock() -> None:
    assert len(CODE) > 150
    found = {str(file.relative_to(ROOT)): list(asks_for_the_time_of_day(ast.parse(file.read_text()))) for file in CODE}
    wrong = {file: calls for file, calls in found.items() if len(calls) != MEANT.get(file, 0)}
    assert not wrong, f"use time.monotonic or time.perf_counter: {wrong}"


def test_no_patched_line_asks_for_it() -> None:
    for patch in (ROOT / "patches").rglob("*.patch"):
        added = [line for line in patch.read_text().splitlines() if re.match(r"\+(?!\+\+)", line)]
        assert not [line for line in added if re.search(r"\btime\.time|datetime", line)], patch
