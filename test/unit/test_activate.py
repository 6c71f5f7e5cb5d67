"""Whole interpreters: what they load, and what makes them stop."""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from .sandbox import FILES, Sandbox, lines, message

PATH = "sglang/srt/one.py"
ONE = "from sglang.srt.one import one; print(one())"
NOTEBOOK = """
from code import InteractiveInterpreter
shell = InteractiveInterpreter()
shell.runsource("import sglang.srt.one as m")
shell.runsource("print(m.one(), m.__file__)")
"""


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    """`a` makes one() return 'a', `b` sets a value at the same line, `launch` patches a module that is run."""
    sandbox.add("a", {PATH: {1: "    return 'a'"}})
    sandbox.add("b", {PATH: {0: "B = 'b'", 1: "    return 'b'"}}, "Default: off\n")
    sandbox.add("launch", {"sglang/launch.py": {3: "WORDS.append('patched')"}})
    return sandbox


@pytest.mark.parametrize(
    ("selection", "expected"), [(None, "a"), ("none", "1"), ("b", "b"), ("b,a", "a"), ("all", "a"), ("none,+b", "b")]
)
def test_the_selected_lines_run(patched: Sandbox, selection: str | None, expected: str) -> None:
    done = patched.run("-c", ONE, selection=selection)
    assert done.stdout == f"{expected}\n", done.stderr


def test_none_is_absent(patched: Sandbox) -> None:
    """With `none` the meta path is that of an interpreter without us, and every module upstream's file."""
    code = (
        "import sys, json; path = [getattr(f, '__name__', type(f).__name__) for f in sys.meta_path]\n"
        "import sglang, sglang.srt.one, sglang.launch\n"
        "found = {n: getattr(m, '__file__', None) for n, m in sys.modules.items() if n.startswith('sglang.')}\n"
        "files = {n: f for n, f in found.items() if f}\n"
        "print(json.dumps([path, files, sorted(n for n in sys.modules if n.startswith('sglang_patches.'))]))"
    )
    path, files, ours = json.loads(patched.run("-c", code, selection="none").stdout)
    plain = patched.run(
        "-S", "-c", "import sys; print(*(getattr(f, '__name__', type(f).__name__) for f in sys.meta_path))"
    )
    assert [name for name in path if name != "DistutilsMetaFinder"] == plain.stdout.split()
    assert set(files) >= {"sglang.srt.one", "sglang.launch"}
    for name in files:
        assert Path(files[name]).is_relative_to(patched.site)
        assert Path(files[name]).read_text() == FILES[str(Path(files[name]).relative_to(patched.site))]
    assert set(ours) <= {"sglang_patches.activate"}
    assert not patched.cache.exists()


def test_untouched_modules_are_upstreams_own(patched: Sandbox) -> None:
    code = (
        "import sglang.srt.one as o, sglang.srt.pack.inner as i, sglang as s; print(o.__file__, i.__file__, s.__file__)"
    )
    one, inner, top = patched.run("-c", code).stdout.split()
    assert Path(one).is_relative_to(patched.cache)
    assert one.endswith("/sglang/srt/one.py")
    assert Path(inner) == patched.site / "sglang/srt/pack/inner.py"
    assert Path(top) == patched.site / "sglang/__init__.py"


def test_the_copy_is_a_plain_file_to_tracebacks_inspect_and_bytecode(patched: Sandbox) -> None:
    code = (
        "import inspect, sglang.srt.one as m\n"
        "print(inspect.getsource(m.one)); print(m.__cached__); print(type(m.__loader__).__mro__[1].__name__)\n"
        "m.one.__code__ = m.one.__code__.replace(); exec('def f(): m.one(1)'); f()"
    )
    done = patched.run("-c", code)
    (copy,) = patched.copies()
    assert "def one():\n    return 'a'\n    return 1\n" in done.stdout
    assert str(copy.parent / "__pycache__") in done.stdout
    assert "SourceFileLoader" in done.stdout
    assert list((copy.parent / "__pycache__").iterdir())
    broken = patched.add("broken", {PATH: {5: "    raise ValueError('here')"}})
    done = patched.run("-c", "from sglang.srt.one import two; two()")
    assert "one.py\", line 7, in two\n    raise ValueError('here')" in done.stderr
    assert str(patched.cache) in done.stderr
    assert broken.exists()


