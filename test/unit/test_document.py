"""The provenance document: its schema, what is collected, and the commands on it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.document import collect, machine, schema, server
from sglang_patches.errors import PatchError
from sglang_patches.nccl import topology

from .documents import made

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs/provenance.schema.json"


def cli(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_patches.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=120)


def test_the_published_schema_is_the_one_of_the_code() -> None:
    remedy = "write it anew as docs/provenance.md says"
    assert json.loads(SCHEMA.read_text()) == json.loads(schema.json_schema()), remedy


def test_the_schema_takes_a_document_and_refuses_others() -> None:
    published = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    document = made().model_dump()
    jsonschema.validate(document, published)
    for broken in ({**document, "schema_version": 2}, {**document, "more": 1}, {**document, "code": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, published)


def test_a_document_is_found_at_any_depth_outermost_first() -> None:
    inner, outer = made(id="inner").model_dump(), made(id="outer").model_dump()
    assert schema.parse({"rows": [{"made by": {"document": inner}}]}, "x").code.id == "inner"
    assert schema.parse({"a": {"b": {"c": inner}}, "z": outer}, "x").code.id == "outer"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"code_state": {"id": "x"}}, "holds no provenance document"),
        ([], "holds no provenance document"),
        ({**made().model_dump(), "schema_version": 7}, "schema version 7"),
        ({**made().model_dump(), "code": {"id": 1}}, "code.id"),
    ],
)
def test_what_is_no_document_is_refused_with_what_was_expected(tmp_path: Path, data: Any, told: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PatchError, match=told) as error:
        schema.read(file)
    assert str(file) in str(error.value)
    assert "remedy" in str(error.value)


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_any_json_is_read_or_refused(data: Any) -> None:
    with pytest.raises(PatchError):
        schema.parse(data, "x")


def test_the_commands_on_this_environment(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    cache = str(tmp_path / "cache")
    ours = {"SGLANG_PATCHES": "none,+provenance", "SGLANG_PATCHES_CACHE": cache}
    done = cli("provenance", "--out", a, HF_HUB_TOKEN="opensesame", NCCL_PROTO="LL", **ours)
    assert done.returncode == 0, done.stderr
    assert "opensesame" not in a.read_text()
    document = schema.read(a)
    jsonschema.validate(json.loads(a.read_text()), json.loads(SCHEMA.read_text()))
    assert [patch.name for patch in document.code.patches if patch.on] == ["provenance"]
    assert {file.by for file in document.processes[0].files} == {"patch"}
    assert "sglang/srt/entrypoints/http_server.py" in {file.path for file in document.processes[0].files}
    assert document.environment["NCCL_PROTO"] == "LL"
    assert document.time is None
    assert document.host is None
    assert document.versions["torch"]
    libraries = document.processes[0].libraries
    assert "libtorch_cpu.so" in {library.name for library in libraries}
    for library in sorted(libraries, key=lambda library: library.size)[:5]:
        assert library.sha256 == hashlib.sha256(Path(library.path).read_bytes()).hexdigest()
    other = cli("provenance", "--out", b, "--with-time", "--with-host", **{**ours, "SGLANG_PATCHES": "none"})
    assert other.returncode == 0, other.stderr
    assert schema.read(b).time
    assert schema.read(b).host == os.uname().nodename
    same, differ = cli("diff", a, a), cli("diff", a, b)
    assert (same.returncode, same.stdout) == (0, "nothing that matters differs\n")
    assert differ.returncode == 1
    assert differ.stdout.startswith("`provenance` was on in A and off in B")
    assert "NCCL_PROTO was LL in A and unset in B" in differ.stdout
    told = json.loads(cli("diff", "--json", a, b).stdout)
    assert told["differences"][0]["subject"] == "`provenance`"


def test_diff_ends_with_2_for_bad_input(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(made().model_dump_json())
    bad.write_text("{")
    for files in ((good, bad), (good, tmp_path / "absent.json"), (bad, good)):
        done = cli("diff", *files)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert files[0].name in done.stderr or files[1].name in done.stderr


def test_an_edited_and_a_missing_upstream_file_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded = {}
    for name in ("kept", "edited", "gone"):
        file = tmp_path / "sglang" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
        recorded[str(file)] = hashlib.sha256(name.encode()).hexdigest()
    (tmp_path / "sglang/edited.py").write_text("by hand")
    (tmp_path / "sglang/gone.py").unlink()
    upstream = collect._installed()._replace(root=str(tmp_path))
    monkeypatch.setattr(collect, "_installed", lambda: upstream)
    monkeypatch.setattr(collect.provenance, "upstream_hashes", lambda: recorded)
    monkeypatch.setattr(collect.activate, "overlay", lambda: None)
    told = {file.path: (file.sha256, file.by) for file in collect.on_disk()}
    by_hand = hashlib.sha256(b"by hand").hexdigest()
    assert told == {"sglang/edited.py": (by_hand, "edit"), "sglang/gone.py": (None, "edit")}
    copy = tmp_path / "cache/key/sglang/srt/x.py"
    loaded = [
        ("sglang.kept", str(tmp_path / "sglang/kept.py"), recorded[str(tmp_path / "sglang/kept.py")]),
        ("sglang.edited", str(tmp_path / "sglang/edited.py"), by_hand),
        ("sglang.rust", str(tmp_path / "sglang/rust.cpython-311-x86_64-linux-gnu.so"), "1"),
        ("sglang.srt.x", str(copy), "2"),
    ]
    monkeypatch.setattr(collect.provenance, "loaded_files", lambda: loaded)
    assert [(file.path, file.by) for file in collect.loaded()] == [
        ("sglang/edited.py", "edit"),
        ("sglang/rust.cpython-311-x86_64-linux-gnu.so", "edit"),
        ("sglang/srt/x.py", "patch"),
    ]


def test_libraries_are_hashed_within_the_budget_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(tmp_path / "cache"))
    small, large = tmp_path / "libnccl.so.2", tmp_path / "libtorch.so"
    small.write_bytes(b"small")
    with large.open("wb") as file:
        file.truncate(3 * 10**8)  # a second by the assumed speed
    monkeypatch.setattr(collect, "mapped", lambda: [str(large), str(small)])
    first = {library.name: library.sha256 for library in collect.libraries(budget=0.5)}
    assert first == {"libnccl.so.2": hashlib.sha256(b"small").hexdigest(), "libtorch.so": None}
    again = {library.name: library.sha256 for library in collect.libraries(budget=0)}
    assert again == first
    small.write_bytes(b"other")  # the same size
    os.utime(small, ns=(1, 1))
    changed = {library.name: library.sha256 for library in collect.libraries()}
    assert changed["libnccl.so.2"] == hashlib.sha256(b"other").hexdigest()
    assert changed["libtorch.so"]
    (tmp_path / "cache/libraries.json").write_text("{")
    assert {library.name: library.sha256 for library in collect.libraries()} == changed


def test_hashes_that_another_user_could_have_written_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "made" / "cache" / "libraries.json"
    monkeypatch.setenv("SGLANG_PATCHES_CACHE", str(kept.parent))
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"library")
    monkeypatch.setattr(collect, "mapped", lambda: [str(library)])

    def told() -> str | None:
        return collect.libraries()[0].sha256

    right = hashlib.sha256(b"library").hexdigest()
    before = os.umask(0)
    try:
        assert told() == right
    finally:
        os.umask(before)
    for folder in (kept.parent, kept.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    kept.write_text(kept.read_text().replace(right, "planted"))
    assert told() == "planted"
    kept.chmod(0o666)
    assert told() == right
    assert "planted" in kept.read_text()
    kept.unlink()
    kept.parent.chmod(0o777)
    assert told() == right
    assert not kept.exists()


def test_a_model_that_was_trained_further_is_another(tmp_path: Path) -> None:
    """Its files have the same names and sizes, and its index the same text."""
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    rng = random.Random(0)
    parts = [tmp_path / f"model-{at}.safetensors" for at in range(2)]
    for part in parts:
        part.write_bytes(rng.randbytes(3_000_000))
    former = machine.model(str(tmp_path))
    assert machine.model(str(tmp_path)) == former
    copied = tmp_path / "copied"
    copied.mkdir()
    for part in parts:
        (copied / part.name).write_bytes(part.read_bytes())
    assert machine.model(str(copied)).weights_sample_sha256 == former.weights_sample_sha256
    for part in parts:  # the part of a layer, beyond the header, that a bf16 of 64 KiB apart would be
        before = part.read_bytes()
        for at in range(0, len(before) - 100_000, 700_000):
            part.write_bytes(before[:at] + rng.randbytes(100_000) + before[at + 100_000 :])
            told = machine.model(str(tmp_path))
            assert told.weights_sample_sha256 != former.weights_sample_sha256
            assert told.index_sha256 == former.index_sha256
        part.write_bytes(before)
    (tmp_path / "empty.safetensors").touch()
    assert machine.model(str(tmp_path)).weights_sample_sha256 != former.weights_sample_sha256


def test_only_the_weights_that_are_loaded_tell_models_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download of everything has files beside them that the server's own does not have."""
    for part in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / part).write_bytes(part.encode() * 100)
    plain = machine.model(str(tmp_path))
    for other in ("training_args.bin", "pytorch_model.bin"):
        (tmp_path / other).write_bytes(b"x")
    assert machine.model(str(tmp_path)) == plain
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "consolidated.safetensors").write_bytes(b"x")
    assert machine.model(str(tmp_path)).weights_sample_sha256 == plain.weights_sample_sha256
    (tmp_path / "model-2.safetensors").unlink()
    assert machine.model(str(tmp_path)).weights_sample_sha256 is None
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"y" * 9000)
    before = machine.model(str(tmp_path)).weights_sample_sha256
    (tmp_path / "training_args.bin").write_bytes(b"z")
    assert machine.model(str(tmp_path)).weights_sample_sha256 == before
    # A disk that takes too long keeps no server from answering.
    monkeypatch.setattr(machine, "_PATIENCE_S", -1)
    (tmp_path / "pytorch_model.bin").write_bytes(b"w" * 9000)
    assert machine.model(str(tmp_path)).weights_sample_sha256 is None


