"""What a server could load is never refused, and what it would ask an unreachable hub for is, before it asks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_patches import hub, launch, named_model, serve
from sglang_patches.bench import options
from sglang_patches.cli import app
from sglang_patches.doctor import models
from sglang_patches.doctor.host import Model
from sglang_patches.errors import PatchError

OFFLINE = {"HF_HUB_OFFLINE": "1"}
NAME = "nobody/no-such-model"
SEEN = "no folder has that name, and the hub's cache of this machine has no such model"
CLOSED = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def keep(cache: Path, model: str, *files: str, lacks: str = "") -> None:
    """Files of a model in a hub's cache, less one that the hub has, as newer releases of huggingface_hub note it."""
    kept = cache / f"models--{model.replace('/', '--')}"
    snapshot = kept / "snapshots" / ("0" * 40)
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    (kept / "trees").mkdir()
    listed = {name: {"size": 2, "blob_id": "0" * 40} for name in (*files, *filter(None, [lacks]))}
    (kept / "trees" / f"{'0' * 40}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    for name in files:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text("{}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of which hubs it was asked whether they can be reached; none can."""
    asked: list[str] = []

    def unreachable(environ: Any) -> str:
        asked.append(environ.get("HF_ENDPOINT", "") if environ is not None else "")
        return "the hub cannot be reached: No route to host"

    monkeypatch.setattr(hub, "unreachable", unreachable)
    return asked


@pytest.mark.parametrize(
    "model", ["s3://bucket/model", "gs://bucket/model", "az://c/m", "redis://h:1/m", "instance://h"]
)
def test_the_address_of_a_store_is_the_servers_to_read(model: str, asked: list[str]) -> None:
    for environ in ({}, OFFLINE):
        planned = serve.plan(model, "", 1, 30000, [], cuda=True, environ=environ)
        assert f"model {model} is not on this machine: the server asks the store of that address" in planned.notes[-3]
        named_model.refuse_unreachable(planned.absent, environ)
    assert asked == []
    assert models.read(model).problem is None
    with pytest.raises(PatchError, match=rf"--model {model}: .*which only a server reads"):
        named_model.folder("--model", model)


def test_modelscope_is_asked_in_place_of_the_hub(tmp_path: Path, asked: list[str]) -> None:
    for environ in ({"SGLANG_USE_MODELSCOPE": "true"}, {"SGLANG_USE_MODELSCOPE": "1", **OFFLINE}):
        planned = serve.plan(NAME, "", 1, 30000, [], cuda=True, environ=environ)
        assert "the server asks ModelScope for it" in "\n".join(planned.notes)
        named_model.refuse_unreachable(planned.absent, environ)
    assert asked == []
    with pytest.raises(PatchError, match="there is no such folder"):
        serve.plan(str(tmp_path / "no"), "", 1, 30000, [], cuda=True, environ={"SGLANG_USE_MODELSCOPE": "1"})
    with pytest.raises(PatchError, match="keeps from asking the hub"):
        serve.plan(NAME, "", 1, 30000, [], cuda=True, environ={"SGLANG_USE_MODELSCOPE": "0", **OFFLINE})


@pytest.mark.parametrize(("name", "content"), [("model.gguf", b""), ("blob", b"GGUF\x03")])
def test_a_gguf_file_is_served(tmp_path: Path, name: str, content: bytes, asked: list[str]) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    planned = serve.plan(str(file), "", 1, 30000, [], cuda=True, environ=OFFLINE)
    assert planned.absent == {}
    assert "--trust-remote-code" not in planned.argv
    assert "--max-total-tokens" in planned.argv, "a small model"
    assert models.read(str(file)).problem is None
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    assert "--trust-remote-code" in serve.plan(str(file), "", 1, 30000, [], cuda=True, environ={}).argv
    (tmp_path / "weights.bin").write_bytes(b"\x00")
    with pytest.raises(PatchError, match="that is a file"):
        serve.plan(str(tmp_path / "weights.bin"), "", 1, 30000, [], cuda=True, environ={})


def test_a_gguf_file_of_the_hub_is_served(tmp_path: Path) -> None:
    for model, words in (("own/m:Q4_K_M", "own/m"), ("own/m/parts/q4.gguf", "own/m parts/q4.gguf")):
        missing = named_model.absence(model, {})
        assert missing is not None
        assert (missing.seen, missing.fetched) == (SEEN, "the hub")
        assert missing.remedy.startswith(f"hf download {words};")
    keep(tmp_path, "own/m", "parts/q4.gguf")
    environ = {**OFFLINE, "HF_HUB_CACHE": str(tmp_path)}
    assert serve.plan("own/m/parts/q4.gguf", "", 1, 30000, [], cuda=True, environ=environ).absent == {}
    with pytest.raises(PatchError, match="keeps from asking the hub"):
        serve.plan("own/m/parts/q8.gguf", "", 1, 30000, [], cuda=True, environ=environ)


@pytest.mark.parametrize("form", ["params.json", "head.pt"])
def test_other_forms_and_the_cache_of_older_releases_are_served(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_model, "_reads_older_cache", lambda: True)
    (tmp_path / "form").mkdir()
    (tmp_path / "form" / form).write_text("{}")
    keep(tmp_path / "hub", "own/m", "config.json")
    environ = {**OFFLINE, "TRANSFORMERS_CACHE": str(tmp_path / "hub")}
    for model in (str(tmp_path / "form"), "own/m"):
        assert serve.plan(model, "", 1, 30000, [], cuda=True, environ=environ).absent == {}
    read = models.read(str(tmp_path / "form"))
    assert read == Model(read.path, unread=True, remedy=named_model._ANY)
    assert named_model.absence("own--/m..x/q.gguf", environ) is not None
    monkeypatch.setattr(named_model, "_reads_older_cache", lambda: False)
    with pytest.raises(PatchError, match="keeps from asking the hub"):
        serve.plan("own/m", "", 1, 30000, [], cuda=True, environ=environ)


def test_a_hub_that_cannot_be_reached_ends_serve_before_the_server(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    monkeypatch.setattr(serve.os, "execvpe", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        serve.main(["--model", NAME])
    assert ended.value.code == (
        f"serve: model {NAME}: {SEEN}; the hub cannot be reached: No route to host\n"
        "  remedy     the folder of a downloaded model, or HF_ENDPOINT=URL of a hub that can be reached"
    )
    assert asked == ["http://mirror"]


def test_the_draft_is_asked_for_too(asked: list[str]) -> None:
    target = str(Path(__file__).parents[1] / "models/tiny-kimi")
    planned = serve.plan(target, NAME, 1, 30000, [], cuda=False, environ={})
    with pytest.raises(PatchError, match=f"^draft {NAME}: no folder has that name.*cannot be reached"):
        named_model.refuse_unreachable(planned.absent, planned.env)


def test_launch_and_bench_end_likewise_and_a_dry_run_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    line = ["launch", "tiny-cpu", "--model", NAME, "--draft", "", "--no-doctor"]
    done = CliRunner().invoke(app, [*line, "--dry-run"])
    assert (done.exit_code, asked) == (0, []), done.output
    monkeypatch.setattr(launch.os, "execvpe", lambda *_: pytest.fail("started"))
    done = CliRunner().invoke(app, line)
    assert (done.exit_code, f"model {NAME}: {SEEN}; the hub cannot be reached" in done.output) == (2, True), done.output
    with pytest.raises(PatchError, match=f"--model {NAME}: .*cannot be reached"):
        options.checkpoint("--model", NAME, None)
    assert len(asked) == 2


def test_nobody_is_asked_for_a_model_that_is_a_folder(tmp_path: Path, asked: list[str]) -> None:
    target = str(Path(__file__).parents[1] / "models/tiny-kimi")
    planned = serve.plan(target, "", 1, 30000, [], cuda=False, environ={})
    serve.settle_hub(planned)
    assert (planned.absent, planned.cached, asked) == ({}, {}, [])


def test_a_cached_model_is_served_without_a_hub_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "own/m", "config.json", "model.safetensors")
    started: list[dict[str, str]] = []
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(serve.os, "execvpe", lambda _program, _argv, env: started.append(env))
    monkeypatch.setattr(serve.ready, "announce", lambda *_: None)
    monkeypatch.setattr(launch, "_announce", lambda *_: None)
    told = "the hub cannot be reached: No route to host: model own/m from its cache on this machine"
    serve.main(["--model", "own/m"])
    shown = capsys.readouterr().out
    assert f"serve: {told} (HF_HUB_OFFLINE=1; with =0 the server asks anyway)\n" in shown
    assert "env HF_HUB_OFFLINE=1" in shown or "HF_HUB_OFFLINE=1 " in shown.split("asks anyway")[1]
    line = ["launch", "tiny-cpu", "--model", "own/m", "--draft", "", "--no-doctor"]
    done = CliRunner().invoke(app, line)
    assert (done.exit_code, f"launch: {told} (" in done.output) == (0, True), done.output
    assert [env["HF_HUB_OFFLINE"] for env in started] == ["1", "1"]
    assert len(asked) == 2
    # Who forbade asking is not asked for; a hub that answers, and ModelScope, are left to the server.
    for variable, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "0"), ("SGLANG_USE_MODELSCOPE", "1")):
        monkeypatch.setenv(variable, value)
        serve.main(["--model", "own/m"])
        monkeypatch.delenv(variable)
    assert len(asked) == 2
    monkeypatch.setattr(hub, "unreachable", lambda _environ: "")
    serve.main(["--model", "own/m"])
    assert "HF_HUB_OFFLINE" not in started[-1]
    done = CliRunner().invoke(app, [*line, "--dry-run"])
    assert len(started) == 6, "a dry run starts nothing"


def test_bench_s_servers_do_not_ask_an_unreachable_hub_for_what_its_cache_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn is a server, so a run would wait for as many minutes as turns."""
    keep(tmp_path, "own/m", "config.json", "model.safetensors")
    keep(tmp_path, "own/d", "config.json", "model.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def setup(model: str, draft: str) -> Any:
        return options.setup(
            "x", model=model, draft=draft, tp=1, server_args=None, prompts=1, prompt_tokens=4, vocabulary=256,
            workload_file=None, output_tokens=8, concurrency=1, warm_up=0, seed=0, ready_timeout=1, turn_timeout=1,
        )  # fmt: skip

    made = setup("own/m", "own/d")
    told = "the hub cannot be reached: No route to host: --model own/m, --draft own/d from its cache on this machine"
    assert (capsys.readouterr().err.partition(" (HF_HUB_OFFLINE=1; with =0")[0], len(asked)) == (told, 1)
    assert made.environ == {**os.environ, "HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" not in os.environ
    # Nothing of the hub's, nobody is asked; one that answers is left to the server, and so is who forbade asking.
    here = str(Path(__file__).parents[1] / "models/tiny-kimi")
    assert (setup(here, "").environ, len(asked)) == (dict(os.environ), 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert (setup("own/m", "").environ["HF_HUB_OFFLINE"], len(asked)) == ("0", 1)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "unreachable", lambda _environ: "")
    assert "HF_HUB_OFFLINE" not in setup("own/m", "own/d").environ
    assert capsys.readouterr().err == ""
    # Part of a model is refused, as by serve.
    monkeypatch.setattr(hub, "unreachable", lambda _environ: "no route")
    keep(tmp_path, "own/part", "config.json")
    with pytest.raises(PatchError, match=r"^--draft own/part: its copy in the hub's cache, .*lacks weight files; no r"):
        setup("own/m", "own/part")


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], True),
        (["model-00001-of-00002.safetensors"], False),
        ([], False),
    ],
)
def test_a_copy_that_lacks_weights_is_not_served_for_want_of_a_hub(
    tmp_path: Path, files: list[str], whole: bool, asked: list[str]
) -> None:
    """Upstream would serve the weights that came, and the rest as its memory is."""
    keep(tmp_path, "own/m", "config.json", *files)
    snapshot = tmp_path / "models--own--m/snapshots" / ("0" * 40)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    planned = serve.plan("own/m", "", 1, 30000, [], cuda=False, environ={"HF_HUB_CACHE": str(tmp_path)})
    if whole:
        serve.settle_hub(planned)
        assert planned.env["HF_HUB_OFFLINE"] == "1"
    else:
        with pytest.raises(
            PatchError, match=r"^model own/m: its copy in the hub's cache, .*lacks weight files; the hub"
        ):
            serve.settle_hub(planned)
        # Without an index a part is known by its name.
        (snapshot / "model.safetensors.index.json").unlink()
        with pytest.raises(PatchError, match="lacks weight files"):
            serve.settle_hub(planned)
    assert asked


