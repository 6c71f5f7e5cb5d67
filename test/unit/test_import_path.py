"""The folder that a server is started from, and PYTHONPATH: no module comes from where another user can put one."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_patches import import_path, serve
from sglang_patches.bench.verify_step.arguments import Chosen
from sglang_patches.cli import app

from .sandbox import Sandbox

PATH = "sglang/srt/one.py"
TINY = Path(__file__).parents[1] / "models/tiny-kimi"
# Stands for upstream's server: which `planted` it and the processes that it starts would load.
SERVER = """
import json, multiprocessing, subprocess, sys
from importlib.util import find_spec

def told(put):
    put.put(bool(find_spec("planted")))

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn")
    queue = worker.SimpleQueue()
    process = worker.Process(target=told, args=(queue,))
    process.start()
    seen = {"server": bool(find_spec("planted")), "worker": queue.get()}
    process.join()
    code = "from importlib.util import find_spec; print(bool(find_spec('planted')))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(json.dumps(seen | {"child": child.stdout.strip() == "True"}))
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that every user can write to, with a module of another one's."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "planted.py").write_text("")
    folder.chmod(0o777)
    return folder


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    return package.parent


@pytest.mark.parametrize(
    ("given", "loads"),
    [
        ({}, False),
        ({"PYTHONPATH": "SITE:"}, False),
        # Why all this, and that these processes would load it: the other cases would pass if nothing were planted.
        ({"PYTHONSAFEPATH": ""}, True),
    ],
)
def test_the_folder_a_server_is_started_from(shared: Path, upstream: Path, given: dict[str, str], loads: bool) -> None:
    site = given.get("PYTHONPATH", "SITE").replace("SITE", str(upstream))
    environ = {"PATH": os.environ["PATH"], "SGLANG_PATCHES": "none", **given, "PYTHONPATH": site}
    plan = serve.plan(str(TINY), "", 1, 29419, [], cuda=False, environ=environ)
    done = subprocess.run(plan.argv, env=plan.env, cwd=shared, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(("server", "worker", "child"), loads)
    assert any("PYTHON" in note for note in plan.notes) == bool(given)


def test_settle() -> None:
    environ = {"PYTHONPATH": "/a::/b:"}
    assert "empty entry" in import_path.settle(environ)[0]
    assert environ == {"PYTHONPATH": "/a:/b", "PYTHONSAFEPATH": "1"}
    assert import_path.settle(environ) == []
    for none in ({}, {"PYTHONPATH": ""}):
        environ = dict(none)
        assert import_path.settle(environ) == []
        assert environ == {**none, "PYTHONSAFEPATH": "1"}


def test_the_engines_of_verify_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a:")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    environ = Chosen(TINY, TINY, dummy=False, cuda=True, grid=None).environment()  # type: ignore[arg-type]
    assert (environ["PYTHONPATH"], environ["PYTHONSAFEPATH"]) == ("/a", "1")


def test_exposed(shared: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    reason = f"every user can write to {shared} (mode 0777)"
    assert import_path.exposed({}, str(shared)) == {str(shared): reason}
    assert import_path.exposed({"PYTHONSAFEPATH": "1"}, str(shared)) == {}
    assert import_path.exposed({}, str(own)) == {}
    # Named, relative, and empty: all of them are looked through, whatever PYTHONSAFEPATH is.
    for entry in (str(shared), "../shared", ""):
        where = shared if entry == "" else own
        found = import_path.exposed({"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{own}:{entry}"}, str(where))
        assert found == {str(shared): reason}, entry
    assert import_path.exposed({"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}, str(shared)) == {}
    assert import_path.exposed({}) == import_path.exposed({}, os.getcwd())
    # Not there yet: whoever can write to the folder above makes it.
    assert import_path.exposed({"PYTHONPATH": f"{shared}/new"}, str(own)) == {f"{shared}/new": reason}


def test_a_current_folder_that_is_gone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = shared / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert import_path.exposed({}) == {}
    assert str(gone) not in import_path.of_this_process()


def test_status_and_doctor_say_so(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    done = CliRunner().invoke(app, ["status"])
    assert f"looks for modules in {shared} first" in " ".join(done.output.split()), done.output
    assert str(shared) in json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["import_path"]
    from sglang_patches.doctor import read
    from sglang_patches.doctor.checks import process
    from sglang_patches.doctor.host import Serving

    monkeypatch.setattr(read, "probe", lambda _: {})
    (found,) = process.import_path(read.read(Serving()))
    assert (found.level, f"{shared} first" in found.seen) == ("warning", True)
    (found,) = process.import_path(read.read(Serving(), {"PYTHONSAFEPATH": "1"}))
    assert found.level == "ok"


def test_a_server_started_by_hand_says_so_once(sandbox: Sandbox, shared: Path) -> None:
    """Not by the processes that it spawns, which have the same path."""
    sandbox.add("p", {PATH: {1: "    return 'patched'"}})
    (sandbox.site / "sglang/by_hand.py").write_text(
        "import multiprocessing\nfrom sglang.srt.one import one\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print, args=(one(),))\n"
        "    worker.start(); worker.join()\n"
    )

    def said(folder: Path, **more: str) -> list[str]:
        environ = sandbox.environment(**more)
        line = [sys.executable, "-m", "sglang.by_hand"]
        done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
        assert done.stdout == "patched\n", done.stderr
        return [line for line in done.stderr.splitlines() if "modules are looked for" in line]

    (line,) = said(shared)
    assert f"in {shared} first, and every user can write to {shared}" in line
    assert said(shared, PYTHONSAFEPATH="1") == []
    assert said(sandbox.root) == []
    shared.chmod(stat.S_IMODE(0o755))
    assert said(shared) == []


def test_what_we_start_besides_servers_too() -> None:
    """Which get it from their environment, so that what they start has it."""
    package = Path(import_path.__file__).parent
    started: dict[str, list[str]] = {}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List) and len(node.elts) > 1 and ast.unparse(node.elts[0]) == "sys.executable":
                started.setdefault(ast.unparse(node.elts[1]).strip("'"), []).append(file.name)
    assert len(started.pop("-P")) >= 5
    assert started == {"-m": ["serve.py"]}
    root = package.parents[1]
    assert re.search(r"^ENV (.*\\\n)* +PYTHONSAFEPATH=1 ", (root / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert "python -P -m sglang_patches.serve" in (root / "Makefile").read_text()
