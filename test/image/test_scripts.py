"""The image's scripts, run for real: in a folder of their own, with this environment's packages and not 9 GB of copies.

The whole build was run by hand (docs/image.md); what needs the package index or a distribution is only in that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sglang_patches import series, trust
from sglang_patches.upstream import locate

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
LANE = "0.5.23"


def script(name: str, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script of docker/ as a build step is: no selection, nothing of this session's cache."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    command = [str(DOCKER / name), *map(str, arguments)]
    return subprocess.run(command, env={**kept, **more}, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What docker/bake.sh leaves, with commands that run in this environment."""
    if subprocess.run(["sh", "-c", "command -v dpkg-query"], capture_output=True).returncode:
        pytest.skip("the image is a Debian or Ubuntu one, this machine is not")
    made = tmp_path_factory.mktemp("image") / "opt"
    binaries = made / "venv" / "bin"
    binaries.mkdir(parents=True)
    for name, words in (("python", ""), ("sglang-patches", "-m sglang_patches.cli")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (binaries / name).chmod(0o700)
    done = script("bake.sh", made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_what_is_baked(prefix: Path) -> None:
    upstream = locate()
    assert upstream is not None
    patches = series.load(upstream.release).patches
    state = json.loads((prefix / "patch-set.json").read_text())
    # As on a host with GPUs, though none is seen here.
    assert [patch["name"] for patch in state["patches"]] == [patch.name for patch in patches if patch.default == "on"]
    provenance = json.loads((prefix / "provenance.json").read_text())
    assert provenance["code"]["id"] == state["id"]
    for patch in patches:
        for path in patch.touches if patch.default == "on" else ():
            assert (prefix / "tree" / path).read_bytes() != upstream.read(path)
    assert "\nbase-files " in (prefix / "system-packages.txt").read_text()


def test_the_cache_serves_with_and_without_a_gpu_and_is_not_written_to(prefix: Path) -> None:
    before = {file: file.lstat().st_mtime_ns for file in (prefix / "cache").rglob("*")}
    assert any(file.suffix == ".pyc" for file in before)
    baked = dict(line.split("\t") for line in (prefix / "baked.tsv").read_text().splitlines())
    for selection in ("", ",".join(p["name"] for p in json.loads((prefix / "patch-set.json").read_text())["patches"])):
        command = [sys.executable, "-m", "sglang_patches.cli", "warm"]
        environment = {**os.environ, "SGLANG_PATCHES_CACHE": str(prefix / "cache"), "SGLANG_PATCHES": selection}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        copies = dict(line.split("\t") for line in done.stdout.splitlines())
        assert (copies == baked) == bool(selection)
        assert all(Path(copy).is_relative_to(prefix / "cache") for copy in copies.values())
    assert {file: file.lstat().st_mtime_ns for file in (prefix / "cache").rglob("*")} == before


def test_the_servers_user_can_read_all_and_write_nothing(prefix: Path) -> None:
    for file in prefix.rglob("*"):
        if not file.is_symlink() and not file.is_relative_to(prefix / "venv"):
            mode = file.stat().st_mode
            assert mode & 0o022 == 0, file
            assert mode & (0o005 if file.is_dir() else 0o004), file
    assert trust.distrusted(str(prefix / "cache")) is None


def test_labels_tell_what_is_in_the_image(prefix: Path) -> None:
    right = json.loads((prefix / "patch-set.json").read_text())["id"]
    assert (
        script("labels.sh", prefix, LANE=LANE, PATCH_SET=right).stdout == f"labels: sglang {LANE}, patch set {right}\n"
    )
    assert script("labels.sh", prefix, LANE=LANE, PATCH_SET="").returncode == 0
    done = script("labels.sh", prefix, LANE=LANE, PATCH_SET="0123456789ab")
    assert (done.returncode, f"build with --build-arg PATCH_SET={right}" in done.stderr) == (1, True)
    assert "the image has sglang" in script("labels.sh", prefix, LANE="0.5.24").stderr


@pytest.mark.parametrize(
    ("lane", "cuda", "said"),
    [
        ("0.5.99", "13.0.1", "docker/lock/0.5.99-cu13.txt is missing"),
        (LANE, "12.9.1", f"docker/lock/{LANE}-cu12.txt is missing"),
        ("", "13.0.1", "LANE is not set"),
    ],
)
def test_a_lane_that_is_not_locked_is_refused(lane: str, cuda: str, said: str, tmp_path: Path) -> None:
    done = script("install.sh", tmp_path / "opt", LANE=lane, CUDA=cuda)
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "opt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="making a user needs root")
def test_the_user(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).write_text("")
    done = script("user.sh", "10001", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "etc/passwd").read_text() == "sglang:x:10001:10001::/cache:/usr/sbin/nologin\n"
    assert (tmp_path / "etc/group").read_text() == "sglang:x:10001:\n"
    state = (tmp_path / "cache").stat()
    assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (10001, 10001, 0o700)
    assert "does not run as root" in script("user.sh", "0", tmp_path).stderr


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PATH of the container: `sglang-patches` says what it was called with."""
    (tmp_path / "sglang-patches").write_text('#!/bin/sh\necho "$@ | ${SGLANG_PATCHES-unset} | $SGLANG_PATCHES_CACHE"\n')
    (tmp_path / "sglang-patches").chmod(0o700)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_entry_point(path: str) -> None:
    def entered(*arguments: str, **more: str) -> str:
        environment = {"PATH": path, "HOME": "/cache", "SGLANG_PATCHES_CACHE": "/opt/baked", **more}
        done = script("entrypoint.sh", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert entered("tiny-cpu", "--port", "1") == "launch tiny-cpu --port 1 | unset | /opt/baked"
    assert entered("/my/own.yaml") == "launch /my/own.yaml | unset | /opt/baked"
    assert entered("tiny-cpu", SGLANG_PATCHES="") == "launch tiny-cpu | unset | /opt/baked"
    assert entered("tiny-cpu", SGLANG_PATCHES="none") == "launch tiny-cpu | none | /cache/sglang-patches"
    assert entered("sglang-patches", "doctor").startswith("doctor |")
    assert entered("echo", "tiny-cpu") == "tiny-cpu"
    # What is no command is for launch to refuse.
    assert entered("tiny") == "launch tiny | unset | /opt/baked"
    assert entered() == "launch | unset | /opt/baked"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers /health with what its attribute `status` says, and everything below /health/ with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = self.server.status if self.path == "/health" else 404  # type: ignore[attr-defined]
            self.send_response(200 if self.path.startswith("/health/") else status)
            self.send_header("Location", "/health/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


HEALTH = """
import pathlib, sys
sys.path.insert(0, "docker")
import healthcheck
healthcheck.Path = lambda _: pathlib.Path(sys.argv[1])
sys.exit(healthcheck.main())
"""


@pytest.mark.parametrize("spelling", ["--host 0.0.0.0 --port {}", "--port 1 --port={}"])
def test_health_check_asks_the_server_that_runs(server: HTTPServer, spelling: str, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"tini\0--\0entrypoint\0")
    (tmp_path / "30").mkdir()
    flag = "-P " if "=" in spelling else ""
    line = f"python {flag}-m sglang.launch_server {spelling.format(server.server_port)}"
    (tmp_path / "30" / "cmdline").write_bytes(line.replace(" ", "\0").encode() + b"\0")
    command = [sys.executable, "-S", "-c", HEALTH, str(tmp_path)]
    # A proxy is for other hosts; nothing listens there.
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment["http_proxy"] = "http://127.0.0.1:1"
    for status, code in ((200, 0), (503, 1), (302, 1)):
        server.status = status  # type: ignore[attr-defined]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout
    if os.geteuid() == 0:
        os.chown(tmp_path / "30", 12345, -1)  # where a container sees the host's processes
    else:
        (tmp_path / "30" / "cmdline").write_bytes(b"sleep\0")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "no server runs\n")
