"""`sglang-patches port` as a person runs it, on wheels in the cache folder: lanes, the matrix, finishing by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_patches.port import app, lane, matrix
from sglang_patches.series import load, releases

from .sandbox import FILES, Sandbox
from .upstreams import make_wheel

PATH = "sglang/srt/one.py"
NEXT = "0.5.24"
NEW = FILES[PATH].replace("    return 1\n", "    return 1\n\n\nLIMIT = 1\n")


@pytest.fixture
def ported(sandbox: Sandbox) -> Sandbox:
    """Three patches on 0.5.23, of which `b` conflicts with 0.5.24; c requires b."""
    sandbox.add("a", {PATH: {0: "A = 1", 1: "    yield 'a'"}})
    sandbox.add("b", {PATH: {5: "    yield 'b'"}})
    sandbox.add("c", {PATH: {4: "C = 1"}}, "Default: on\nRequires: b\n")
    release(sandbox, "0.5.23")
    release(sandbox, NEXT, {PATH: NEW.replace("def two():\n    return 2", "def two(n):\n    print(n)")})
    return sandbox


def release(sandbox: Sandbox, name: str, changed: dict[str, str] | None = None) -> None:
    make_wheel(sandbox.cache / "wheels", name, {**FILES, **(changed or {})})


def install(sandbox: Sandbox) -> str:
    """Make 0.5.24 the installed release; returns its file."""
    new = NEW.replace("def two():\n    return 2", "def two(n):\n    print(n)")
    (sandbox.site / "sglang/_version.py").write_text(f"__version__ = version = '{NEXT}'\n")
    (sandbox.site / PATH).write_text(new)
    return new


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_writes_the_lane_of_what_was_carried(ported: Sandbox) -> None:
    lanes = ported.lane.parent
    before = contents(ported.lane)
    done = ported.cli("port", "--to", NEXT)
    assert done.returncode == 1, done.stderr
    assert f"{lanes / NEXT}: written and verified" in done.stderr
    assert (lanes / NEXT / "series").read_text() == (
        "# Patches on sglang 0.5.24, in the order they apply. `sglang-patches verify` checks them.\n"
        "# Carried from 0.5.23 by `sglang-patches port`.\na.patch\n# Left out: b (conflict)\n"
        "# Left out: c (requires b, which is left out)\n"
    )
    made = load(NEXT, lanes)
    (patch,) = made.patches
    assert made.left_out == {"b": "conflict", "c": "requires b, which is left out"}
    assert [entry.after for entry in patch.insertions[PATH]] == [0, 1]
    assert contents(ported.lane) == before
    assert sorted(entry.name for entry in lanes.iterdir()) == ["0.5.23", NEXT]
    assert releases(lanes) == ["0.5.23", NEXT]


def test_the_lane_is_used_where_its_release_is_installed(ported: Sandbox) -> None:
    assert ported.cli("port", "--to", NEXT).returncode == 1
    install(ported)
    assert ported.run("-c", "from sglang.srt import one; print(one.A, *one.one())").stdout == "1 a\n"
    assert f"lane       {NEXT} (" in ported.cli("status").stdout
    assert ported.cli("verify").returncode == 0
    refused = ported.cli("list", selection="+c")
    assert refused.returncode == 2
    assert "unknown patch: c\n  known      a (release 0.5.24)\n  left out   c: requires b, which" in refused.stderr


def test_a_conflict_with_a_patch_that_is_left_out_is_no_problem(ported: Sandbox) -> None:
    ported.add("d", {PATH: {2: "D = 1"}}, "Default: off\nConflicts: b\n")
    assert ported.cli("port", "--to", NEXT).returncode == 1
    lane_made = load(NEXT, ported.lane.parent)
    assert list(lane_made.by_name) == ["a", "d"]
    file = lane_made.folder / "series"
    install(ported)
    assert ported.cli("verify").returncode == 0
    file.write_text(file.read_text().replace("# Left out: b", "# b"))
    assert "names 'b' in Requires or Conflicts" in ported.cli("verify").stdout


def test_a_patch_whose_code_cannot_run_is_left_out(ported: Sandbox) -> None:
    """With one, the lane's servers end in an ImportError. The sandbox has no code: that of a real patch is taken."""
    ported.add("cpu-eagle3", {PATH: {2: "D = 1"}}, "Default: on\n")
    ported.add("e", {PATH: {3: "E = 1"}}, "Default: on\nRequires: cpu-eagle3\n")
    done = ported.cli("port", "--to", NEXT)
    text = (ported.lane.parent / NEXT / "series").read_text()
    assert "a.patch\n" in text
    assert "# Left out: cpu-eagle3 (its code imports sglang.srt." in text
    assert "# Left out: e (requires cpu-eagle3, which is left out)\n" in text
    assert done.returncode == 1
    assert "  its code   imports sglang.srt." in done.stdout


