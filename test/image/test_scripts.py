"""The image's scripts, run for real: in a folder of their own, with this environment's packages and not 9 GB of copies.

The whole build was run by hand (docs/image.md); what needs the package index or a distribution is only in that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_patches import launch, series, trust
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


def test_entry_point(path: str, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    os.mkdir(home)

    def entered(*arguments: str, **more: str) -> str:
        environment = {"PATH": path, "HOME": home, "SGLANG_PATCHES_CACHE": "/opt/baked", **more}
        done = script("entrypoint.sh", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert entered("tiny-cpu", "--port", "1") == "launch tiny-cpu --port 1 | unset | /opt/baked"
    assert entered("/my/own.yaml") == "launch /my/own.yaml | unset | /opt/baked"
    assert entered("tiny-cpu", SGLANG_PATCHES="") == "launch tiny-cpu | unset | /opt/baked"
    # Where the files of another selection go `launch` decides; a command is told.
    assert entered("tiny-cpu", SGLANG_PATCHES="none") == "launch tiny-cpu | none | /opt/baked"
    assert entered("sglang-patches", "doctor", SGLANG_PATCHES="none") == f"doctor | none | {home}/sglang-patches"
    assert entered("sglang-patches", "doctor") == "doctor | unset | /opt/baked"
    assert entered("echo", "tiny-cpu") == "tiny-cpu"
    # What is no command is for launch to refuse.
    assert entered("tiny") == "launch tiny | unset | /opt/baked"
    assert entered() == "launch | unset | /opt/baked"


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="other users' folders need root")
SERVER, STRANGER = 10001, 10002


@pytest.fixture
def volume() -> Iterator[Path]:
    """The root folder of a volume as it comes: root's, where other users can go."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        Path(above).chmod(0o755)
        made = Path(above, "volume")
        made.mkdir(mode=0o755)
        yield made


def can_write(folder: Path, user: int) -> bool:
    done = subprocess.run(["touch", f"{folder}/by-{user}"], user=user, group=user, extra_groups=[], capture_output=True)
    return done.returncode == 0