def test_packages_stay_packages(sandbox: Sandbox) -> None:
    sandbox.add("pack", {"sglang/srt/pack/__init__.py": {1: "PATCHED = True"}, "sglang/__init__.py": {1: "TOP = True"}})
    code = (
        "import sglang; from sglang.srt import pack; print(pack.PATCHED, pack.inner.VALUE, sglang.TOP, *pack.__path__)"
    )
    expected = f"True inner True {sandbox.site / 'sglang/srt/pack'}\n"
    done = sandbox.run("-c", code)
    assert done.stdout == expected, done.stderr


@pytest.mark.parametrize(("selection", "expected"), [(None, "upstream patched 7\n"), ("none", "upstream 7\n")])
def test_runs_as_a_module(patched: Sandbox, selection: str | None, expected: str) -> None:
    assert patched.run("-m", "sglang.launch", "7", selection=selection).stdout == expected


def test_spawned_workers(patched: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing\n"
        "def work(_):\n    from sglang.srt.one import one\n    return one()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n        print(*pool.map(work, range(4)))\n"
    )
    assert patched.run(str(script)).stdout == "a a a a\n"
    assert patched.run(str(script), selection="none").stdout == "1 1 1 1\n"


def test_notebook_like_import(patched: Sandbox) -> None:
    result, file = patched.run("-c", NOTEBOOK).stdout.split()
    assert (result, Path(file)) == ("a", patched.copies()[0])


def test_ipython(patched: Sandbox) -> None:
    pytest.importorskip("IPython")
    done = patched.run("-m", "IPython", "--quick", "--colors=NoColor", "-c", ONE, HOME=str(patched.root))
    assert done.stdout.strip().endswith("a"), done.stderr


def test_says_the_patch_set_once(patched: Sandbox) -> None:
    code = (
        "import sglang.srt.one, sglang.launch, json\n"
        "from sglang_patches.provenance import code_state, loaded_files\n"
        "print(json.dumps([code_state(), loaded_files()]))"
    )
    done = patched.run("-c", code)
    state, files = json.loads(done.stdout)
    (line,) = [entry for entry in done.stderr.splitlines() if "patch set" in entry]
    assert f"patch set {state['id']} on sglang 0.5.23, pid " in line
    assert line.endswith(": a, launch")
    assert state["active"]
    assert [patch["name"] for patch in state["patches"]] == ["a", "launch"]
    (copy,) = [(file, digest) for module, file, digest in files if module == "sglang.srt.one"]
    assert copy == (str(Path(copy[0])), sha256(Path(copy[0]).read_bytes()).hexdigest())
    assert "patch set" not in patched.run("-c", "import sglang").stderr


def test_logs_through_the_applications_handlers(patched: Sandbox) -> None:
    setup = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='APP %(message)s'); "
    )
    done = patched.run("-c", setup + "import sglang.srt.one, logging; print(logging.getLogger('sglang_patches').level)")
    assert done.stdout.startswith("APP patch set ")
    assert done.stdout.endswith("\n0\n")
    assert done.stderr == ""


def test_the_patch_set_id_tells_code_states_apart(patched: Sandbox) -> None:
    code = "from sglang_patches.provenance import code_state; print(code_state()['id'])"
    ids = {
        selection: patched.run("-c", code, selection=selection).stdout
        for selection in ("none", "a", "b", "a,b", "b,a", "all")
    }
    assert ids.pop("b,a") == ids["a,b"]
    assert len(set(ids.values())) == len(ids)
    patch = patched.lane / "a.patch"
    patch.write_text(patch.read_text().replace("'a'", "'A'"))
    assert patched.run("-c", code, selection="a").stdout not in ids.values()