def test_a_model_is_known_by_its_content(tmp_path: Path) -> None:
    folder = ROOT / "test/models/tiny-kimi"
    told = machine.model(str(folder))
    assert told.config_sha256 == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert told.index_sha256
    snapshot = tmp_path / "models--a--b/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert machine.model(str(snapshot)).revision == "0123abcd"
    weights = snapshot / "model.safetensors"
    weights.write_bytes(b"1")
    before = machine.model(str(snapshot)).index_sha256
    weights.write_bytes(b"12")
    assert machine.model(str(snapshot)).index_sha256 != before
    index = snapshot / "model.safetensors.index.json"
    index.write_text("{}")
    assert machine.model(str(snapshot)).index_sha256 == hashlib.sha256(b"{}").hexdigest()
    unknown = machine.model("no-such/model", "main")
    assert unknown.weights_sample_sha256 is None
    assert (unknown.config_sha256, unknown.index_sha256, unknown.revision) == (None, None, "main")
    args = {"model_path": str(folder), "speculative_draft_model_path": None}
    assert set(machine.models(args)) == {"target"}


def test_gpus_are_told_and_what_the_driver_does_not_tell_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        NVMLError = RuntimeError
        initialised = 0

        def nvmlInit(self) -> None:
            self.initialised += 1

        def nvmlShutdown(self) -> None:
            self.initialised -= 1

        def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> str:
            return bus.decode()

        def nvmlDeviceGetUUID(self, handle: str) -> bytes:
            return f"GPU-{handle}".encode()

        def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
            return 700_000

        def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
            raise RuntimeError("not supported")

        def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
            return {1: 1980, 2: 2619}[kind]

        def nvmlSystemGetDriverVersion(self) -> str:
            return "580.1"

    nvml = Nvml()
    shown = topology.Topology(gpus=(topology.Gpu("H200", bus="0000:01:00.0"),))
    monkeypatch.setattr(machine.topology, "read", lambda *_: shown)
    told = machine.machine(nvml=nvml)
    assert told.driver == "580.1"
    assert told.topology_fingerprint == shown.fingerprint()
    assert nvml.initialised == 0
    (gpu,) = told.gpus
    assert gpu.model_dump() == {
        "name": "H200", "uuid": "GPU-0000:01:00.0", "sm_clock": None, "memory_clock": None, "max_sm_clock": 1980,
        "max_memory_clock": 2619, "power_limit": 700.0,
    }  # fmt: skip


