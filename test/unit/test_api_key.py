"""The API key reaches upstream, and neither a command line, a printed line nor the environment of its children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_patches import api_key, launch, serve
from sglang_patches.bench.server import free_port
from sglang_patches.document import secrets
from sglang_patches.errors import PatchError
from sglang_patches.upstream import locate

KEY = "kimi-Zq7_-sesame"
# Upstream's own reader of --config, and what a process started like its server sees.
SERVER = """
import argparse, importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("reader", sys.argv[1])
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)
parser = argparse.ArgumentParser()
parser.add_argument("--config"), parser.add_argument("--api-key"), parser.add_argument("--admin-api-key")
parser.add_argument("--model-path")
given, _ = parser.parse_known_args(reader.ConfigArgumentMerger(parser).merge_config_with_args(sys.argv[2:]))
print(json.dumps([given.api_key, given.admin_api_key, open("/proc/self/cmdline").read(), sorted(os.environ.values())]))
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No keys of the person who runs the tests, and a cache of one's own."""
    for variable in api_key.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(f"{variable}_FILE", raising=False)
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe that asks for a key."""
    file = tmp_path / "mine.yaml"
    content = {"description": "x", "model": "test/models/tiny-kimi", "device": "cpu", "requires_api_key": True}
    file.write_text(yaml.safe_dump(content))
    return str(file)


def reader() -> str:
    upstream = locate()
    assert upstream is not None
    return upstream.path("sglang/srt/utils/server_args_config_parser.py")


def served(recipe: str, *line: str) -> tuple[Any, ...]:
    """What a server gets that `launch` becomes: upstream's reader run with its command line and environment."""
    code = f"from sglang_patches import launch; launch.run({recipe!r}, {list(line)!r}, False, False, execute)"
    execute = (
        "import os, sys\n"
        "def execute(program, argv, env):\n"
        f"    os.execvpe(sys.executable, [sys.executable, '-c', {SERVER!r}, {reader()!r}, *argv[3:]], env)\n"
    )
    done = subprocess.run([sys.executable, "-c", execute + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *printed, answer = done.stdout.splitlines()
    return (*json.loads(answer), "\n".join(printed) + done.stderr)


def test_a_key_of_the_environment(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("admin-Zq7\n")
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY_FILE", str(tmp_path / "admin"))
    key, admin, line, environment, printed = served(recipe)
    assert (key, admin) == (KEY, "admin-Zq7")
    assert "--model-path" in line
    for shown in (line, printed, "".join(environment)):
        assert KEY not in shown
        assert "admin-Zq7" not in shown
    assert f"api-key from SGLANG_API_KEY, admin-api-key from SGLANG_ADMIN_API_KEY_FILE={tmp_path}/admin" in printed
    assert not [file for file in (tmp_path / "cache").rglob("*") if not file.is_symlink()], "nothing on disk"


def test_a_key_on_the_line_wins_and_leaves_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "another")
    key, _, line, _, printed = served(recipe, "--api-key", KEY)
    assert key == KEY
    assert KEY not in line + printed


def test_a_cache_that_cannot_be_used_is_no_obstacle(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in the image, whose cache is read-only."""
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("SGLANG_API_KEY", "12345")  # of digits, and still text
    assert served(recipe)[0] == "12345"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_the_link_is_in_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could make it lead to arguments of their own."""
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    link = Path(api_key.hand_over({"--api-key": KEY})[1])
    assert link.parent == tmp_path / "home" / "sglang-patches"
    assert yaml.safe_load(link.read_text()) == {"api-key": KEY}
    (tmp_path / "home").chmod(0o777)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "open"))
    with pytest.raises(PatchError, match=r"(?s)cannot be handed over.*uid 12345.*/home.*/open"):
        api_key.hand_over({"--api-key": KEY})


def test_the_temporary_folder_of_the_link_has_no_name_that_can_be_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / f"keys-{os.getpid()}").write_text("another user was first")
    link = Path(api_key.hand_over({"--api-key": KEY})[1])
    assert link.parent.parent == tmp_path / "tmp"
    assert link.parent.stat().st_mode & 0o777 == 0o700
    assert yaml.safe_load(link.read_text()) == {"api-key": KEY}


def run(recipe: str, *line: str, dry_run: bool = False) -> list[str]:
    executed: list[str] = []
    launch.run(recipe, line, dry_run, False, lambda _, argv, env: executed.extend(argv))
    return executed


def test_without_a_key_nothing_starts(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PatchError, match=r"(?s)serves with an API key, and there is none.*SGLANG_API_KEY_FILE"):
        run(recipe)
    assert run(recipe, dry_run=True) == []
    assert "would not start" in capsys.readouterr().out
    assert "--config" not in run(recipe, "--api-key=")
    assert "everybody who reaches the port" in capsys.readouterr().out


def test_the_recipes_for_eight_gpus_ask_for_a_key() -> None:
    assert {name: launch.load(name).requires_api_key for name in launch.names()} == {
        "kimi-k2.5-8xh200": True,
        "kimi-k2.5-8xpcie": True,
        "tiny-cpu": False,
    }


