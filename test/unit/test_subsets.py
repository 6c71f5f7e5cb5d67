"""Every subset of the series imports.

What a selection loads is, file by file, upstream's text with the lines of those of its patches that touch the file. So
all 2^n selections load if every file does with every subset of the patches that touch it, of which there are few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Upstream is imported once, with what it takes on a CPU; a fork of that process then loads one file anew, with the
# lines of one subset.
CODE = """
import importlib, itertools, json, logging, os, sys, traceback, types, warnings
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
from sglang_patches import hunks, overlay, upstream
from sglang_patches.series import load

installed = upstream.locate()
series = load(installed.release)
touched = {}
for patch in series.patches:
    for path in patch.touches:
        touched.setdefault(path, []).append(patch)
modules = {path: importlib.import_module(overlay.module_name(path)) for path in touched}

def loads(path, group):
    text = hunks.apply(installed.read(path), hunks.combine(p.insertions[path] for p in group), path)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ""
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            old = modules[path]
            new = types.ModuleType(old.__name__)
            new.__dict__.update({k: v for k, v in vars(old).items() if k.startswith("__")})
            sys.modules[old.__name__] = new
            exec(compile(text, str(installed.path(path)), "exec", dont_inherit=True), vars(new))
        except BaseException as error:
            said = "".join(traceback.format_exception(error))[-600:] or type(error).__name__
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitpid(pid, 0)[1]
    return said or (f"ended with status {status}" if status else "")

found = {}
for path, patches in touched.items():
    for size in range(len(patches) + 1):
        for group in itertools.combinations(patches, size):
            found[f"{path}: {' + '.join(p.name for p in group) or 'upstream'}"] = loads(path, group)
if len(sys.argv) > 1:
    path, text = sys.argv[1:]
    broken = hunks.Insertion(0, (text.encode(),))
    found["broken"] = loads(path, [types.SimpleNamespace(insertions={path: (broken,)})])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """File and subset -> what went wrong, empty if nothing did; and one of a patch that is broken."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"SGLANG_PATCHES": "cpu-eagle3,torch-native-mla", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    code = tmp_path_factory.mktemp("subsets") / "load.py"
    code.write_text(CODE)
    command = [sys.executable, str(code), "sglang/srt/models/kimi_k25.py", "import sglang_patches.not_there"]
    repo = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=repo, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_file_imports_with_every_subset_of_its_patches(loaded: dict[str, str]) -> None:
    assert len(loaded) > 60
    assert {what: said for what, said in loaded.items() if said and what != "broken"} == {}


def test_a_patch_that_cannot_be_imported_is_seen(loaded: dict[str, str]) -> None:
    assert "No module named 'sglang_patches.not_there'" in loaded["broken"]
