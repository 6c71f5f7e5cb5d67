"""What `make serve` starts: arguments by machine and model, and the errors a person may get."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.server_args import prepare_server_args

from sglang_patches import api_key, named_model, ports, ready, serve
from sglang_patches.errors import PatchError

MODELS = Path(__file__).parents[1] / "models"


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "tiny", model_type="kimi_k25")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "tiny-draft", model_type="llama")


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_cpu_gets_a_float32_eagle3_server(tiny: Path, draft: Path) -> None:
    launch = serve.plan(str(tiny), str(draft), 1, 30000, [], cuda=False, environ={"PATH": "/bin"})
    assert launch.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert value(launch.argv, "--device") == "cpu"
    assert value(launch.argv, "--dtype") == "float32"
    assert value(launch.argv, "--speculative-algorithm") == "EAGLE3"
    assert value(launch.argv, "--speculative-draft-model-path") == str(draft)
    assert "--enable-metrics" in launch.argv
    assert "--trust-remote-code" not in launch.argv
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.env["PATH"] == "/bin"
    assert launch.name == "tiny"


def test_cuda_gets_no_cpu_setting(tiny: Path, draft: Path) -> None:
    launch = serve.plan(str(tiny), str(draft), 8, 30000, [], cuda=True, environ={})
    assert "--device" not in launch.argv
    assert value(launch.argv, "--tp-size") == "8"
    assert launch.env == {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize(("size", "limited"), [(1 << 20, True), (2 << 30, False)])
def test_only_a_small_model_gets_a_small_kv_cache_on_a_gpu(tiny: Path, size: int, limited: bool) -> None:
    with (tiny / "model.safetensors").open("wb") as file:
        file.truncate(size)  # sparse
    launch = serve.plan(str(tiny), "", 1, 30000, [], cuda=True, environ={})
    assert ("--max-total-tokens" in launch.argv) is limited
    assert any("KV cache limited to 65536 tokens" in note for note in launch.notes) is limited


def test_every_option_exists_in_the_pinned_upstream(tiny: Path, draft: Path) -> None:
    """Upstream's own parser takes what is given for the bundled and for the real model."""
    extra = ["--mem-fraction-static", "0.8"]
    cpu = serve.plan(str(tiny), str(draft), 1, 30001, extra, cuda=False, environ={})
    args = prepare_server_args(cpu.argv[3:])
    assert (args.port, args.speculative_num_draft_tokens, args.mem_fraction_static) == (30001, 4, 0.8)
    real = serve.plan("moonshotai/Kimi-K2.5", "", 8, 30001, [], cuda=True, environ={})
    assert prepare_server_args(real.argv[3:]).tool_call_parser == "kimi_k2"


def test_code_in_the_checkpoint_is_trusted_only_where_there_is_some_and_said(tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "real", model_type="kimi_k25", auto_map={"AutoConfig": "x.Y"})
    launch = serve.plan(str(own), "", 1, 30000, [], cuda=False, environ={})
    assert "--trust-remote-code" in launch.argv
    assert any("--trust-remote-code" in note for note in launch.notes)
    assert value(launch.argv, "--reasoning-parser") == "kimi_k2"


def test_what_the_environment_sets_is_kept_and_bytecode_is_written(tiny: Path) -> None:
    environ = {"OMP_NUM_THREADS": "7", "PYTHONDONTWRITEBYTECODE": "1"}
    launch = serve.plan(str(tiny), "", 1, 30000, [], cuda=False, environ=environ)
    assert launch.env["OMP_NUM_THREADS"] == "7"
    assert "PYTHONDONTWRITEBYTECODE" not in launch.env


def test_arguments_of_the_person_come_last_and_name_the_model(tiny: Path) -> None:
    extra = ["--served-model-name", "mine", "--dtype", "bfloat16"]
    launch = serve.plan(str(tiny), "", 1, 30000, extra, cuda=False, environ={})
    assert launch.argv[-4:] == extra
    assert launch.name == "mine"


@pytest.mark.parametrize(
    ("extra", "host"),
    [
        ([], "127.0.0.1"),
        (["--host", "0.0.0.0"], "127.0.0.1"),
        (["--host=10.0.0.7"], "10.0.0.7"),
        (["--host", "::"], "[::1]"),
        (["--host", "fe80::1"], "[fe80::1]"),
    ],
)
def test_readiness_is_asked_where_the_server_listens(tiny: Path, extra: list[str], host: str) -> None:
    assert ports.reachable(serve.plan(str(tiny), "", 1, 30000, extra, cuda=False, environ={}).bind) == host