def test_a_bad_selection_stops_only_processes_that_import_upstream(patched: Sandbox) -> None:
    fine = patched.run("-c", "import json; print('fine')", selection="typo")
    assert (fine.stdout, fine.stderr, fine.returncode) == ("fine\n", "", 0)
    probe = "import importlib.util as u; print(u.find_spec('sglang') is not None)"
    assert patched.run("-c", probe, selection="typo").stdout == "True\n"
    for arguments in (["-c", "import sglang"], ["-m", "sglang.launch"], ["-c", ONE]):
        done = patched.run(*arguments, selection="typo")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == lines(
            "sglang-patches: unknown patch: typo",
            "  known      a, b, launch (release 0.5.23)",
            "  remedy     correct the name; `sglang-patches list` shows what each patch does",
            "",
        )


def test_except_exception_does_not_keep_a_refused_process_alive(patched: Sandbox) -> None:
    code = "try:\n    import sglang\nexcept Exception:\n    pass\nprint('alive')"
    done = patched.run("-c", code, selection="typo")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_refusal_in_a_thread_is_heard(patched: Sandbox) -> None:
    code = "import threading; t = threading.Thread(target=lambda: __import__('sglang')); t.start(); t.join()"
    assert "unknown patch: typo" in patched.run("-c", code, selection="typo").stderr


