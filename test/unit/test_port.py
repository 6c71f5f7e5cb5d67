"""Each outcome of carrying a patch to another release, on small upstreams; conflicts are in test_port_conflicts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_patches.errors import PatchError
from sglang_patches.port import needs, report, scopes
from sglang_patches.port.carry import Carrier

from .carried import BODY, HOOK, HOOKED, IMPORT, START, Ports
from .upstreams import NEW, OLD, PATH, TEXT, above, behind, make_patch, make_wheel


def test_to_the_same_text_nothing_changes(port: Ports) -> None:
    ported = port(TEXT)
    assert ported.outcome == "clean"
    assert port.written(ported).insertions == port.patch.insertions
    assert ported.data is not None
    assert b"Pre-Image: " + port.patch.pre_images[PATH].encode() in ported.data


def test_clean_rewrites_positions_and_pre_images(port: Ports) -> None:
    new = above(TEXT, "LIMIT = 3\n", "SIZE = 1\nDEPTH = 2\n")
    ported = port(new)
    assert ported.outcome == "clean"
    assert [(hunk.hunk.after, hunk.after) for hunk in ported.hunks] == [(2, 2), (16, 18)]
    assert port.result(ported) == behind(behind(new, "from sglang.srt import other\n", IMPORT), BODY, HOOK)
    assert port.written(ported).pre_images != port.patch.pre_images
    assert f"  clean      {PATH}:16 (Engine.start) -> :18" in port.text(ported).splitlines()


def test_moved_within_its_function_where_the_line_below_is_new(port: Ports) -> None:
    new = TEXT.replace("        table = {\n", "        table: dict = {\n")
    ported = port(new)
    assert ported.outcome == "moved"
    assert port.result(ported) == behind(behind(new, "from sglang.srt import other\n", IMPORT), BODY, HOOK)
    assert "beside the same lines" in port.text(ported)


def test_moved_with_its_function_to_another_place_in_the_file(port: Ports) -> None:
    start = TEXT[TEXT.index(START) : TEXT.index("    def stop")]
    new = TEXT.replace(start, "").replace(
        "        del self.port\n", "        del self.port\n\n" + start.rstrip("\n") + "\n"
    )
    ported = port(new)
    assert ported.outcome in ("clean", "moved")
    assert port.result(ported) == behind(behind(new, "from sglang.srt import other\n", IMPORT), BODY, HOOK)


def test_moved_with_a_function_that_has_another_name(port: Ports) -> None:
    new = TEXT.replace("def start(self", "def begin(self").replace("engine.start(", "engine.begin(")
    ported = port(new)
    assert ported.outcome == "moved"
    assert [str(hunk.new_spot) for hunk in ported.hunks] == ["module level", "Engine.begin"]
    assert port.result(ported) == behind(behind(new, "from sglang.srt import other\n", IMPORT), BODY, HOOK)
    assert f"{PATH}:16 (Engine.start) -> :16: Engine.start is Engine.begin now" in port.text(ported)


def test_moved_with_its_file(port: Ports) -> None:
    ported = port(None, more={"sglang/srt/engines/main.py": TEXT})
    assert ported.outcome == "moved"
    assert list(port.written(ported).pre_images) == ["sglang/srt/engines/main.py"]
    assert port.result(ported) == HOOKED


def test_imports_go_behind_imports_that_changed(port: Ports) -> None:
    new = TEXT.replace("import os\nfrom sglang.srt import other\n", "import sys\nfrom sglang.srt import others\n")
    ported = port(new)
    assert ported.outcome == "moved"
    assert port.result(ported).startswith(f"import sys\nfrom sglang.srt import others\n{IMPORT}\nLIMIT")


@pytest.mark.parametrize("line", ["    @staticmethod\n", "    def kind():\n"])
def test_a_decorator_stays_first_or_last(port: Ports, line: str) -> None:
    edited = above(TEXT, line, "    @print\n")
    new = TEXT.replace(
        "    @staticmethod\n    def kind():\n", "    @staticmethod\n    @other.checked\n    def kind(x=1):\n"
    )
    ported = port(new, edited)
    assert ported.outcome == ("clean" if "static" in line else "moved")
    assert port.result(ported) == above(new, line.replace("kind()", "kind(x=1)"), "    @print\n")
    assert "Engine.kind takes other parameters: () -> (x=1)" in ported.notes


def test_a_decorator_stays_first_where_the_merge_conflicts(port: Ports) -> None:
    new = above(TEXT, "    @staticmethod\n", "    @other.checked\n")
    ported = port(new, above(TEXT, "    @staticmethod\n", "    @print\n"))
    assert ported.outcome == "moved"
    assert port.result(ported) == above(new, "    @other.checked\n", "    @print\n")


TRACED = "    @other.traced\n"


@pytest.mark.parametrize(
    ("decorators", "there"),
    [(f"{TRACED}    @other.checked\n", True), (TRACED, False), (f"    @other.checked\n{TRACED}" * 2, False)],
)
def test_a_decorator_between_two_stays_above_the_one_below(port: Ports, decorators: str, there: bool) -> None:
    old = behind(TEXT, "    @staticmethod\n", "    @other.checked\n")
    new = TEXT.replace("    @staticmethod\n", decorators)
    patch = make_patch({PATH: behind(old, "    @staticmethod\n", "    @print\n")}, {PATH: old})
    carrier = Carrier(make_wheel(port.folder, OLD, {PATH: old}), make_wheel(port.folder, NEW, {PATH: new}))
    ported = carrier.carry(patch)
    if there:
        assert [hunk.after for hunk in ported.hunks] == [10]
    else:
        assert ported.outcome == "conflict"
        assert "the decorators of Engine.kind are others" in report.text(carrier, [ported])


def test_a_setter_beside_its_property_is_no_second_definition(port: Ports) -> None:
    old = TEXT.replace("@staticmethod\n    def kind()", "@property\n    def kind(self)")
    new = behind(old, '        return "engine"\n', "\n    @kind.setter\n    def kind(self, value):\n        pass\n")
    patch = make_patch({PATH: above(old, '        return "engine"\n', "        print(1)\n")}, {PATH: old})
    carrier = Carrier(make_wheel(port.folder, OLD, {PATH: old}), make_wheel(port.folder, NEW, {PATH: new}))
    assert carrier.carry(patch).outcome == "clean"


def test_blank_lines_around_a_hunk_stay_on_their_side(port: Ports) -> None:
    ours = "    ours = 1\n"
    new = TEXT.replace("Runs.", "Runs fast.")
    ported = port(new, behind(TEXT, '    """Runs."""\n', ours))
    assert ported.outcome == "moved"
    assert port.result(ported) == behind(new, '    """Runs fast."""\n', ours)
    new = TEXT.replace("LIMIT = 3\n\n\nclass Engine", "LIMIT = 3\n\nSIZE = 1\n\n\nclass Motor")
    ported = port(new, TEXT.replace("LIMIT = 3\n\n", "LIMIT = 3\n\nOURS = 1\n"))
    assert ported.outcome == "moved"
    assert "LIMIT = 3\n\nOURS = 1\nSIZE = 1\n" in port.result(ported)
    new = TEXT.replace("LIMIT = 3\n\n\nclass", "LIMIT = 3\n\nclass")
    ported = port(new, TEXT.replace("LIMIT = 3\n\n", "LIMIT = 3\n\nOURS = 1\n"))
    assert ported.outcome == "moved"
    assert "LIMIT = 3\n\nOURS = 1\nclass" in port.result(ported)


def test_target_gone_with_its_function(port: Ports) -> None:
    start = TEXT[TEXT.index(START) : TEXT.index("    def stop")]
    ported = port(TEXT.replace(start, ""))
    assert (ported.outcome, ported.data) == ("target gone", None)
    assert "Engine.start is gone (Engine is still there)" in port.text(ported)


def test_target_gone_with_its_file(port: Ports) -> None:
    ported = port(None)
    assert ported.outcome == "target gone"
    assert f"sglang {NEW} has no {PATH}" in port.text(ported)
    twice = port(None, more={"sglang/srt/a.py": TEXT, "sglang/srt/b.py": TEXT})
    assert twice.outcome == "target gone"
    assert "Engine.start: now in sglang/srt/a.py, sglang/srt/b.py" in port.text(twice)


def test_a_renamed_file_is_a_new_one_with_the_same_definitions(port: Ports) -> None:
    other = TEXT.replace("class Engine:", "class Engine:\n    pass\n\n\nclass Motor:")
    assert port(None, more={"sglang/srt/other.py": TEXT, "sglang/srt/main.py": TEXT}).outcome == "moved"
    assert port(None, more={"sglang/srt/main.py": other}).outcome == "target gone"


def test_what_code_in_a_scope_can_read() -> None:
    module = scopes.parse(
        b"a = 1\nclass C:\n    b = 1\n    def f(self):\n        c = 1\n        def g():\n            d = 1\n"
        b"            e = 1\n        h = 1\ni = 1\n"
    )
    names = set("abcdefghi")
    assert module.bound("C.f.g", 7) & names == set("acdghi")
    assert module.bound("C", 3) & names == set("abi")
    assert module.bound("", 2) & names == set("a")


ENTRY = '            "torch_native": self.kind,\n'
UPSTREAMED = {
    "a definition": (
        behind(TEXT, "        del self.port\n", "\n    def restart(self):\n        self.stop()\n"),
        behind(
            TEXT, "        del self.port\n", "\n    def restart(self, hard=False):\n        raise NotImplementedError\n"
        ),
        "def restart",
    ),
    "an entry of a table": (
        behind(TEXT, '            "flashinfer": self.kind,\n', ENTRY),
        above(TEXT, '            "triton": self.kind,\n', '            "torch_native": self.stop,\n'),
        "entry 'torch_native'",
    ),
    "an attribute": (
        behind(TEXT, BODY, "        self.host = 'a'\n"),
        behind(TEXT, BODY, "        self.host = self.port\n"),
        "self.host =",
    ),
    "a registration": (
        TEXT + 'other.register("torch_native", launch)\n',
        TEXT + 'other.register("torch_native", Engine)\n',
        "other.register('torch_native', ...)",
    ),
    "the same line": (
        behind(TEXT, "    engine.start(port)\n", "    engine.stop()\n"),
        behind(TEXT, "    engine.start(port)\n", "    engine.stop()\n"),
        "the same lines",
    ),
}


@pytest.mark.parametrize("case", UPSTREAMED)
def test_upstreamed_shows_what_upstream_has(port: Ports, case: str) -> None:
    edited, new, what = UPSTREAMED[case]
    ported = port(new, edited)
    assert (ported.outcome, ported.data) == ("upstreamed", None)
    assert [shown.what for shown in ported.upstreamed] == [what]
    assert f"upstream   has {what} now: {PATH}:{ported.upstreamed[0].first}\n" in port.text(ported)


@pytest.mark.parametrize("case", UPSTREAMED)
def test_what_upstream_had_before_is_not_upstreamed(port: Ports, case: str) -> None:
    edited, _, _ = UPSTREAMED[case]
    assert port(above(TEXT, "LIMIT = 3\n", "SIZE = 1\n"), edited).outcome == "clean"


def test_a_parameter_that_upstream_sets_too_is_not_upstreamed(port: Ports) -> None:
    edited = behind(TEXT, "    engine = Engine()\n", "    port = a_patch.port(port)\n")
    assert port(behind(TEXT, "    engine.start(port)\n", "    port = engine.port\n"), edited).outcome == "clean"


def test_a_decorated_definition_does_not_decorate_what_is_behind_it(port: Ports) -> None:
    ours = "    @property\n    def ours(self):\n        return 1\n\n"
    ported = port(above(TEXT, "LIMIT = 3\n", "SIZE = 1\n"), above(TEXT, "    def stop(self):\n", ours))
    assert [str(hunk.old_spot) for hunk in ported.hunks] == ["Engine"]
    there = above(TEXT, "    @staticmethod\n", "    def ours(self):\n        return 2\n\n")
    ported = port(there, above(TEXT, "    def stop(self):\n", ours))
    assert [shown.what for shown in ported.upstreamed] == ["def ours"]


@pytest.mark.parametrize("line", ['            "triton": self.kind,\n', "    engine.start(port)\n"])
def test_what_upstream_has_twice_by_the_patch_is_not_upstreamed(port: Ports, line: str) -> None:
    assert port(above(TEXT, "LIMIT = 3\n", "SIZE = 1\n"), behind(TEXT, line, line)).outcome == "clean"


def test_a_short_line_of_upstream_is_not_the_same_line(port: Ports) -> None:
    edited = behind(TEXT, "    engine.start(port)\n", "    pass\n")
    assert port(behind(TEXT, "def launch(port):\n", "    pass\n"), edited).outcome == "clean"


def test_upstreamed_as_the_header_says(port: Ports) -> None:
    header = f"Adds: {PATH} Engine.limit\nAdds: {PATH} Engine.kind\n"
    for line in ("        self.limit = 4\n", "        limit = 4\n"):
        ported = port(
            behind(TEXT, "    engine.start(port)\n", "    pass\n").replace("        del self.port\n", line),
            HOOKED,
            header,
        )
        assert ported.outcome == ("upstreamed" if "self" in line else "clean")
    ported = port(behind(TEXT, '    """Runs."""\n', "    limit = 4\n"), HOOKED, header)
    assert [shown.what for shown in ported.upstreamed] == ["Engine.limit"]


def test_a_patch_for_another_release_is_refused(port: Ports) -> None:
    port(TEXT + "# more\n")
    with pytest.raises(PatchError, match=r"a-patch was not made for sglang 0\.5\.24"):
        Carrier(port.carrier.new, port.carrier.old).carry(port.patch)


def test_what_the_patch_code_imports_must_be_there(tmp_path: Path, port: Ports) -> None:
    port(TEXT, more={"sglang/srt/pack/__init__.py": "", "sglang/srt/pack/inner.py": "", "sglang/srt/later.py": "a b\n"})
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    (runtime / "a_patch.py").write_text(
        "from typing import TYPE_CHECKING\nimport sglang.srt.gone\nfrom sglang.srt.other import X, Y\n"
        "from sglang.srt.pack import inner, outer\n"
        "from sglang.srt.later import W\nif TYPE_CHECKING:\n    from sglang.srt.other import Z\n"
        "def late():\n    from sglang.srt.engine import Engine, Motor\n"
        "    try:\n        from sglang.srt.other import V\n    except ImportError:\n        pass\n"
    )
    assert needs.missing(port.patch, port.carrier.new, tmp_path) == [
        "sglang.srt.engine: Motor",
        "sglang.srt.gone",
        "sglang.srt.other: Y",
        "sglang.srt.pack: outer",
    ]