def test_no_draft_serves_unspeculated_and_says_so(tiny: Path) -> None:
    launch = serve.plan(str(tiny), "", 1, 30000, [], cuda=False, environ={})
    assert "--speculative-algorithm" not in launch.argv
    assert any("without speculative decoding" in note for note in launch.notes)


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"has no config\.json, so it holds no model"):
        serve.plan(str(tmp_path), "", 1, 30000, [], cuda=False, environ={})


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "a/b/c", "my model"])
def test_a_path_that_is_not_there_is_refused(tiny: Path, name: str) -> None:
    for model, draft, what in ((name, "", "model"), (str(tiny), name, "draft")):
        with pytest.raises(PatchError, match=rf"^{what} {re.escape(name)}: there is no such folder"):
            serve.plan(model, draft, 1, 30000, [], cuda=False, environ={})


def test_a_hub_name_is_fetched_unless_the_hub_may_not_be_asked(tiny: Path) -> None:
    name = "nobody/no-such-model"
    launch = serve.plan(name, "", 1, 30000, [], cuda=False, environ={})
    assert f"{name} is not on this machine: the server asks the hub for it" in "\n".join(launch.notes)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        with pytest.raises(PatchError, match=f"model {name}: no folder has that name.*{variable}=1 keeps from asking"):
            serve.plan(name, "", 1, 30000, [], cuda=False, environ={variable: "1"})
        with pytest.raises(PatchError, match=f"unset {variable} and: hf download {name}"):
            serve.plan(str(tiny), name, 1, 30000, [], cuda=False, environ={variable: "yes"})
        serve.plan(name, "", 1, 30000, [], cuda=False, environ={variable: "0"})


