"""launch: a recipe, the command line over it, doctor first, and the exact line that is executed."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from sglang.srt.server_args import ServerArgs
from typer.testing import CliRunner

from sglang_patches import launch, selection, series
from sglang_patches.bench.server import free_port
from sglang_patches.cli import app
from sglang_patches.doctor import app as doctor
from sglang_patches.doctor import models, read
from sglang_patches.errors import PatchError
from sglang_patches.upstream import locate

ROOT = Path(__file__).parents[2]


def recipe(**changes: Any) -> launch.Recipe:
    return launch.Recipe(**{"description": "x", "model": "a/model", "draft": "a/draft", "tp": 8, **changes})


def test_the_recipes_are_whole() -> None:
    assert launch.names() == ["kimi-k2.5-8xh200", "kimi-k2.5-8xpcie", "tiny-cpu"]
    upstream = locate()
    assert upstream is not None
    for name in launch.names():
        made = launch.load(name)
        assert made.draft
        assert selection.select(series.load(upstream.release), made.patches or "")


def test_arguments_are_those_of_upstream() -> None:
    """By upstream's list of fields, read as text: importing it takes many seconds."""
    upstream = locate()
    assert upstream is not None
    listed = (upstream.read("sglang/srt/arg_groups/field_order.py") or b"").decode()
    for name in launch.names():
        for argument in launch.load(name).arguments:
            assert f'"{argument.removeprefix("--").replace("-", "_")}"' in listed, argument


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ([], {"model": "a/model", "draft": "a/draft", "tp": 8, "port": 30000}),
        (
            ["--model", "b/m", "--draft", "b/d", "--tp", "4", "--port", "1234"],
            {"model": "b/m", "draft": "b/d", "tp": 4},
        ),
        (
            ["--model-path=b/m", "--speculative-draft-model-path=", "--tp-size=2"],
            {"model": "b/m", "draft": "", "tp": 2},
        ),
        (
            ["--mem-fraction-static", "0.8"],
            {"memory_fraction": 0.8, "extra": ("--x", "1", "--mem-fraction-static", "0.8")},
        ),
        (
            ["--x", "2", "--new"],
            {"extra": ("--mem-fraction-static", "0.7", "--x", "2", "--new"), "memory_fraction": 0.7},
        ),
        (["--context-length", "99"], {"context_length": 99}),
        (["--x=3"], {"extra": ("--mem-fraction-static", "0.7", "--x=3")}),
        (["--base-gpu-id", "4", "--gpu-id-step=2"], {"base_gpu": 4, "gpu_step": 2}),
    ],
)
def test_the_line_wins(line: list[str], wanted: dict[str, Any]) -> None:
    made = recipe(arguments={"--mem-fraction-static": 0.7, "--x": 1, "--off": False})
    combined = launch.combine(made, line, {})
    assert {key: getattr(combined, key) for key in wanted} == wanted


def test_switches_and_environment() -> None:
    made = recipe(arguments={"--enable-x": True}, environment={"A": "1", "B": "1"}, patches="+x", device="cpu")
    combined = launch.combine(made, [], {"B": "2"})
    assert combined.extra == ("--enable-x",)
    assert combined.environ == {"A": "1", "B": "2", "SGLANG_PATCHES": "+x"}
    assert launch.combine(made, [], {"SGLANG_PATCHES": "none"}).environ["SGLANG_PATCHES"] == "none"
    assert combined.device == "cpu"