def test_port_to_itself_is_the_identity(ported: Sandbox) -> None:
    before = contents(ported.lane)
    done = ported.cli("port", "--to", "0.5.23", "--from", "0.5.23", "--force")
    assert done.returncode == 0, done.stderr
    after = contents(ported.lane)
    assert {**after, "series": b""} == {**before, "series": b""}
    assert [patch.name for patch in load("0.5.23", ported.lane.parent).patches] == ["a", "b", "c"]


def test_the_next_lane_still_says_what_the_one_before_left_out(ported: Sandbox) -> None:
    assert ported.cli("port", "--to", NEXT).returncode == 1
    release(ported, "0.5.25", {PATH: NEW})
    assert ported.cli("port", "--to", "0.5.25").returncode == 0
    made = load("0.5.25", ported.lane.parent)
    assert list(made.by_name) == ["a"]
    assert made.left_out == {"b": "conflict", "c": "requires b, which is left out"}


def test_a_lane_is_not_overwritten(ported: Sandbox) -> None:
    (ported.lane.parent / NEXT).mkdir()
    (ported.lane.parent / NEXT / "series").write_text("mine\n")
    done = ported.cli("port", "--to", NEXT)
    assert done.returncode == 2
    assert f"{ported.lane.parent / NEXT} exists: a lane is not overwritten" in done.stderr
    assert (ported.lane.parent / NEXT / "series").read_text() == "mine\n"
    assert ported.cli("port", "--to", NEXT, "--force").returncode == 1
    assert "a.patch" in (ported.lane.parent / NEXT / "series").read_text()


def test_a_lane_that_fails_its_checks_is_not_written(ported: Sandbox) -> None:
    file = ported.lane / "a.patch"
    file.write_text(file.read_text().replace("Remove-When: never", "Remove-When: TODO"))
    (ported.lane.parent / NEXT).mkdir()
    done = ported.cli("port", "--to", NEXT, "--force")
    assert done.returncode == 2
    assert "does not pass its checks, so it was not written\n  seen       header, a: a TODO is left\n" in done.stderr
    assert contents(ported.lane.parent / NEXT) == {}
    assert sorted(entry.name for entry in ported.lane.parent.iterdir()) == ["0.5.23", NEXT]