def test_refuses_a_wrong_release(patched: Sandbox) -> None:
    (patched.site / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    done = patched.run("-c", "import sglang")
    assert (done.returncode, message(done)) == (
        1,
        lines(
            "sglang-patches: no patches for SGLang 0.5.22",
            "  installed  sglang 0.5.22",
            f"  lanes      0.5.23 (in {patched.lane.parent})",
            "  remedy     install a release with a lane: pip install 'sglang==0.5.23'; "
            "carry the patches to this one: sglang-patches port --to 0.5.22; "
            "or run upstream without patches: SGLANG_PATCHES=none",
        ),
    )
    assert patched.run("-c", ONE, selection="none").stdout == "1\n"


def test_reads_the_release_from_dist_info_where_the_package_has_none(patched: Sandbox) -> None:
    (patched.site / "sglang/_version.py").unlink()
    done = patched.run("-c", "import sglang")
    assert "cannot tell which SGLang release is installed" in message(done)
    (patched.site / "sglang-0.5.23.dist-info").mkdir()
    assert patched.run("-c", ONE).stdout == "a\n"


def test_refuses_a_locally_edited_file(patched: Sandbox) -> None:
    file = patched.site / PATH
    expected = sha256(file.read_bytes()).hexdigest()
    file.write_text(file.read_text() + "# edited\n")
    found = sha256(file.read_bytes()).hexdigest()
    done = patched.run("-c", "import sglang")
    assert (done.returncode, message(done)) == (
        1,
        lines(
            f"sglang-patches: {PATH} is not the file that patch a was made against, so nothing was patched",
            f"  file       {file}",
            f"  expected   {expected}  (pinned: sglang 0.5.23)",
            f"  found      {found}  (installed: sglang 0.5.23)",
            "  remedy     restore upstream: pip install --force-reinstall --no-deps sglang==0.5.23; "
            "or run without patches: SGLANG_PATCHES=none; `sglang-patches status` shows every patch",
        ),
    )
    assert not patched.cache.exists()
    assert patched.run("-c", ONE, selection="none").stdout == "1\n"
    assert patched.run("-m", "sglang.launch", selection="launch").stdout == "upstream patched\n"


def test_refuses_a_file_edited_while_the_process_runs(patched: Sandbox) -> None:
    code = (
        f"import sglang, pathlib; pathlib.Path({str(patched.site / PATH)!r}).write_text('def one(): return 9\\n')\n"
        "try:\n    import sglang.srt.one\nexcept Exception: print('swallowed')"
    )
    done = patched.run("-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not the file that patch a was made against" in done.stderr


def test_refuses_a_missing_upstream_file(patched: Sandbox) -> None:
    (patched.site / PATH).unlink()
    assert "  found      (no such file)  (installed: sglang 0.5.23)" in message(patched.run("-c", "import sglang"))


def test_refuses_a_corrupt_patch(patched: Sandbox) -> None:
    file = patched.lane / "a.patch"
    file.write_text(file.read_text().replace("+    return 'a'\n", ""))
    done = patched.run("-c", "import sglang")
    number = len(file.read_text().splitlines()) + 1
    assert (done.returncode, message(done)) == (
        1,
        lines(
            f"sglang-patches: {file}:{number}: corrupt patch: the hunk announces 1 added lines and has 0",
            "  seen       'end of file'",
            "  remedy     restore the file from version control, or re-export it: sglang-patches refresh NAME",
        ),
    )


def test_refuses_conflicts_and_missing_requirements(sandbox: Sandbox) -> None:
    sandbox.add("a", {PATH: {0: "# a"}})
    sandbox.add("enemy", {PATH: {0: "# b"}}, "Default: off\nConflicts: a\n")
    sandbox.add("child", {PATH: {0: "# c"}}, "Default: off\nRequires: a\n")
    conflict = sandbox.run("-c", "import sglang", selection="all")
    assert message(conflict).startswith("sglang-patches: conflicting patches: enemy cannot be on together with a\n")
    missing = sandbox.run("-c", "import sglang", selection="child")
    assert message(missing).startswith("sglang-patches: missing required patch: child needs a\n")
    assert (conflict.returncode, missing.returncode) == (1, 1)


def test_refuses_to_activate_after_the_import(patched: Sandbox) -> None:
    code = (
        "import sys, os, sglang; os.environ['SGLANG_PATCHES'] = 'a'\n"
        "from sglang_patches import activate\nactivate.install()"
    )
    done = patched.run("-c", code, selection="none")
    assert "PatchError: sglang was imported before sglang_patches.activate.install()" in done.stderr


def test_without_site_nothing_is_patched_and_status_tells(patched: Sandbox) -> None:
    path = os.pathsep.join([str(patched.site), *(entry for entry in sys.path if entry)])
    assert patched.run("-S", "-c", ONE, PYTHONPATH=path).stdout == "1\n"
    done = patched.run("-S", "-m", "sglang_patches.cli", "status", PYTHONPATH=path)
    assert done.returncode == 1
    assert "without processing sglang_patches.pth, so no patch is applied" in done.stdout


@pytest.mark.parametrize("driver", [False, True])
def test_provides_a_module_only_without_the_driver(sandbox: Sandbox, driver: bool) -> None:
    """The stand-in package is used where the driver's library does not load; the test makes one that does."""
    sandbox.add(
        "cpu",
        {PATH: {1: "    import sgl_kernel\n    return sgl_kernel.WHO"}},
        "Default: on\nProvides: sgl_kernel = spare\n",
    )
    for package, who in (("spare", "cpu"), ("sgl_kernel", "cuda")):
        (sandbox.site / package).mkdir()
        (sandbox.site / package / "__init__.py").write_text(
            f"WHO = {who!r}\nfrom . import sub\nprint('once', __name__)\n"
        )
        (sandbox.site / package / "sub.py").write_text(f"WHO = {who!r}\n")
    code = f"{ONE}; import sgl_kernel.sub as s; print(s.WHO, s.__name__)"
    libraries = {}
    if driver:
        compiler = next((c for c in ("cc", "gcc", "clang") if os.system(f"command -v {c} >/dev/null") == 0), None)
        if compiler is None:
            pytest.skip("no C compiler to make a library with")
        assert os.system(f"echo | {compiler} -shared -x c -o {sandbox.root}/libcuda.so.1 -") == 0
        libraries = {"LD_LIBRARY_PATH": str(sandbox.root)}
    done = sandbox.run("-c", code, **libraries)
    who = "cuda" if driver else "cpu"
    assert done.stdout == f"once sgl_kernel\n{who}\n{who} sgl_kernel.sub\n", done.stderr
    plain = sandbox.run("-c", "import sgl_kernel; print(sgl_kernel.WHO)", selection="none")
    assert plain.stdout == "once sgl_kernel\ncuda\n"