def test_options_that_take_several_values(tmp_path: Path) -> None:
    """As upstream's own parser reads them; the line still wins."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "description: x\nmodel: a/m\narguments:\n  --cuda-graph-bs-decode: [1, 2, 4]\n  --log-level: info\n"
    )
    combined = launch.combine(launch.load(str(file)), [], {})
    assert combined.extra == ("--cuda-graph-bs-decode", "1", "2", "4", "--log-level", "info")
    plan = launch.plan(combined, cuda=True)
    read = argparse.ArgumentParser()
    ServerArgs.add_cli_args(read)
    given = read.parse_args(plan.argv[3:])
    assert (given.cuda_graph_bs_decode, given.log_level) == ([1, 2, 4], "info")
    assert launch.combine(launch.load(str(file)), ["--cuda-graph-bs-decode", "8"], {}).extra == (
        "--log-level", "info", "--cuda-graph-bs-decode", "8",
    )  # fmt: skip
    for wrong, said in (([], "an empty list"), (["--x"], "'--x' in its list"), ([True], "True in its list")):
        with pytest.raises(ValidationError, match=said):
            recipe(arguments={"--cuda-graph-bs-decode": wrong})


def test_where_the_ranks_are_goes_to_the_server_and_to_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(doctor, "run", lambda *_, **named: told.update(named) or True)
    executed: list[Any] = []
    line = ["--port", "29418", "--base-gpu-id", "4", "--gpu-id-step", "2"]
    launch.run("tiny-cpu", line, dry_run=False, with_doctor=True, execute=lambda *call: executed.append(call))
    assert (told["base_gpu"], told["gpu_step"]) == (4, 2)
    argv = executed[0][1]
    assert (argv[argv.index("--base-gpu-id") + 1], argv[argv.index("--gpu-id-step") + 1]) == ("4", "2")
    made = recipe(arguments={"--base-gpu-id": 3})
    combined = launch.combine(made, [], {})
    assert (combined.base_gpu, combined.extra) == (3, ("--base-gpu-id", "3"))
    assert launch.combine(made, ["--base-gpu-id=0"], {}).base_gpu == 0


@pytest.mark.parametrize(
    "line",
    [
        ["--tp", "0"],
        ["--tp", "x"],
        ["--port"],
        ["--port", "70000"],
        ["--base-gpu-id", "-1"],
        ["--gpu-id-step", "0"],
        *(["--mem-fraction-static", value] for value in ("much", "0", "5", "nan")),
    ],
)
def test_unusable_values(line: list[str]) -> None:
    with pytest.raises(PatchError, match="launch: argument"):
        launch.combine(recipe(), line, {})


@pytest.mark.parametrize(
    "arguments", [{"--context-length": "64k"}, {"--context-length": True}, {"--mem-fraction-static": 5}]
)
def test_unusable_values_of_a_recipe(arguments: dict[str, Any]) -> None:
    with pytest.raises(PatchError, match=f"launch: argument {next(iter(arguments))}: "):
        launch.combine(recipe(arguments=arguments), [], {})


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("context-length", "write '--context-length'"),
        ("--port", "a key of its own in a recipe: port"),
        ("--tensor-parallel-size", "a key of its own in a recipe: tp"),
        ("--model-path", "a key of its own in a recipe: model"),
    ],
)
def test_arguments_that_a_recipe_cannot_have(argument: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        recipe(arguments={argument: 1})


def test_doctor_examines_the_environment_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the recipe sets, not only what this process has: selection of patches, and what the probe inherits."""
    probed: list[Mapping[str, str]] = []

    def probe(environ: Mapping[str, str]) -> dict[str, Any]:
        probed.append(environ)
        return {}

    monkeypatch.setattr(read, "probe", probe)
    monkeypatch.delenv("SGLANG_PATCHES", raising=False)
    made = {"description": "x", "model": "test/models/tiny-kimi", "patches": "-strict-api", "environment": {"A": "b c"}}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(made))
    launch.run(str(file), ["--port", "29418"], dry_run=True, with_doctor=True)
    (environ,) = probed
    assert (environ["A"], environ["SGLANG_PATCHES"]) == ("b c", "-strict-api")
    printed = capfd.readouterr().out
    assert "strict-api off" in printed
    line = next(line for line in printed.splitlines() if line.startswith("launch: A="))
    # As a shell wants it: quoted behind the sign.
    assert line.startswith("launch: A='b c' ")
    assert " SGLANG_PATCHES=-strict-api " in line
    assert shlex.split(line.removeprefix("launch: "))[0] == "A=b c"


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"description": "x", "model": "m", "tensor_parallel": 8}))
    with pytest.raises(PatchError, match="tensor_parallel"):
        launch.load(str(file))
    file.write_text("a: [")
    with pytest.raises(PatchError, match="no recipe"):
        launch.load(str(file))
    with pytest.raises(PatchError, match=r"known +kimi-k2\.5-8xh200, kimi-k2\.5-8xpcie, tiny-cpu"):
        launch.load("tiny")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(PatchError, match=r"folder\.yaml cannot be read: Is a directory"):
        launch.load(str(tmp_path / "folder.yaml"))


def test_a_folder_of_the_checkout_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.place("test/models/tiny-kimi") == str(ROOT / "test/models/tiny-kimi")
    assert launch.place("owner/model") == "owner/model"
    assert launch.place("") == ""


def test_dry_run_prints_the_line_that_would_be_executed(capfd: pytest.CaptureFixture[str]) -> None:
    executed: list[tuple[str, list[str], dict[str, str]]] = []

    def execute(*call: Any) -> None:
        executed.append(call)

    assert launch.run("tiny-cpu", ["--port", "29418"], dry_run=True, with_doctor=False, execute=execute)
    assert executed == []
    printed = capfd.readouterr().out.splitlines()[-1].removeprefix("launch: ")
    assert launch.run("tiny-cpu", ["--port", "29418"], dry_run=False, with_doctor=False, execute=execute)
    ((program, argv, env),) = executed
    words = shlex.split(printed)
    assert words[-len(argv) :] == argv
    assert program == argv[0]
    assert "--port 29418" in printed
    assert "--device cpu" in printed
    for word in words[: -len(argv)]:
        key, _, value = word.partition("=")
        assert env[key] == value
        assert os.environ.get(key) != value