def test_no_foreign_code_where_the_recipe_can_do_without() -> None:
    assert "--trust-remote-code" not in run("tiny-cpu", "--port", "29418")


def test_a_config_of_ones_own(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("log-level: warning\n")
    with pytest.raises(PatchError, match="serves with an API key"):
        run(recipe, "--config", str(file))
    file.write_text("api-key: k\n")
    assert run(recipe, "--config", str(file)).count("--config") == 1
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    with pytest.raises(PatchError, match=r"(?s)upstream takes one --config only.*write the key into") as caught:
        run(recipe, "--config", str(file))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "-dash", "ünïcode", "line\nbreak"])
def test_keys_that_upstream_could_not_use(recipe: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", key)
    with pytest.raises(PatchError, match="SGLANG_API_KEY: the key cannot be used") as caught:
        run(recipe)
    assert key not in str(caught.value)


def test_files_without_a_key(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_API_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(PatchError, match=r"SGLANG_API_KEY_FILE: .* cannot be read"):
        run(recipe)
    (tmp_path / "none").write_text("\n")
    with pytest.raises(PatchError, match="the file is empty"):
        run(recipe)


def test_a_recipe_has_no_secrets() -> None:
    with pytest.raises(ValueError, match="is a secret and no part of a recipe: set SGLANG_API_KEY"):
        launch.Recipe(description="x", model="m", arguments={"--api-key": KEY})
    with pytest.raises(ValueError, match="'--api-key' is a secret and no part of a recipe"):
        launch.Recipe(description="x", model="m", arguments={f"--api-key={KEY}": True})


@pytest.mark.parametrize("variable", api_key.VARIABLES.values())
def test_a_recipe_has_no_secrets_in_its_environment(recipe: str, variable: str) -> None:
    content = yaml.safe_load(Path(recipe).read_text())
    Path(recipe).write_text(yaml.safe_dump({**content, "environment": {variable: KEY}}))
    with pytest.raises(PatchError, match=f"'{variable}' is a secret.*{variable}_FILE") as caught:
        run(recipe)
    assert KEY not in str(caught.value)


def test_a_recipe_may_name_the_file_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "other").write_text("other\n")
    made = launch.Recipe(description="x", model="m", environment={"SGLANG_API_KEY_FILE": str(tmp_path / "key")})

    def key(**environ: str) -> str:
        return launch.combine(made, [], environ).keys["--api-key"][0]

    assert key() == KEY
    assert key(SGLANG_API_KEY_FILE=str(tmp_path / "other")) == "other"
    assert key(SGLANG_API_KEY="variable") == "variable", "the environment wins over the recipe"


def test_what_is_shown_of_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--api-key", KEY, "--x", f"--admin-api-key={KEY}", "--api-key", "", "--port", "1"]
    shown = ["--api-key", "***", "--x", "--admin-api-key=***", "--api-key", "", "--port", "1"]
    assert secrets.command(argv) == shown

    executed: list[str] = []
    monkeypatch.setattr(os, "execvpe", lambda _, argv, env: executed.extend(argv))
    monkeypatch.setattr(serve.ready, "announce", lambda *_: None)
    serve.main(["--model", "test/models/tiny-kimi", "--port", str(free_port()), "--", "--api-key", KEY])
    assert executed[-1] == KEY
    printed = capsys.readouterr().out
    assert "--api-key" in printed
    assert KEY not in printed
    with pytest.raises(SystemExit, match=r"--api-ke: an abbreviation of --api-key"):
        serve.main(["--model", "test/models/tiny-kimi", "--", "--api-ke", KEY])


def test_other_secrets_of_a_line_are_not_shown(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(Path(recipe).read_text())
    Path(recipe).write_text(yaml.safe_dump({**content, "environment": {"HF_TOKEN": "hub-Zq7", "A": "b c"}}))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    executed = run(recipe, "--api-key=", "--ssl-keyfile-password", KEY, "--log-level", "warning")
    assert executed[-3] == KEY
    printed = capsys.readouterr().out
    assert "--ssl-keyfile-password '***' --log-level warning" in printed
    assert "A='b c'" in printed
    assert KEY not in printed
    assert "hub-Zq7" not in printed


@pytest.mark.parametrize("name", ["--api-ke", "--api", "--admin-api", "--a"])
def test_abbreviations_of_a_key_are_refused(recipe: str, name: str) -> None:
    """Upstream's parser would take them, and the key would be on the line."""
    for line in ([name, KEY], [f"{name}={KEY}"]):
        with pytest.raises(PatchError, match=f"^{name}: an abbreviation of --") as caught:
            run(recipe, *line)
        assert KEY not in str(caught.value)
    with pytest.raises(PatchError, match="an abbreviation of"):
        launch.combine(launch.Recipe(description="x", model="m", arguments={name: KEY}), [], {})
    run(recipe, "--api-key", KEY, "--allow-auto-truncate", "--attention-backend=x")