def test_a_failed_rename_puts_the_old_lane_back(ported: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_patches.port.carry import Carrier
    from sglang_patches.port.wheels import fetch

    monkeypatch.setenv("SGLANG_PATCHES_DIR", str(ported.lane.parent))
    source = load("0.5.23", ported.lane.parent)
    old, new = (fetch(name, print, ported.cache / "wheels") for name in ("0.5.23", NEXT))
    carrier = Carrier(old, new)
    done = [carrier.carry(patch) for patch in source.patches]
    (ported.lane.parent / NEXT).mkdir()
    (ported.lane.parent / NEXT / "mine").write_text("mine\n")
    real = lane.os.rename

    def full(old: object, new: object) -> None:
        if str(new) == str(ported.lane.parent / NEXT) and str(old).endswith(f"new/{NEXT}"):
            raise OSError(28, "No space left on device")
        real(old, new)  # type: ignore[arg-type]

    monkeypatch.setattr(lane.os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        lane.write(source, carrier.new, done, force=True)
    assert contents(ported.lane.parent / NEXT) == {"mine": b"mine\n"}
    assert sorted(entry.name for entry in ported.lane.parent.iterdir()) == ["0.5.23", NEXT]


def test_dry_run_writes_nothing_and_json_says_all(ported: Sandbox) -> None:
    done = ported.cli("port", "--to", NEXT, "--dry-run", "--json")
    assert done.returncode == 1
    assert not (ported.lane.parent / NEXT).exists()
    document = json.loads(done.stdout)
    assert (document["from"], document["to"]) == ("0.5.23", NEXT)
    assert [(row["name"], row["outcome"], row["left_out"]) for row in document["patches"]] == [
        ("a", "clean", ""),
        ("b", "conflict", "conflict"),
        ("c", "moved", "requires b, which is left out"),
    ]
    (hunk,) = document["patches"][1]["hunks"]
    assert (hunk["old"], hunk["new"]) == ({"path": PATH, "after": 5, "in": "two"}, None)
    assert "     5  def two():" in hunk["old_context"]
    assert "     8  def two(n):" in hunk["new_context"]


def test_work_is_finished_by_hand(ported: Sandbox, tmp_path: Path) -> None:
    """In the order of the other lane, and also what was left out only because it requires a patch that was."""
    ported.add("d", {PATH: {2: "D = 1"}}, "Default: on\n")
    work = tmp_path / "work"
    done = ported.cli("port", "--to", NEXT, "--work", str(work))
    assert sorted(entry.name for entry in work.iterdir()) == ["b", "c"]
    assert f"{work / 'b'}: resolve the conflict marks; with sglang==0.5.24 installed: " in done.stderr
    assert f"{work / 'c'}: its files are whole, but requires b, which is left out; with " in done.stderr
    text = (work / "b" / PATH).read_text()
    assert re.search(r"<{7} b\n.*\|{7} sglang 0\.5\.23\n.*>{7} sglang 0\.5\.24\n", text, re.DOTALL)
    new = install(ported)
    unresolved = ported.cli("refresh", "b", str(work / "b"))
    assert unresolved.returncode == 2
    assert f"{PATH}: a conflict is not resolved\n  seen       <<<<<<< b\n  remedy" in unresolved.stderr
    (work / "b" / PATH).write_text(new + "    yield 'b'\n")
    commands = re.findall(r"sglang-patches (refresh [bc] \S+)", done.stderr)
    assert len(commands) == 2
    for command in commands:
        refreshed = ported.cli(*command.split())
        assert refreshed.returncode == 0, refreshed.stderr
    lane_made = load(NEXT, ported.lane.parent)
    assert list(lane_made.by_name) == ["a", "b", "c", "d"]
    assert not lane_made.left_out
    assert ported.cli("verify").returncode == 0


def test_work_marks_what_git_would_merge_and_port_does_not_believe(ported: Sandbox, tmp_path: Path) -> None:
    """Git puts both hunks somewhere without a word: one would be in a file that does not compile."""
    file = ported.add("d", {PATH: {1: "    print(one)", 2: "return = 1"}}, "Default: on\n")
    assert file.is_file()
    work = tmp_path / "work"
    ported.cli("port", "--to", NEXT, "--dry-run", "--work", str(work))
    text = (work / "d" / PATH).read_text()
    assert text.count("<<<<<<< d\n") == 2
    assert "def one():\n<<<<<<< d\n    print(one)\n||||||| sglang 0.5.23\n=======\n>>>>>>> sglang 0.5.24\n" in text
    again = ported.cli("port", "--to", NEXT, "--dry-run", "--work", str(work))
    assert (again.returncode, "is not empty\n  remedy" in again.stderr) == (2, True)


def test_work_says_which_file_is_gone(ported: Sandbox, tmp_path: Path) -> None:
    wheel = ported.cache / "wheels" / f"sglang-{NEXT}-py3-none-any.whl"
    wheel.unlink()
    make_wheel(wheel.parent, NEXT, {path: text for path, text in FILES.items() if path != PATH})
    done = ported.cli("port", "--to", NEXT, "--dry-run", "--work", str(tmp_path / "work"))
    assert f"/a: find a place for what it adds to {PATH}, which is gone; with " in done.stderr
    assert sorted(entry.name for entry in (tmp_path / "work/a").iterdir()) == ["header"]


def test_the_matrix_is_written_between_its_marks(ported: Sandbox, tmp_path: Path) -> None:
    release(ported, "0.5.25", {PATH: ""})
    file = tmp_path / "lanes.md"
    file.write_text(f"Before.\n\n{matrix.BEGIN}\nold\n{matrix.END}\n\nAfter.\n")
    source = ported.run(
        "-c",
        "import sys; from pathlib import Path; from sglang_patches.port import app, matrix, wheels\n"
        "done = app.carry(app.lane_to_port(None), ['0.5.23', '0.5.24', '0.5.25'], lambda line: None)\n"
        "text = matrix.markdown('0.5.23', {name: ported for name, (_, ported) in done.items()})\n"
        "print(matrix.replace(Path(sys.argv[1]), text), matrix.replace(Path(sys.argv[1]), text))",
        str(file),
        selection="none",
    )
    assert source.stdout == "True False\n", source.stderr
    text = file.read_text()
    assert text.startswith("Before.\n\n<!-- port")
    assert text.endswith("-->\n\nAfter.\n")
    for row in (
        "| patch | 0.5.23 | 0.5.24 | 0.5.25 |",
        "| a | clean | clean | target gone 1/2 |",
        "| b | clean | conflict 1/1 | target gone 1/1 |",
        "| c | clean | moved 1/1; requires b | conflict 1/1 |",
        "| **carried** | 3 of 3 | 1 of 3 | 0 of 3 |",
        "  - target gone: `one.py` two: two is gone (0.5.25)",
    ):
        assert row in text.splitlines()
    assert "port --dry-run --from 0.5.23 --to 0.5.23..0.5.25 --write" in text


def test_the_newest_other_lane_is_carried(ported: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PATCHES_DIR", str(ported.lane.parent))
    assert app.lane_to_port(None, NEXT).release == "0.5.23"
    (ported.lane.parent / NEXT).mkdir()
    (ported.lane.parent / NEXT / "series").write_text("")
    assert app.lane_to_port(None, NEXT).release == "0.5.23"
    assert app.lane_to_port(None, "0.5.25").release == NEXT


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--to", "0.5.17..0.5.23"], "a range of releases can only be looked at"),
        (["--to", "new"], "'new' is not a release of sglang"),
        (["--to", "0.5.24", "--from", "0.5.22"], "no lane for SGLang 0.5.22 to carry\n  lanes      0.5.23 (in "),
        (["--to", "0.5.24", "--dry-run", "--write", "NO_MARKS"], "has no place for the matrix"),
        (["--to", "0.5.24", "--write", "NO_MARKS"], "--work is for one release, --write for --dry-run"),
    ],
)
def test_refuses(ported: Sandbox, tmp_path: Path, arguments: list[str], problem: str) -> None:
    (tmp_path / "text.md").write_text("no marks\n")
    done = ported.cli("port", *[str(tmp_path / "text.md") if entry == "NO_MARKS" else entry for entry in arguments])
    assert done.returncode == 2
    assert problem in done.stderr
    assert "remedy" in done.stderr
    assert not (ported.lane.parent / NEXT).exists()
