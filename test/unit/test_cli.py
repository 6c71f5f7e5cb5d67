"""The command line tool, run as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from .sandbox import FILES, Sandbox, lines, words

PATH = "sglang/srt/one.py"


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    sandbox.add("a", {PATH: {1: "    return 'a'"}})
    sandbox.add("b", {"sglang/launch.py": {3: "WORDS.append('b')"}, PATH: {0: "B = 'b'", 5: "    return 'b'"}})
    sandbox.add("off", {PATH: {4: "# off"}}, "Default: off\n")
    return sandbox


def failures(sandbox: Sandbox) -> list[tuple[str, str, str]]:
    """(check, subject, problem) of what `verify` finds wrong; also checks that exit code and table agree."""
    done = sandbox.cli("verify", "--json")
    document = json.loads(done.stdout)
    found = [(r["check"], r["subject"], r["problem"]) for r in document["results"] if r["problem"]]
    assert done.returncode == (1 if found else 0)
    assert document["ok"] == (not found)
    return found


def test_verify_passes_and_counts(patched: Sandbox) -> None:
    assert failures(patched) == []
    results = json.loads(patched.cli("verify", "--json").stdout)["results"]
    count = {check: sum(r["check"] == check for r in results) for check in {r["check"] for r in results}}
    assert count["alone"] == 3
    assert count["pair"] == 3
    assert count["all together"] == 1
    assert count["pre-image"] == 4
    assert count["git apply agrees"] == count["patch agrees"] == 4
    table = patched.cli("verify")
    assert table.returncode == 0
    assert "all together" in table.stdout
    assert "passed" in table.stdout


def test_verify_finds_files_that_do_not_belong(patched: Sandbox) -> None:
    (patched.lane / "stray.patch").write_text("x\n")
    assert failures(patched) == [
        (
            "files and series agree",
            "stray.patch",
            f"{patched.lane / 'stray.patch'} is not in the series: list it, or remove it",
        )
    ]


def test_verify_finds_duplicates(patched: Sandbox) -> None:
    patched.add("again", {PATH: {1: "    return 'a'"}})
    assert ("no duplicates", "a, again", "both patches insert the same lines") in failures(patched)


def test_verify_finds_an_edited_upstream(patched: Sandbox) -> None:
    (patched.site / PATH).write_text(FILES[PATH] + "# edited\n")
    found = failures(patched)
    assert {(check, subject) for check, subject, _ in found} >= {
        ("pre-image", f"a: {PATH}"),
        ("pre-image", f"b: {PATH}"),
    }
    assert "expected " in found[0][2]


def test_verify_finds_lines_that_do_not_compile(sandbox: Sandbox) -> None:
    sandbox.add("one", {PATH: {3: "if True:"}})
    found = failures(sandbox)
    assert [(check, subject) for check, subject, _ in found] == [("alone", "one"), ("all together", "one")]
    assert found[0][2].startswith(f"{PATH} does not compile: ")


def test_verify_finds_patches_that_only_fail_together(sandbox: Sandbox) -> None:
    sandbox.add("one", {PATH: {0: "ONE = 1"}})
    sandbox.add("two", {PATH: {0: "from __future__ import annotations"}})
    found = failures(sandbox)
    assert [(check, subject) for check, subject, _ in found] == [("pair", "one + two"), ("all together", "one + two")]
    assert "from __future__ imports must occur at the beginning" in found[0][2]


def test_verify_finds_what_upstream_has_already(sandbox: Sandbox) -> None:
    sandbox.add("p", {PATH: {3: "# p"}}, f"Default: on\nAdds: {PATH} two\nAdds: {PATH} three\n")
    problem = "sglang 0.5.23 has it: the patch adds nothing there"
    assert failures(sandbox) == [("upstream lacks what it adds", f"p: {PATH} two", problem)]


def test_verify_tries_pairs_with_what_they_require(sandbox: Sandbox) -> None:
    sandbox.add("one", {PATH: {3: "if True:\n    pass"}})
    sandbox.add("two", {PATH: {3: "else:\n    pass"}}, "Default: off\nRequires: one\n")
    sandbox.add("foe", {PATH: {3: "else:\n    pass"}}, "Default: off\nRequires: one\nConflicts: two\n")
    assert failures(sandbox) == [("no duplicates", "two, foe", "both patches insert the same lines")]


def test_verify_lints_headers(sandbox: Sandbox) -> None:
    late = (date.today() + timedelta(days=3)).isoformat()
    header = "Default: on\nRequires: later, gone\nProvides: torch = no_such_package\n"
    file = sandbox.add("bad", {PATH: {3: "# TODO is fine here"}}, header)
    text = file.read_text().replace("Why: ours", "Why: because").replace("never", "TODO").replace("2026-01-31", late)
    file.write_text(text.replace("Test patch bad", "x" * 101).replace("not-needed", "maybe"))
    sandbox.add("later", {PATH: {3: "# later"}}, "Default: on\n")
    (problem,) = [problem for check, _, problem in failures(sandbox) if check == "header"]
    for part in (
        "a TODO is left",
        "the first line of Description has 101 characters",
        "Why is 'because', expected 'ours'",
        f"Last-Update {late} is in the future",
        "Forwarded is 'maybe'",
        "requires later, which comes later in the series",
        "names 'gone' in Requires or Conflicts, which is no other patch",
        "provides torch, expected one of sglang, sgl_kernel",
        "provides torch as no_such_package, which is not installed",
    ):
        assert part in problem


def test_verify_wants_a_link_for_what_is_temporary(sandbox: Sandbox) -> None:
    file = sandbox.add("temp", {PATH: {3: "# x"}})
    file.write_text(file.read_text().replace("Why: ours", "Why: temporary until upstream: soon"))
    assert failures(sandbox) == [("header", "temp", "Why is 'temporary until upstream' without a link")]
    file.write_text(file.read_text().replace("soon", "https://example.org/pull/1"))
    assert failures(sandbox) == []


def test_verify_finds_missing_runtime_code(sandbox: Sandbox) -> None:
    sandbox.add("ghost", {PATH: {3: "from sglang_patches.runtime import ghost"}})
    sandbox.add("thief", {PATH: {4: "from sglang_patches.runtime.provenance import x"}})
    found = [entry for entry in failures(sandbox) if entry[0] == "runtime code"]
    assert found == [
        ("runtime code", "ghost", "imports sglang_patches.runtime.ghost, which does not exist"),
        ("runtime code", "thief", "imports sglang_patches.runtime.provenance, the module of another patch"),
    ]


def test_verify_finds_a_patch_that_its_re_export_changes(patched: Sandbox) -> None:
    file = patched.lane / "a.patch"
    file.write_text(file.read_text().replace("@@ -1,0 +2 @@", "@@ -1,0 +2,1 @@"))
    assert failures(patched) == [
        ("re-export is a no-op", "a", "the file differs from its re-export; run: sglang-patches refresh a")
    ]
    assert patched.cli("refresh", "a").stdout == f"{file}: written\n"
    assert failures(patched) == []


def test_verify_reports_a_corrupt_patch(patched: Sandbox) -> None:
    file = patched.lane / "a.patch"
    file.write_text(file.read_text().replace("+    return", "-    return"))
    done = patched.cli("verify")
    assert done.returncode == 1
    assert "corrupt patch: the hunk announces 1 added lines and has 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_list_shows_what_is_on(patched: Sandbox) -> None:
    rows = json.loads(patched.cli("list", "--json", selection="off").stdout)
    assert [(row["name"], row["default"], row["on"]) for row in rows] == [
        ("a", "on", False), ("b", "on", False), ("off", "off", True),
    ]  # fmt: skip
    text = words(patched.cli("list").stdout)
    for word in ("a", "b", "off", "on", "ours", "srt/one.py", "launch.py", "Default"):
        assert word in text


def test_show_prints_context_from_the_installed_upstream(patched: Sandbox) -> None:
    shown = patched.cli("show", "b").stdout
    assert shown.startswith("Description: Test patch b\n")
    assert shown.endswith(
        lines(
            "--- a/sglang/launch.py",
            "+++ b/sglang/launch.py",
            "@@ -1,5 +1,6 @@",
            " import sys",
            " ",
            " WORDS = ['upstream']",
            "+WORDS.append('b')",
            " if __name__ == '__main__':",
            "     print(*WORDS, *sys.argv[1:])",
            f"--- a/{PATH}",
            f"+++ b/{PATH}",
            "@@ -1,6 +1,8 @@",
            "+B = 'b'",
            " def one():",
            "     return 1",
            " ",
            " ",
            " def two():",
            "+    return 'b'",
            "     return 2",
            "",
        )
    )


def test_status(patched: Sandbox) -> None:
    done = patched.cli("status", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["release"] == "0.5.23"
    assert document["active"]
    assert [(p["name"], p["state"]) for p in document["patches"]] == [
        ("a", "applied"),
        ("b", "applied"),
        ("off", "off"),
    ]
    code = "from sglang_patches.provenance import code_state; print(code_state()['id'])"
    assert document["id"] == patched.run("-c", code).stdout.strip()
    assert {"applied", "off", document["id"]} <= set(words(patched.cli("status").stdout))


def test_status_tells_a_mismatch_and_none(patched: Sandbox) -> None:
    (patched.site / "sglang/launch.py").write_text("# edited\n")
    done = patched.cli("status", "--json")
    states = {p["name"]: (p["state"], p["detail"]) for p in json.loads(done.stdout)["patches"]}
    assert done.returncode == 1
    assert states["b"] == ("mismatch", "differs from the pre-image: sglang/launch.py")
    assert states["a"] == ("applied", "")
    none = patched.cli("status", "--json", selection="none")
    assert {p["state"] for p in json.loads(none.stdout)["patches"]} == {"off"}
    assert none.returncode == 0


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_bad_selection_is_an_error_without_a_traceback(patched: Sandbox, command: str) -> None:
    done = patched.cli(command, selection="typo")
    assert done.returncode == 2
    assert done.stderr.startswith("sglang-patches: unknown patch: typo\n  known      a, b, off ")
    assert "Traceback" not in done.stderr


def test_build_writes_a_tree_that_runs_without_the_engine(patched: Sandbox, tmp_path: Path) -> None:
    target = tmp_path / "tree"
    done = patched.cli("build", str(target))
    assert done.returncode == 0, done.stderr
    state = json.loads((target / "sglang-patches.json").read_text())
    assert state["id"] in done.stdout
    code = "import sglang.srt.one as m; print(m.one(), m.B, m.__file__)"
    run = patched.run("-c", code, selection="none", PYTHONPATH=str(target))
    assert run.stdout == f"a b {target / PATH}\n"
    for path, text in FILES.items():
        if path not in (PATH, "sglang/launch.py"):
            assert (target / path).read_text() == text
    assert "is not empty" in patched.cli("build", str(target)).stderr


def test_edit_and_refresh(patched: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    before = (patched.lane / "b.patch").read_bytes()
    assert patched.cli("edit", "b", str(tree), "--file", "sglang/srt/data.py").returncode == 0
    assert (tree / PATH).read_text() == "B = 'b'\n" + FILES[PATH].replace(
        "    return 2", "    return 'b'\n    return 2"
    )
    assert (tree / "sglang/srt/data.py").read_text() == FILES["sglang/srt/data.py"]
    assert patched.cli("refresh", "b", str(tree)).stdout == "b: unchanged\n"
    assert (patched.lane / "b.patch").read_bytes() == before

    (tree / "sglang/srt/data.py").write_text("EXTRA = 1\n" + FILES["sglang/srt/data.py"])
    (tree / PATH).write_text((tree / PATH).read_text().replace("B = 'b'\n", "B = 'c'\n"))
    assert patched.cli("refresh", "b", str(tree)).stdout == f"{patched.lane / 'b.patch'}: written\n"
    assert failures(patched) == []
    code = "import sglang.srt.one as m; print(m.B, m.two())"
    assert patched.run("-c", code, selection="b").stdout == "c b\n"


def test_refresh_refuses_a_changed_upstream_line(patched: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    patched.cli("edit", "a", str(tree))
    (tree / PATH).write_text((tree / PATH).read_text().replace("return 2", "return 3"))
    done = patched.cli("refresh", "a", str(tree))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"sglang-patches: {PATH}:6: an upstream line was changed or removed: 'return 2'\n  expected   added lines only"
    )
    assert failures(patched) == []


def test_new_patch_from_nothing(patched: Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    done = patched.cli("new", "fresh", str(tree), "sglang/srt/data.py")
    assert done.returncode == 0, done.stderr
    assert "refresh fresh" in done.stdout
    assert "no line was added" in patched.cli("refresh", "fresh", str(tree)).stderr
    with (tree / "sglang/srt/data.py").open("a") as file:
        file.write("FRESH = True\n")
    assert patched.cli("refresh", "fresh", str(tree)).returncode == 0
    assert [entry[:2] for entry in failures(patched)] == [("header", "fresh")]  # its TODOs
    header = (tree / "header").read_text()
    for old, new in (
        ("TODO what fresh changes, in one line", "Fresh"),
        (" TODO the rest of it, indented by one space.\n", ""),
        ("TODO temporary until upstream: URL | cannot go upstream: REASON | ours", "ours"),
        ("Remove-When: TODO", "Remove-When: never"),
    ):
        assert old in header
        header = header.replace(old, new)
    (tree / "header").write_text(header)
    assert patched.cli("refresh", "fresh", str(tree)).returncode == 0
    assert failures(patched) == []
    assert (patched.lane / "series").read_text().endswith("off.patch\nfresh.patch\n")
    done = patched.run("-c", "import sglang.srt.data as d; print(d.FRESH)", selection="fresh")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["edit", "typo", "TREE"], "unknown patch: typo"),
        (["show", "typo"], "unknown patch: typo"),
        (["refresh", "typo"], "unknown patch: typo"),
        (["new", "a", "TREE", PATH], "a exists"),
        (["new", "Bad_Name", "TREE", PATH], "'Bad_Name' is not a name for a patch"),
        (["new", "c", "TREE", "sglang/gone.py"], "sglang 0.5.23 has no file sglang/gone.py"),
        (["new", "c", "TREE", "../../etc/passwd"], "sglang 0.5.23 has no file ../../etc/passwd"),
        (["edit", "a", "FULL"], "is not empty"),
        (["refresh", "a", "MISSING"], "no such folder"),
        (["refresh", "a", "BUILT"], "give the folder that edit or new wrote"),
        (["build", "FILE"], "is a file"),
        (["build", "/proc/none"], "/proc/none"),
    ],
)
def test_user_errors(patched: Sandbox, tmp_path: Path, arguments: list[str], problem: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "built" / "deep" / "sglang").mkdir(parents=True)
    (tmp_path / "built" / "deep" / "sglang" / "__init__.py").write_text("")
    (tmp_path / "file").write_text("")
    places = {name.upper(): str(tmp_path / name) for name in ("tree", "full", "missing", "built", "file")}
    done = patched.cli(*(places.get(argument, argument) for argument in arguments))
    assert done.returncode == 2
    assert problem in done.stderr
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_console_script_explains_itself() -> None:
    script = Path(sys.executable).with_name("sglang-patches")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for word in (
        "SGLANG_PATCHES",
        "list",
        "show",
        "status",
        "verify",
        "build",
        "new",
        "edit",
        "refresh",
        "port",
        "stop",
        "nccl",
    ):
        assert word in done.stdout


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    """As with `sglang-patches list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sglang_patches.cli", "list", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""