def test_doctor_comes_first_and_a_failure_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-K2.5 on eight GPUs, on a machine that has none."""

    def execute(*_: object) -> None:  # or this process would become the server, and no test would say so
        pytest.fail("a server was started")

    monkeypatch.setattr(os, "execvpe", execute)
    monkeypatch.setenv("SGLANG_API_KEY", "k")
    if selection.has_gpu():
        pytest.skip("this machine may have the GPUs that the recipe wants")
    done = CliRunner().invoke(app, ["launch", "kimi-k2.5-8xpcie", "--log-level", "warning"])
    assert done.exit_code == 1, done.output
    printed = done.output
    assert "0 visible, tensor parallel size is 8" in printed
    line = next(row for row in printed.splitlines() if "sglang.launch_server" in row)
    assert "--log-level warning" in line
    assert "--tp-size 8" in line
    assert "--device cpu" not in line
    assert printed.index("0 visible") < printed.index("sglang.launch_server")
    assert "--no-doctor" in printed


def weigh_a_terabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor finds too little memory, which is a failure."""
    monkeypatch.setattr(read, "probe", lambda _: {})
    monkeypatch.setattr(models, "weights", lambda _: (1 << 50, 0))


@pytest.mark.parametrize(
    ("line", "counts"),
    [([], True), (["--pp-size", "2"], False), (["--quantization=fp8"], False), (["--nnodes", "2"], False)],
)
def test_what_doctor_does_not_reckon_starts_all_the_same(
    line: list[str], counts: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    weigh_a_terabyte(monkeypatch)
    healthy = launch.run("tiny-cpu", ["--port", "29418", *line], dry_run=True, with_doctor=True)
    printed = capfd.readouterr().out
    assert "failure" in printed
    assert (healthy, "does not reckon" in printed) == (not counts, not counts), printed


def test_gpus_do_not_concern_a_server_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--device", "cuda", "--device", "cpu"]
    monkeypatch.setattr(selection, "has_gpu", lambda: True)
    assert "sgl_kernel" in launch.not_reckoned(argv)["--device cpu"]
    assert launch.not_reckoned(argv[:2]) == {}
    monkeypatch.setattr(selection, "has_gpu", lambda: False)
    assert launch.not_reckoned(argv) == {}


def test_a_recipe_for_cuda_starts_nothing_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection, "has_gpu", lambda: False)
    monkeypatch.setattr(read, "probe", lambda _: {})
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"description": "x", "model": "test/models/tiny-kimi", "device": "cuda"}))
    assert not launch.run(str(file), ["--port", "29418"], dry_run=True, with_doctor=True)
    assert "is for CUDA (device: cuda), and this machine has no GPU" in capfd.readouterr().out


def test_a_port_in_use_starts_nothing_without_doctor_either() -> None:
    """Upstream would warm up against whoever holds it, for minutes."""
    executed: list[Any] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(PatchError, match=f"port {port} is in use"):
            launch.run("tiny-cpu", ["--port", port], False, False, execute=lambda *call: executed.append(call))
    assert not executed


def test_the_port_is_looked_at_where_the_server_will_listen(tmp_path: Path) -> None:
    """By --host on the line, in the recipe, or in the file of --config; 127.0.0.1 alone would look free."""
    executed: list[Any] = []
    config = tmp_path / "server.yaml"
    config.write_text("host: 127.0.0.2\n")
    made = tmp_path / "mine.yaml"
    arguments = {"--host": "127.0.0.2"}
    made.write_text(yaml.safe_dump({"description": "x", "model": "test/models/tiny-kimi", "arguments": arguments}))

    def run(name: str, *line: str) -> None:
        launch.run(name, ["--port", port, *line], False, False, execute=lambda *call: executed.append(call))

    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run("tiny-cpu")
        assert len(executed) == 1
        refused = rf"port {port} is in use on 127\.0\.0\.2 by pid {os.getpid()} \("
        for name, line in (
            ("tiny-cpu", ("--host=127.0.0.2",)),
            (str(made), ()),
            ("tiny-cpu", ("--config", str(config))),
        ):
            with pytest.raises(PatchError, match=refused):
                run(name, *line)
    assert len(executed) == 1


@pytest.mark.parametrize(("line", "told"), [([], True), (["--node-rank", "1", "--nnodes", "2"], False)])
def test_a_request_to_try_is_told_as_serve_tells_it(
    line: list[str], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher that make serve has, where this server listens and with its key; the second node answers nobody."""
    announced: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *_: None)
    monkeypatch.setattr(launch.ready, "announce", lambda *call: announced.append(call))
    monkeypatch.setenv("SGLANG_API_KEY", "k")
    monkeypatch.setattr(launch.api_key, "hand_over", lambda keys: [])
    port = free_port()
    launch.run("tiny-cpu", ["--port", str(port), "--host", "0.0.0.0", *line], False, False)
    key = ' -H "Authorization: Bearer $SGLANG_API_KEY"'
    assert announced == ([("launch", f"http://127.0.0.1:{port}", "tiny-kimi", (key, ""))] if told else [])


def test_usage_errors() -> None:
    assert CliRunner().invoke(app, ["launch", "nothing"]).exit_code == 2
    done = CliRunner().invoke(app, ["launch", "tiny-cpu", "--model", "/no/such/folder"])
    assert done.exit_code == 2
    assert "model /no/such/folder: there is no such folder; already /no is not there" in done.output