def test_the_container_is_told_where_it_can_be(tmp_path: Path) -> None:
    assert machine.container(tmp_path) is None
    (tmp_path / ".dockerenv").touch()
    assert machine.container(tmp_path) == "docker"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").write_text('engine="podman"\nimage="quay.io/a/b:1"\n')
    assert machine.container(tmp_path) == "quay.io/a/b:1"


def test_a_server_that_cannot_tell_goes_on_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ValueError("no RECORD")

    monkeypatch.setattr(server, "_failed", set())
    monkeypatch.setattr(server, "_process", None)
    monkeypatch.setattr(collect, "process", fail)
    assert server.process(lambda: "dp 0") is None
    assert server.document(dict, []) is None
    assert len([record for record in caplog.records if "no RECORD" in record.getMessage()]) == 1


def test_asking_what_is_no_server_says_so() -> None:
    with pytest.raises(PatchError, match="not the URL of a server"):
        server.ask("localhost:30000")
    with pytest.raises(PatchError) as error:
        server.ask("http://me:hunter2@127.0.0.1:9")
    assert "remedy" in str(error.value)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, "{}", "tells no provenance document"),
        (200, '{"sglang_patches": null}', "tells no provenance document"),
        (200, '{"sglang_patches": {"document": null}}', "tells no provenance document"),
        (200, "[1]", "tells no provenance document"),
        (200, "<html>", "name a running SGLang server"),
        (401, "{}", "--api-key"),
        (500, "{}", "answered 500"),
    ],
)
def test_a_server_that_answers_something_else_is_named(status: int, body: str, told: str) -> None:
    with serving(status, body) as (url, _headers), pytest.raises(PatchError, match=told) as error:
        server.ask(url)
    assert url in str(error.value)


def test_a_server_is_asked_with_its_key_and_its_host_told_only_if_wanted(tmp_path: Path) -> None:
    body = json.dumps({"sglang_patches": {"document": made().model_dump()}})
    with serving(200, body) as (url, headers):
        plain = server.ask(url)
        assert server.ask(url, "sesame", with_time=True, with_host=True).host == "127.0.0.1"
        done = cli("provenance", "--server", url, "--out", tmp_path / "a.json", SGLANG_API_KEY="sesame")
        (tmp_path / "key").write_text("from-a-file\n")
        filed = cli("provenance", "--server", url, SGLANG_API_KEY_FILE=str(tmp_path / "key"), SGLANG_API_KEY="sesame")
        assert filed.returncode == 0, filed.stderr
    assert (plain.time, plain.host) == (None, None)
    assert [header.get("Authorization") for header in headers] == [
        None, "Bearer sesame", "Bearer sesame", "Bearer from-a-file",
    ]  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert schema.read(tmp_path / "a.json") == made()


@contextlib.contextmanager
def serving(status: int, body: str) -> Iterator[tuple[str, list[Any]]]:
    """(URL, headers of the requests so far) of an HTTP server that answers everything alike."""
    headers: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", headers
        listening.shutdown()