def test_a_model_of_the_hub_that_is_here_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def cached(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
        asked.append((model, revision))
        return tmp_path if revision == "v2" else None

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(named_model, "local_folder", cached)
    extra = ["--revision", "v2", "--speculative-draft-model-revision=v3"]
    with pytest.raises(PatchError, match="draft c/d: "):
        serve.plan("a/b", "c/d", 1, 30000, extra, cuda=False, environ={"HF_HUB_OFFLINE": "1"})
    assert asked == [("a/b", "v2"), ("c/d", "v3")]


def test_a_model_is_looked_for_in_the_servers_cache(tmp_path: Path) -> None:
    """A recipe may give its server another HF_HOME than this process has."""
    kept = tmp_path / "hub/models--own--m"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    offline = {"HF_HUB_OFFLINE": "1"}
    assert named_model.absence("own/m", offline) is not None
    assert named_model.absence("own/m", {**offline, "HF_HOME": str(tmp_path)}) is None
    assert named_model.absence("own/m", {**offline, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": "/x"}) is None


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_configuration_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PatchError, match=r"config\.json: .*JSON"):
        serve.plan(str(tmp_path), "", 1, 30000, [], cuda=False, environ={})


def test_a_draft_in_the_targets_place_is_refused() -> None:
    """In the words of the server, which says so too (test/runtime/test_kimi_k25_eagle3_delegation.py)."""
    target, draft = str(MODELS / "tiny-kimi"), str(MODELS / "tiny-kimi-eagle3")

    def said(model: str, its_draft: str) -> str:
        with pytest.raises(PatchError) as refused:
            serve.plan(model, its_draft, 1, 30000, [], cuda=False, environ={})
        return str(refused.value)

    swapped = said(draft, target)
    assert swapped.startswith(f"the EAGLE-3 draft {target} does not fit the target {draft}:")
    assert f"remedy: swap them: {target} as the target, {draft} as its draft" in swapped
    assert said(draft, "").startswith(f"{draft} is no target:")
    assert "a whole model and no EAGLE-3 draft" in said(target, target)
    warned = {"SGLANG_PATCHES_DRAFT_CONTRACT": "warn"}
    assert draft in serve.plan(draft, target, 1, 30000, [], cuda=False, environ=warned).argv
    with pytest.raises(PatchError, match="expected 'refuse' or 'warn'"):
        serve.plan(draft, "", 1, 30000, [], cuda=False, environ={"SGLANG_PATCHES_DRAFT_CONTRACT": "no"})
    serve.plan(target, draft, 1, 30000, [], cuda=False, environ={})


def test_port_in_args_is_refused(tiny: Path) -> None:
    with pytest.raises(PatchError, match="PORT="):
        serve.plan(str(tiny), "", 1, 30000, ["--port", "1"], cuda=False, environ={})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "99999999"], "PORT= a number from 1 to 65535"),
        (["--port", "0"], "PORT= a number from 1 to 65535"),
        (["--tp", "0"], "TP=1 or more"),
        (["--tp", "two"], "TP=1 or more"),
    ],
)
def test_a_number_out_of_range_is_refused_at_once(
    tiny: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--model", str(tiny), *arguments])
    assert told in capsys.readouterr().err


def test_a_selection_without_the_cpu_kernels_is_told(tiny: Path) -> None:
    launch = serve.plan(str(tiny), "", 1, 30000, [], cuda=False, environ={"SGLANG_PATCHES": "none"})
    assert any("leaves out cpu-eagle3" in note for note in launch.notes)
    default = serve.plan(str(tiny), "", 1, 30000, [], cuda=False, environ={})
    assert not any("cpu-eagle3" in note for note in default.notes)


def test_an_unknown_patch_is_refused_before_the_server_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PATCHES", "bogus")
    monkeypatch.setattr(serve.selection, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="unknown patch: bogus"):
        serve.main(["--model", str(tiny)])


def test_a_taken_port_is_refused_at_once(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "sglang_patches.serve", "--model", str(tiny), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"serve: port {port} is in use on 127.0.0.1 by pid {os.getpid()} (" in done.stderr
    assert "another PORT=, or end that process" in done.stderr


def test_a_port_is_refused_that_is_taken_at_the_host_of_args(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "sglang_patches.serve", "--model", str(tiny), "--port", str(port), "--"]
        done = subprocess.run([*command, "--host", "127.0.0.2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {port} is in use on 127.0.0.2" in done.stderr


KEY = "correct-horse-battery"


@pytest.mark.parametrize("where", ["variable", "file", "another variable", "line only", "config"])
def test_the_lines_to_try_have_the_key_without_showing_it(where: str, tmp_path: Path) -> None:
    """By a real shell, with a curl that tells what it was given."""
    (tmp_path / "a key").write_text(KEY + "\n")
    (tmp_path / "server.yaml").write_text(f"api-key: {KEY}\n")
    curl = tmp_path / "curl"
    curl.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "import sys; print(sys.argv[1:])" "$@"\n')
    curl.chmod(0o755)
    environ = {
        "variable": {"SGLANG_API_KEY": KEY, "SGLANG_API_KEY_FILE": "/nowhere"},
        "file": {"SGLANG_API_KEY_FILE": str(tmp_path / "a key")},
        "another variable": {"SGLANG_API_KEY": "of-another-server"},
    }.get(where, {})
    words = ["--config", str(tmp_path / "server.yaml")] if where == "config" else ["--mem", "1", "--api-key", KEY]
    header = api_key.header(words, environ)
    told = ready.what_to_try("http://127.0.0.1:31234", "m", header)
    assert KEY not in told
    tried, info = (line for line in told.splitlines() if "curl" in line)
    assert ("export SGLANG_API_KEY=..." in told) is (where not in ("variable", "file"))
    for line in (tried, info.partition(": ")[2]):
        shell = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
        if header[1]:
            shell["SGLANG_API_KEY"] = KEY  # as that line asks
        done = subprocess.run(["sh", "-c", line], env=shell, capture_output=True, text=True, check=True)
        assert f"'Authorization: Bearer {KEY}'" in done.stdout


@pytest.mark.parametrize("words", [[], ["--api-key="], ["--api-key", ""], ["--admin-api-key", "x"]])
def test_the_lines_to_try_of_a_server_without_a_key(words: list[str]) -> None:
    assert api_key.header(words, {"SGLANG_API_KEY": "of-another-server"}) == ("", "")
    assert ready.what_to_try("http://127.0.0.1:31234", "m", ("", "")).startswith("Try:\n  curl -s http://")


def test_the_line_to_try_is_a_valid_shell_command() -> None:
    words = shlex.split(ready.try_line("http://127.0.0.1:31234", "it's"))
    assert words[0] == "curl"
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "http://127.0.0.1:31234/v1/chat/completions" in words
