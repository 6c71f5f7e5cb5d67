"""One turn against a server that misbehaves on request; upstream's load generator is the real one."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sglang_patches import processes
from sglang_patches.bench import arms, load, server, workload
from sglang_patches.bench.model import Arm
from sglang_patches.bench.turns import Setup, one_turn
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

Make = Callable[..., Setup]


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
    assert not left


def arm(series: Series, fake: str, *words: str) -> Arm:
    return arms.parse("a", ",".join([fake, *words]), series)


def test_a_turn_tells_what_happened(series: Series, fake: str, setup: Make) -> None:
    made = setup(count=3, output_tokens=9, warm_up=1)
    said: list[str] = []
    turn, samples = one_turn(made, arm(series, fake, "env:FAKE_CHUNK=2", "env:FAKE_TOKEN_S=0.02"), 4, 2, said.append)
    assert [sample.prompt for sample in samples] == [0, 1, 2]
    for sample, ids in zip(samples, made.prompts.ids, strict=True):
        assert (sample.turn, sample.arm, sample.prompt_tokens, sample.output_tokens) == (4, "a", 4, 9)
        expected = [(sum(ids) + at) % 1000 for at in range(9)]
        assert sample.output_sha256 == load.hash_ids(expected)
        assert sample.verify_passes == len(sample.itl) == 4
        assert sample.ttft + sum(sample.itl) == pytest.approx(sample.latency)
        assert min(sample.itl) > 0.01
        assert not sample.error
    assert samples[0].sent == 0 < samples[1].sent < samples[2].sent
    assert turn.figures["accept_length"] == 2
    assert 20 < turn.figures["verify_ms"] < 200
    assert turn.figures["tokens_per_s"] == pytest.approx(27 / (samples[2].sent + samples[2].latency))
    assert (turn.index, turn.block, turn.arm, turn.document) == (4, 2, "a", None)
    assert turn.server_args == {"tp_size": 1, "port": turn.server_args["port"]} if turn.server_args else False
    assert (made.folder / turn.log).is_file()
    assert {text.partition(",")[0] for text in said} >= {"warming up", "measuring"}


def test_tokens_that_come_with_the_first_one_take_no_time_of_their_own(series: Series, fake: str, setup: Make) -> None:
    words = ("env:FAKE_CHUNK=2", "env:FAKE_FIRST=5", "env:FAKE_TOKEN_S=0.02")
    turn, samples = one_turn(setup(output_tokens=9), arm(series, fake, *words), 0, 0)
    for sample in samples:
        assert (sample.first_tokens, sample.first_passes, sample.verify_passes) == (5, 2, 4)
    took = sum(sample.latency - sample.ttft for sample in samples)
    assert turn.figures["verify_ms"] == pytest.approx(1e3 * took / 4)
    assert turn.figures["tpot_ms_p50"] == pytest.approx(turn.figures["verify_ms"] / 2, rel=0.2)
    assert turn.figures["accept_length"] == 2


def test_a_server_without_a_tokenizer_is_measured_too(series: Series, fake: str, setup: Make) -> None:
    made = setup()
    turn, samples = one_turn(made, arm(series, fake, "env:FAKE_NO_TEXT=1", "env:FAKE_INCREMENTAL=1"), 0, 0)
    for sample, ids in zip(samples, made.prompts.ids, strict=True):
        assert sample.output_sha256 == load.hash_ids([(sum(ids) + at) % 1000 for at in range(8)])
    assert all(sample.output_tokens == 8 and sample.ttft > 0 and len(sample.itl) == 7 for sample in samples)
    assert "verify_ms" not in turn.figures


def test_upstream_is_as_before_afterwards(series: Series, fake: str, setup: Make) -> None:
    load.prepare()
    from sglang.benchmark import serving

    before = dict(serving.ASYNC_REQUEST_FUNCS), serving._create_bench_client_session
    one_turn(setup(), arm(series, fake), 0, 0)
    assert before == (dict(serving.ASYNC_REQUEST_FUNCS), serving._create_bench_client_session)


def test_death_before_ready_is_told_at_once_with_the_lines_that_tell(series: Series, fake: str, setup: Make) -> None:
    started = time.monotonic()
    with pytest.raises(PatchError) as error:
        one_turn(setup(ready_timeout=600), arm(series, fake, "env:FAKE_DIE=start"), 3, 0)
    assert time.monotonic() - started < 60
    text = str(error.value)
    assert text.startswith("turn 3 (arm a, ")
    assert "exit code 7" in text
    assert "| ValueError: the planted mistake" in text
    assert "| bye" not in text
    assert str(setup().folder / "logs/003-a.log") in text


def test_never_ready(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(PatchError, match=r"not ready after 2 s(.|\n)*--ready-timeout"):
        one_turn(setup(ready_timeout=2), arm(series, fake, "env:FAKE_NEVER_READY=1"), 0, 0)


def test_death_while_measured(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(PatchError, match=r"the server ended while it was measured(.|\n)*the planted end"):
        one_turn(setup(), arm(series, fake, "env:FAKE_DIE=2"), 0, 0)


def test_death_in_the_middle_of_telling(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(
        PatchError, match=r"the server ended when it was asked for /server_info|/server_info: Incomplete"
    ):
        one_turn(setup(), arm(series, fake, "env:FAKE_CUT=1"), 0, 0)


def test_a_proxy_of_the_shell_is_not_asked(
    series: Series, fake: str, setup: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    turn, _samples = one_turn(setup(ready_timeout=20), arm(series, fake), 0, 0)
    assert turn.figures
    assert os.environ["NO_PROXY"] == "example.org"
    assert "no_proxy" not in os.environ


def test_one_that_does_not_want_to_wait_leaves_nothing_either(
    series: Series, fake: str, setup: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, child = setup(), tmp_path / "child"
    words = ("env:FAKE_STUBBORN=1", f"env:FAKE_CHILD={child}")

    def impatient(seconds: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        server.running(
            arm(series, fake, *words), model=made.model, draft="", tp=1, shared=(), log=tmp_path / "x.log",
            environ=made.environ,
        ) as it,
    ):  # fmt: skip
        it.wait_ready(60)
        monkeypatch.setattr(server.time, "sleep", impatient)
    assert it.process.poll() == -signal.SIGKILL
    assert _gone(int(child.read_text()))


def test_a_number_that_became_anothers_is_left_alone(
    series: Series, fake: str, setup: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = setup()
    with server.running(
        arm(series, fake), model=made.model, draft="", tp=1, shared=(), log=tmp_path / "x.log", environ=made.environ
    ) as it:
        it.wait_ready(60)
        os.kill(it.process.pid, signal.SIGKILL)
        it.process.wait()
        other = subprocess.Popen(["sleep", "600"])
        try:
            monkeypatch.setattr(processes, "tree", lambda pid: [psutil.Process(other.pid)])
            it.stop()
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


def test_a_hanging_server(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(PatchError, match=r"took longer than 1 s(.|\n)*--turn-timeout"):
        one_turn(setup(turn_timeout=1), arm(series, fake, "env:FAKE_TOKEN_S=30"), 0, 0)


def test_failed_requests_are_measured_once_more(series: Series, fake: str, setup: Make, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    turn, samples = one_turn(setup(), arm(series, fake, f"env:FAKE_FAIL={starts}"), 0, 0)
    assert len(starts.read_text().split()) == 2
    assert not any(sample.error for sample in samples)
    assert turn.log == "logs/000-a-2.log"
    assert turn.retried.startswith("2 of 2 requests failed: ")
    assert "planted failure" in turn.retried


def test_failed_twice_is_an_error(series: Series, fake: str, setup: Make, tmp_path: Path) -> None:
    words = (f"env:FAKE_FAIL={tmp_path / 'starts'}", "env:FAIL_STARTS=5")
    with pytest.raises(PatchError, match=r"2 of 2 requests failed(.|\n)*prompt 0: .*planted failure"):
        one_turn(setup(), arm(series, fake, *words), 0, 0)


def test_a_prompt_of_another_length_is_a_failed_request(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(PatchError, match="the server read 5 prompt tokens, 4 were sent"):
        one_turn(setup(), arm(series, fake, "env:FAKE_ADDED=1"), 0, 0)


def test_requests_in_flight(series: Series, fake: str, setup: Make) -> None:
    prompts = workload.draw(4, 5, 4096, seed=1)
    made = setup(prompts=prompts, workload=prompts.workload(8, 2, 0))
    _turn, samples = one_turn(made, arm(series, fake, "env:FAKE_TOKEN_S=0.05"), 0, 0)
    edges = [(s.sent, 1) for s in samples] + [(s.sent + s.latency, -1) for s in samples]
    flying = list(itertools.accumulate(change for _at, change in sorted(edges)))
    assert max(flying) == 2
    assert len({sample.output_sha256 for sample in samples}) == 5


def test_a_taken_port_is_tried_again(series: Series, fake: str, setup: Make, tmp_path: Path) -> None:
    said: list[str] = []
    turn, _samples = one_turn(
        setup(), arm(series, fake, f"env:FAKE_PORT_TAKEN={tmp_path / 'taken'}"), 0, 0, said.append
    )
    assert turn.figures
    assert any("port was taken" in text for text in said)


def test_anothers_server_on_our_port_is_not_measured(
    series: Series, fake: str, setup: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = setup()
    with server.running(
        arm(series, fake), model=made.model, draft="", tp=1, shared=(), log=tmp_path / "other.log", environ=made.environ
    ) as other:
        other.wait_ready(60)
        ports = [int(other.url.rpartition(":")[2]), server.free_port()]
        monkeypatch.setattr(server, "free_port", lambda _host: ports.pop(0))
        said: list[str] = []
        turn, _samples = one_turn(made, arm(series, fake, "env:FAKE_LATE=5"), 0, 0, said.append)
    assert turn.figures
    assert any("port was taken" in text for text in said)


def test_children_that_outlive_the_server_are_ended(series: Series, fake: str, setup: Make, tmp_path: Path) -> None:
    child = tmp_path / "child"
    one_turn(setup(), arm(series, fake, f"env:FAKE_CHILD={child}"), 0, 0)
    assert _gone(int(child.read_text()))


def test_patches_cannot_be_selected_where_there_are_none(series: Series, fake: str, setup: Make) -> None:
    with pytest.raises(PatchError, match="has no sglang-patches"):
        one_turn(setup(), arm(series, fake, "none"), 0, 0)


def test_a_pristine_interpreter_gets_nothing_of_ours(series: Series, fake: str) -> None:
    environ = {"PYTHONPATH": "/x", "SGLANG_PATCHES": "all", "SGLANG_PATCHES_DIR": "/y", "HOME": "/h"}
    argv, env, _name, _host, port = server.command(
        arm(series, fake, "env:HOME=", "env:X=1"), model="owner/m", draft="", tp=2, shared=["--x"], environ=environ
    )
    assert not [name for name in env if name.startswith(("SGLANG_PATCHES", "PYTHONPATH", "HOME"))]
    assert env["X"] == "1"
    assert argv[0] == fake.removeprefix("python:")
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    assert argv[argv.index("--port") + 1] == str(port)
    assert argv[-1] == "--x"


def test_an_arm_of_ours_gets_its_selection_and_its_arguments_last(series: Series) -> None:
    one = arms.parse("a", "none,+provenance,arg:--y=1", series)
    environ = {"SGLANG_PATCHES": "all", "PYTHONPATH": "/x"}
    argv, env, *_rest = server.command(one, model="owner/m", draft="", tp=1, shared=["--x"], environ=environ)
    assert (env["SGLANG_PATCHES"], env["PYTHONPATH"]) == ("none,+provenance", "/x")
    assert argv[0] == sys.executable
    assert argv[-2:] == ["--x", "--y=1"]
    defaults = arms.parse("a", "default", series)
    _argv, env, *_rest = server.command(defaults, model="owner/m", draft="", tp=1, shared=[], environ=environ)
    assert "SGLANG_PATCHES" not in env


@pytest.mark.parametrize(
    ("how", "word", "written"),
    [
        (signal.SIGKILL, "FAKE_NEVER_READY=1", ".log"),
        (signal.SIGTERM, "FAKE_NEVER_READY=1", ".log"),
        (signal.SIGTERM, "FAKE_TOKEN_S=60", ".load"),
        (signal.SIGINT, "FAKE_TOKEN_S=60", ".load"),
    ],
)
def test_the_server_ends_with_us_however_we_end(
    how: signal.Signals, word: str, written: str, series: Series, fake: str, tmp_path: Path, setup: Make
) -> None:
    code = f"""
        import sys, time
        from sglang_patches.bench import arms, options
        from sglang_patches.bench.journal import Journal, Setup
        from sglang_patches.bench import workload
        from pathlib import Path
        p = workload.draw(4, 2, 4096, seed=1)
        s = Setup("owner/m", "", 1, (), p, p.workload(8, 1, 1), Path({str(tmp_path / "out")!r}))
        with Journal(s, "ab", {{}}) as journal:
            journal.turn(arms.parse("a", {fake + ",env:" + word!r}, options.installed_series()), 0)
    """
    ours = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        log = tmp_path / f"out/logs/000-a{written}"
        _until(lambda: log.exists() and bool(psutil.Process(ours.pid).children()), 60)
        servers = psutil.Process(ours.pid).children(recursive=True)
        os.kill(ours.pid, how)
        ours.wait(60)
        _gone, alive = psutil.wait_procs(servers, timeout=30)
        assert servers
        assert not alive
    finally:
        ours.kill()


def _gone(pid: int) -> bool:
    """Whether it has ended, at the first look; nothing may be there to ask a lost child for its exit code."""
    return not processes.alive(processes.tree(pid))


def _until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_server_that_somebody_killed_is_told_with_where_to_look(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.kill()
    process.wait()
    (tmp_path / "log").write_text("all is well\n")
    with pytest.raises(PatchError, match=r"\(signal SIGKILL\)\n(.*\n)*  remedy     see who ended it: the kernel"):
        server.Server(process, "http://127.0.0.1:1", "m", tmp_path / "log").check_alive("while it was measured")
