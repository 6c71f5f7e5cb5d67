"""Where a patch cannot be carried: nothing is written, and the report says what is in the way."""

from __future__ import annotations

import pytest

from sglang_patches.port import report
from sglang_patches.port.carry import Carrier

from .carried import BODY, IMPORT, START, Ports
from .upstreams import NEW, OLD, PATH, TEXT, behind, make_patch, make_wheel


def test_conflict_where_its_function_is_defined_twice(port: Ports) -> None:
    """Git puts the hook into one of the two, without a word."""
    launch = TEXT[TEXT.index("def launch") :]
    edited = behind(TEXT, "    engine.start(port)\n", "    print(port)\n")
    ported = port(TEXT.replace(launch, f"{launch}\n\n{launch.replace('engine.start', 'engine.stop')}"), edited)
    assert ported.outcome == "conflict"
    assert "launch is defined 2 times, before 1" in port.text(ported)


def test_a_merge_into_another_function_is_not_believed(port: Ports) -> None:
    """Git sees only lines: with `start` copied and renamed above, the old lines match in the copy."""
    start = TEXT[TEXT.index(START) : TEXT.index("    def stop")]
    new = TEXT.replace(
        start, start.replace("def start", "def old_start") + "    def start(self, port):\n        pass\n\n"
    )
    ported = port(new)
    assert (ported.outcome, ported.data) == ("conflict", None)


def test_conflict_shows_both_sides(port: Ports) -> None:
    new = TEXT.replace(BODY, "        self.ports = [port]\n").replace("        table = {\n", "        tables = {\n")
    ported = port(new)
    assert (ported.outcome, ported.data) == ("conflict", None)
    said = port.text(ported)
    assert f"conflict   {PATH}:16 (Engine.start): the lines above and below it are others" in said
    assert "        16          self.port = port\n             +        a_patch.started(self, port)\n" in said
    assert "          16          self.ports = [port]\n          17          tables = {\n" in said


def test_conflict_where_upstream_put_lines_at_the_same_place(port: Ports) -> None:
    ported = port(behind(TEXT, BODY, "        self.ready = True\n"))
    assert ported.outcome == "conflict"
    assert "upstream put 1 lines where it goes" in port.text(ported)


def test_conflict_where_a_line_is_there_twice(port: Ports) -> None:
    body = TEXT[TEXT.index("        port = port or 1\n") : TEXT.index("        return table\n")]
    ported = port(TEXT.replace(body, f"        a = 1\n{BODY}        b = 2\n{BODY}        table = a, b\n"))
    assert ported.outcome == "conflict"
    assert "the lines above and below it are others" in port.text(ported)


def test_conflict_where_only_a_bracket_is_the_same(port: Ports) -> None:
    table = TEXT[TEXT.index("        table = {\n") : TEXT.index("    def stop")]
    ported = port(
        TEXT.replace(table, "        self.names = {\n            1: 2,\n        }\n        return 1\n\n"),
        behind(TEXT, "        }\n", "        print(port)\n"),
    )
    assert ported.outcome == "conflict"
    assert "the lines above and below it are others" in port.text(ported)


def test_conflict_where_the_same_line_is_in_another_scope(port: Ports) -> None:
    """A hunk between two definitions, of which the upper one goes on and the lower one is another."""
    edited = behind(TEXT, "        del self.port\n", "\n\nEXTRA = 1\n")
    new = behind(TEXT, "        del self.port\n", "        del self\n").replace("def launch(port)", "def launch(ports)")
    ported = port(new, edited)
    assert ported.outcome == "conflict"
    assert "beside the same lines it would be at Engine.stop, not module level" in port.text(ported)


def test_conflict_where_a_name_is_gone(port: Ports) -> None:
    edited = behind(TEXT, "    engine.start(port)\n", "    print(engine)\n")
    new = TEXT.replace("    engine = Engine()\n", "    it = Engine()\n")
    ported = port(new, edited)
    assert ported.outcome == "conflict"
    assert "engine has no value yet, or none any more, at the place in launch" in port.text(ported)


def test_conflict_where_a_name_is_bound_too_late(port: Ports) -> None:
    """Beside the same line as before, and the value that the hook changes is made further down now."""
    edited = behind(TEXT, "        port = port or 1\n", "        port = a_patch.port(chosen)\n")
    old = edited.replace("        port = port or 1\n", "        chosen = port or 1\n")
    new = TEXT.replace(
        "        port = port or 1\n        self.port = port\n", "        self.port = port\n        chosen = port\n"
    )
    made = make_patch({PATH: old}, {PATH: TEXT.replace("        port = port or 1\n", "        chosen = port or 1\n")})
    files = ({PATH: TEXT.replace("        port = port or 1\n", "        chosen = port or 1\n")}, {PATH: new})
    carrier = Carrier(make_wheel(port.folder, OLD, files[0]), make_wheel(port.folder, NEW, files[1]))
    ported = carrier.carry(made)
    assert ported.outcome == "conflict"
    assert "chosen has no value yet" in report.text(carrier, [ported])


@pytest.mark.parametrize(
    "line", ["LIMIT = a_patch.limit(LIMIT)\n", "def launched(port):\n    return a_patch.limit(port)\n"]
)
def test_conflict_where_a_hook_would_run_above_its_import(port: Ports, line: str) -> None:
    """Imports go behind the last one before any definition, which may be below code that runs before."""
    new = TEXT.replace("import os\nfrom sglang.srt import other\n", "import sys\n").replace(
        "class Engine", "SIZE = 1\nimport other\n\n\nclass Engine"
    )
    ported = port(new, behind(behind(TEXT, "from sglang.srt import other\n", IMPORT), "LIMIT = 3\n", line))
    if line.startswith("def"):
        assert ported.outcome == "moved"
    else:
        assert [hunk.outcome for hunk in ported.hunks] == ["moved", "conflict"]
        assert "it uses a_patch above the import of it" in port.text(ported)


def test_conflict_where_the_result_does_not_compile(port: Ports) -> None:
    edited = behind(TEXT, "    engine.start(port)\n", "    return None\n")
    ported = port(TEXT.replace("def launch(port):\n", "async def launch(port):\n    yield 1\n"), edited)
    assert ported.outcome == "conflict"
    assert f"{PATH} does not compile with it: 'return' with value in async generator" in port.text(ported)


def test_conflict_where_the_new_file_is_not_python(port: Ports) -> None:
    ported = port(TEXT.replace("        del self.port\n", "        if self.port:\n"))
    assert ported.outcome == "conflict"
    assert f"this interpreter does not read {PATH}: expected an indented block" in port.text(ported)


def test_conflict_where_a_branch_reads_a_name_that_is_gone(port: Ports) -> None:
    old = TEXT.replace("    engine.start(port)\n", "    if port:\n        engine.start(port)\n")
    edited = behind(old, "        engine.start(port)\n", "    elif engine:\n        port = 1\n")
    new = old.replace("engine = ", "it = ").replace("    return engine\n", "    return it\n")
    patch = make_patch({PATH: edited}, {PATH: old})
    new = new.replace("        engine.start(port)\n", "        engine.start(port)\n", 1)
    carrier = Carrier(make_wheel(port.folder, OLD, {PATH: old}), make_wheel(port.folder, NEW, {PATH: new}))
    ported = carrier.carry(patch)
    assert ported.outcome == "conflict"
    assert "engine has no value yet, or none any more, at the place in launch" in report.text(carrier, [ported])
