"""What holds for every patch and every change of upstream that a small file has room for."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches import hunks
from sglang_patches.port import scopes
from sglang_patches.port.carry import Carrier, Ported
from sglang_patches.port.place import is_import, spot_of
from sglang_patches.series import parse_patch

from .upstreams import NEW, OLD, PATH, TEXT, behind, make_patch, make_wheel

# Hooks of every kind, each at its only place.
HOOKS = {
    "import": ("from sglang.srt import other\n", "from sglang_patches.runtime import a_patch\n"),
    "module": ("LIMIT = 3\n", "LIMIT += a_patch_limit\n"),
    "class body": ('    """Runs."""\n', "    ours = 1\n"),
    "method start": ("    def start(self, port):\n", "        port = max(port, 0)\n"),
    "call": ("        self.port = port\n", "        print(self.port)\n"),
    "entry": ('            "triton": self.kind,\n', '            "ours": self.kind,\n'),
    "method end": ("        del self.port\n", "        print(self)\n"),
    "function": ("    engine.start(port)\n", "    print(engine, port)\n"),
}
# Upstream's next release, as changes of the text that can be made in any combination.
CHANGES = {
    "more imports": lambda text: text.replace("import os\n", "import os\nimport sys\n"),
    "other imports": lambda text: text.replace("from sglang.srt import other\n", "from sglang.srt import others\n"),
    "another limit": lambda text: text.replace("LIMIT = 3", "LIMIT = 4"),
    "a renamed method": lambda text: text.replace("start(", "begin("),
    "a renamed class": lambda text: text.replace("Engine", "Motor"),
    "a new method": lambda text: text.replace(
        "    def stop", "    def go(self):\n        self.port = port\n\n    def stop"
    ),
    "a new statement": lambda text: text.replace("        table = {", "        self.ready = True\n        table = {"),
    "other parameters": lambda text: text.replace("def stop(self)", "def stop(self, hard=False)"),
    "another body": lambda text: text.replace("        del self.port", "        self.port = None"),
    "a new first function": lambda text: text.replace("LIMIT", "def new():\n    return 1\n\n\nLIMIT", 1),
    "a gone function": lambda text: text[: text.index("def launch")],
    "a renamed variable": lambda text: text.replace("    engine = ", "    it = ").replace("return engine", "return it"),
}
hooks = st.sets(st.sampled_from(sorted(HOOKS)), min_size=1)
changes = st.lists(st.sampled_from(sorted(CHANGES)), unique=True)


def edit(chosen: set[str]) -> str:
    text = TEXT
    for name in sorted(chosen):
        text = behind(text, *HOOKS[name])
    return text


def change(chosen: list[str]) -> str:
    text = TEXT
    for name in chosen:
        text = CHANGES[name](text)
    return text


def carry(edited: str, new: str, old: str = TEXT) -> Ported:
    with tempfile.TemporaryDirectory() as folder:
        carrier = Carrier(make_wheel(Path(folder), OLD, {PATH: old}), make_wheel(Path(folder), NEW, {PATH: new}))
        return carrier.carry(make_patch({PATH: edited}, {PATH: old}))


def inserted(ported: Ported) -> hunks.Insertions:
    assert ported.data is not None
    return parse_patch(ported.data, ported.patch.file).insertions[PATH]


@settings(max_examples=25, deadline=None)
@given(hooks)
def test_to_the_same_text_is_the_identity(chosen: set[str]) -> None:
    ported = carry(edit(chosen), TEXT)
    assert ported.outcome == "clean"
    assert inserted(ported) == ported.patch.insertions[PATH]


@settings(max_examples=80, deadline=None)
@given(hooks, changes)
def test_what_is_carried_is_upstream_with_the_same_lines_in_the_same_places(chosen: set[str], made: list[str]) -> None:
    new = change(made)
    ported = carry(edit(chosen), new)
    assert len(ported.hunks) == len(ported.patch.insertions[PATH])
    if ported.data is None:
        return
    carried = inserted(ported)
    compile(hunks.apply(new.encode(), carried, PATH), PATH, "exec")
    assert sorted(line for hunk in carried for line in hunk.lines) == sorted(
        line for hunk in ported.patch.insertions[PATH] for line in hunk.lines
    )
    lines = hunks.split_lines(new.encode())
    for hunk in ported.hunks:
        assert hunk.after is not None
        moved = hunk.hunk._replace(after=hunk.after)
        assert spot_of(scopes.parse(new.encode()), lines, moved) == hunk.new_spot
        renamed = str(hunk.old_spot).replace("Engine", "Motor"), str(hunk.old_spot).replace("start", "begin")
        both = renamed[0].replace("start", "begin")
        assert str(hunk.new_spot) in (str(hunk.old_spot), *renamed, both)
        if not is_import(moved):
            here, there = (
                [line.strip().replace(b"Motor", b"Engine").replace(b"begin", b"start") for line in around]
                for around in (_around(TEXT.encode(), hunk.hunk.after), _around(new.encode(), hunk.after))
            )
            assert here[0] == there[0] or here[1] == there[1]


def _around(text: bytes, after: int) -> tuple[bytes, bytes]:
    """The nearest lines with text above and below."""
    lines = hunks.split_lines(text)
    up = next((line for line in reversed(lines[:after]) if line.strip()), b"")
    return up, next((line for line in lines[after:] if line.strip()), b"")


@settings(max_examples=40, deadline=None)
@given(hooks, changes)
def test_a_hunk_fares_alone_as_among_others(chosen: set[str], made: list[str]) -> None:
    new = change(made)
    together = {hunk.hunk.lines: (hunk.outcome, hunk.after) for hunk in carry(edit(chosen), new).hunks}
    for name in sorted(chosen):
        (alone,) = carry(edit({name}), new).hunks
        assert together[alone.hunk.lines] == (alone.outcome, alone.after)


@settings(max_examples=40, deadline=None)
@given(hooks, changes)
def test_there_and_back_is_the_identity_where_it_was_clean(chosen: set[str], made: list[str]) -> None:
    new, edited = change(made), edit(chosen)
    ported = carry(edited, new)
    if ported.outcome != "clean":
        return
    back = carry(hunks.apply(new.encode(), inserted(ported), PATH).decode(), TEXT, old=new)
    if back.outcome == "clean":
        assert hunks.apply(TEXT.encode(), inserted(back), PATH).decode() == edited


def test_hooks_and_changes_make_every_outcome_but_upstreamed() -> None:
    """The properties above say nothing where nothing is carried, or where everything is clean."""
    found = {carry(edit({hook}), change([one])).outcome for hook, one in itertools.product(HOOKS, CHANGES)}
    assert found == {"clean", "moved", "conflict", "target gone"}
