"""The commands of README.md and docs/ that ask a server (`<!-- needs: a server -->`), as they stand there, of one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documentation import commands
from documentation.commands import Command

from .server import REPO, Server

# What the pages call the server and its model.
ADDRESS = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):30000")
# Programs that ask nothing and print nothing.
QUIET = ("", ":", ".")
ASKING = [
    command
    for page in commands.pages()
    for command in commands.read(page).commands
    if any(marker.what == "a server" for marker in commands.applying(command))
]


def test_there_are_some() -> None:
    assert len(ASKING) >= 5


@pytest.mark.parametrize("command", ASKING, ids=lambda command: command.where)
def test_command(command: Command, spec_server: Server, tmp_path: Path) -> None:
    # Where the pages keep the API key. This server has none and takes any.
    (tmp_path / "sglang-api-key").write_text("unused\n")
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
    text = ADDRESS.sub(spec_server.url, command.text).replace(". .venv/bin/activate", ":")
    if not all(stage.program in QUIET for stage in command.stages):
        assert spec_server.url in text, f"{command.where} names no server: add --url http://127.0.0.1:30000"
    if shutil.which("jq") is None:  # then what the server answers is looked at, and the filter is not
        text = re.sub(r"\| jq '.*'", "| python -m json.tool", text)
    text = re.sub(r"> (\w[\w.]*)", rf"> {tmp_path}/\1", text).replace("--out ", f"--out {tmp_path}/")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=REPO, env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, f"{command.where}: {done.stdout}{done.stderr}"
    if all(stage.program in QUIET for stage in command.stages):
        return
    assert done.stdout.strip() not in ("", "null"), f"{command.where} prints nothing: {done.stderr}"
    if done.stdout.startswith("{"):
        answer = json.loads(done.stdout)
        assert int(answer.get("code") or 0) < 500, f"{command.where}: {done.stdout}"