def test_what_a_server_has_fetched_is_here_though_the_hub_has_more(tmp_path: Path, asked: list[str]) -> None:
    """Upstream fetches no README, and serves such a snapshot without a network."""
    keep(tmp_path, "own/m", "config.json", "model.safetensors", lacks="README.md")
    environ = {**OFFLINE, "HF_HUB_CACHE": str(tmp_path)}
    assert serve.plan("own/m", "", 1, 30000, [], cuda=False, environ=environ).absent == {}


def test_doctor_takes_weights_that_are_not_all_in_the_cache_for_absent(tmp_path: Path) -> None:
    keep(tmp_path, "own/m", "config.json", "model-00001-of-00002.safetensors", lacks="model-00002-of-00002.safetensors")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert models.read("own/m", environ=environ) == Model("own/m", remedy="hf download own/m")
    assert "no complete set" in str(models.read("own/m", environ={**environ, **OFFLINE}).problem)


def test_a_mirror_that_is_there_is_left_to_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{mirror.getsockname()[1]}"}
        planned = serve.plan(NAME, "", 1, 30000, [], cuda=False, environ=environ)
        named_model.refuse_unreachable(planned.absent, planned.env)
    with pytest.raises(PatchError, match="Connection refused"):
        named_model.refuse_unreachable(planned.absent, planned.env | CLOSED)