@NEEDS_ROOT
def test_a_volume_that_the_server_cannot_write_to_starts_nothing_and_says_what_helps(path: str, volume: Path) -> None:
    (link := volume.parent / "sglang-patches").symlink_to("/bin/echo")
    environment = {"PATH": f"{link.parent}:/usr/bin:/bin", "HOME": str(volume)}

    def entered(*arguments: str) -> subprocess.CompletedProcess[str]:
        with (DOCKER / "entrypoint.sh").open() as text:  # from standard input: this user need not reach the checkout
            return subprocess.run(
                ["bash", "-s", "--", *arguments], stdin=text, env=environment, user=SERVER, group=SERVER,
                extra_groups=[], capture_output=True, text=True, timeout=60,
            )  # fmt: skip

    done = entered("tiny-cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{volume} cannot be written to by uid {SERVER} (it belongs to uid 0, mode 755)" in done.stderr
    assert "kubernetes.own-cache.yaml" in done.stderr
    assert entered("echo", "it is only the server that needs it").returncode == 0
    assert script("own-cache.sh", volume, str(SERVER)).returncode == 0
    done = entered("tiny-cpu")
    assert (done.returncode, done.stdout) == (0, "launch tiny-cpu\n"), done.stderr


@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o2775])
def test_a_volume_is_given_to_the_servers_user_and_to_nobody_else(mode: int, volume: Path) -> None:
    """With the one capability that docker/kubernetes.own-cache.yaml leaves it; 2775 is what fsGroup leaves."""
    (volume / "lost+found").mkdir(mode=0o700)
    own = volume / "sglang-patches"
    own.mkdir(mode=0o700)
    os.chown(own, SERVER, SERVER)
    volume.chmod(mode)
    assert not can_write(volume, SERVER) or mode == 0o777
    line = ["setpriv", "--bounding-set=-all,+chown", str(DOCKER / "own-cache.sh"), str(volume), str(SERVER)]
    for said in (f"{volume} is uid {SERVER}'s now", f"{volume} is uid {SERVER}'s already"):
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"own-cache: {said}\n"), done.stderr
        state = volume.stat()
        assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (SERVER, SERVER, 0o700)
    assert can_write(volume, SERVER)
    assert not can_write(volume, STRANGER)
    code = f"import sys; sys.path.insert(0, {str(Path(trust.__file__).parent)!r}); import trust; "
    code += f"sys.exit(trust.distrusted({str(own)!r}))"
    child = [shutil.which("python3", path="/usr/bin:/bin") or "python3", "-I", "-S", "-c", code]
    done = subprocess.run(child, user=SERVER, group=SERVER, extra_groups=[], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 or "Permission denied" in done.stderr, done.stderr


def strangers(volume: Path) -> Path:
    (volume / "triton").mkdir()
    planted = volume / "triton" / "kernel.so"
    planted.write_text("")
    os.chown(planted, STRANGER, STRANGER)
    return planted


def open_to_all(volume: Path) -> Path:
    (volume / "triton").mkdir()
    (volume / "triton").chmod(0o757)  # not for a group
    return volume / "triton"


def open_to_a_group(volume: Path) -> Path:
    (volume / "triton").mkdir()
    os.chown(volume / "triton", SERVER, STRANGER)
    (volume / "triton").chmod(0o770)
    return volume / "triton"


def a_strangers_folder(volume: Path) -> Path:
    os.chown(volume, STRANGER, STRANGER)
    return volume


def a_link(volume: Path) -> Path:
    volume.rename(volume.with_name("elsewhere"))
    volume.symlink_to("elsewhere")
    return volume


def its_own_but_open(volume: Path) -> Path:
    os.chown(volume, SERVER, SERVER)
    volume.chmod(0o777)
    return volume


@NEEDS_ROOT
@pytest.mark.parametrize(
    "expose", [strangers, open_to_all, open_to_a_group, a_strangers_folder, a_link, its_own_but_open]
)
def test_a_volume_with_what_others_put_there_is_not_handed_over(expose: Callable[[Path], Path], volume: Path) -> None:
    """The server would run it, and trust it for being in a folder of its own."""
    named = expose(volume)
    before = volume.stat().st_uid
    done = script("own-cache.sh", volume, str(SERVER))
    assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert str(named) in done.stderr
    assert "  remedy     " in done.stderr
    assert volume.stat().st_uid == before


@NEEDS_ROOT
def test_a_selection_that_is_not_the_images_gets_a_cache_that_can_be_written(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a root file system that is read-only, by a recipe as by the variable."""
    baked = tmp_path / "baked"
    baked.mkdir()
    if subprocess.run(["mount", "--bind", "-o", "ro", prefix / "cache", baked], capture_output=True).returncode:
        pytest.skip("mounting needs more rights than root has here")
    names = [patch["name"] for patch in json.loads((prefix / "patch-set.json").read_text())["patches"]]
    file = tmp_path / "mine.yaml"
    for name in ("SGLANG_PATCHES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(baked))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    instead = tmp_path / "home/.cache/sglang-patches"
    executed: list[Any] = []

    def cache_of(patches: str | None) -> str:
        file.write_text(yaml.safe_dump({"description": "x", "model": "test/models/tiny-kimi", "patches": patches}))
        launch.run(str(file), [], dry_run=False, with_doctor=False, execute=lambda *call: executed.append(call))
        return str(executed[-1][2]["SGLANG_PATCHES_CACHE"])

    try:
        # All the selections that are baked: those of a host with and without a GPU, and what shares their files.
        for patches in (None, ",".join(names), "none"):
            assert cache_of(patches) == str(baked)
            assert str(baked) not in capfd.readouterr().out
        # Files of fewer patches are other files.
        fewer = ",".join(name for name in names if name != "pcie-nccl-allreduce")
        assert cache_of(fewer) == str(instead)
        printed = capfd.readouterr().out
        assert (
            f"patched files are not among those in {baked}, which cannot be written to: they go to {instead}" in printed
        )
        assert f"SGLANG_PATCHES_CACHE={instead}" in printed
        # A process with that environment: no private folder, and all is where it was told.
        warm = [sys.executable, "-m", "sglang_patches.cli", "warm"]
        done = subprocess.run(warm, env=executed[-1][2], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(line.split("\t")[1].startswith(f"{instead}/") for line in done.stdout.splitlines())
        monkeypatch.setenv("SGLANG_PATCHES", fewer)
        assert cache_of(None) == str(instead)
        # What another user can write to is no better.
        instead.chmod(0o777)
        assert cache_of(None) == str(baked)
        assert f"every user can write to {instead}" in capfd.readouterr().out
    finally:
        subprocess.run(["umount", baked], check=True)


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
