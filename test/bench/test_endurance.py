"""benchmark/endurance without a server: how it judges answers and memory, what a fuzz sends, what is reported."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import requests
from benchmark.endurance import fuzz, fuzz_cases, memory, plan, run, scenarios, servers
from benchmark.endurance.client import Client
from benchmark.endurance.clock import Clock

from sglang_patches.bench.report import page
from sglang_patches.errors import PatchError

MIB = 1 << 20


def noise(samples: int, seed: int) -> np.ndarray:
    """Deviations of a process tree's size: a few MiB, and each like the last one."""
    drawn, out = np.random.default_rng(seed), np.zeros(samples)
    for at in range(1, samples):
        out[at] = 0.8 * out[at - 1] + drawn.normal(0, 2 * MIB)
    return out


@pytest.mark.parametrize(("leak", "verdict"), [(0, "flat"), (200, "grows"), (32, "undecided")])
def test_memory_is_judged_by_its_slope(leak: float, verdict: str) -> None:
    done = np.linspace(200, 1000, 200)
    found = memory.growth(done, 3e9 + leak * MIB * done / 1000 + noise(200, 1))
    assert found["verdict"] == verdict
    assert found["low"] < found["slope"] < found["high"]


def test_the_interval_of_the_slope_holds_the_truth_about_as_often_as_it_says() -> None:
    """95% of intervals, less what blocks of a short series cost."""
    done = np.linspace(200, 1000, 200)
    found = [memory.growth(done, 3e9 + noise(200, seed)) for seed in range(60)]
    assert sum(one["low"] < 0 < one["high"] for one in found) >= 48


def test_too_few_samples_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="12 samples"):
        memory.growth([1, 2, 3], [1, 2, 3])
    rows = run.memory_rows([{"done": 1, "rss": 1, "uss": 1, "by": {"sglang::scheduler": 1}}], 1)
    assert [row["of"] for row in rows] == ["RSS", "USS", "USS of sglang::scheduler"]
    assert rows[0]["verdict"].startswith("undecided")
    assert run.memory_rows([], 1)[0]["verdict"].startswith("undecided")


def test_the_size_of_a_tree_is_that_of_its_processes() -> None:
    mine = psutil.Process()
    found = memory.size([mine, mine])
    assert found["processes"] == 2
    assert sum(found["by"].values()) == found["uss"] > 10 * MIB
    assert found["rss"] >= found["uss"]


def test_memory_that_cannot_be_read_is_told() -> None:
    """Of a sum without it, a leak would be flat."""

    class Another(psutil.Process):
        def memory_full_info(self) -> Any:
            raise psutil.AccessDenied(self.pid)

    with pytest.raises(PatchError, match="0 samples"), memory.Watch(lambda: [Another()], lambda: 0) as watch:
        watch._thread.join(10)


def test_a_part_of_the_server_that_went_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.Tiny(tmp_path / "log")
    server.parts = {1: "sglang::detokenizer"}
    monkeypatch.setattr(server, "tree", list)
    monkeypatch.setattr(server, "process", SimpleNamespace(poll=lambda: None), raising=False)
    assert server.troubles() == ["process 1 (sglang::detokenizer) is gone"]
    server.tmp.rmdir()


@contextmanager
def answering_raw(answer: bytes) -> Iterator[str]:
    """A server that writes these bytes to whoever asks, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def chunked(piece: bytes, end: bytes = b"\r\n0\r\n\r\n") -> bytes:
    """An answer of one chunk."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(piece) + piece + end


EVENT = b'data: {"error": {"message": "x", "code": %d}}\n\n'
FUZZED: dict[str, tuple[bytes, str, int]] = {
    "whole": (chunked(b"{}"), "200", 0),
    "broken off": (chunked(b"{}", end=b""), "broken", 1),
    "no answer": (b"", "broken", 1),
    "a server error in a stream": (chunked(EVENT % 500), "5xx in a stream", 1),
    "a refusal in a stream": (chunked(EVENT % 400), "200", 0),
    "a server error": (b"HTTP/1.1 500 X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", "500", 1),
}


@pytest.mark.parametrize("case", FUZZED)
def test_answers_to_a_fuzz_are_judged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, status, failures = FUZZED[case]
    monkeypatch.setattr(fuzz.httpx, "get", lambda *_, **__: None)  # it lives
    fuzzer = object.__new__(fuzz.Fuzzer)
    fuzzer.session, fuzzer.failures = requests.Session(), []
    fuzzer.session.trust_env = False
    with answering_raw(answer) as fuzzer.url:
        asked = SimpleNamespace(as_transport_kwargs=lambda base_url: {"method": "GET", "url": base_url})
        assert fuzzer._send("GET /", asked) == status
    assert len(fuzzer.failures) == failures


def test_a_plan_is_the_same_again_and_has_every_kind() -> None:
    prompts = plan.texts(4)
    one, same, other = (plan.make(1000, prompts, (8, 32), seed) for seed in (1, 1, 2))
    assert one == same != other
    assert len(one) == 1000
    assert {planned.kind for planned in one} == set(plan.KINDS)
    assert {planned.bad for planned in one if planned.kind == "bad"} == set(plan.BAD)
    assert {(planned.endpoint, planned.stream) for planned in one if planned.kind == "whole"} == {
        (endpoint, stream) for endpoint in plan.ENDPOINTS for stream in (True, False)
    }


@contextmanager
def answering(status: int, text: str) -> Iterator[str]:
    """A server that gives the same answer to everything; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps({'text': text})}\n\n" for text in texts) + end


WHOLE = json.dumps({"text": "the sea"})
JUDGED: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "right": ("whole", {}, 200, WHOLE, "equal"),
    "another text": ("whole", {}, 200, json.dumps({"text": "the see"}), "wrong"),
    "a server error": ("whole", {}, 500, "broken", "status"),
    "a server error through openai's client": ("whole", {"endpoint": "completions"}, 500, "broken", "status"),
    "a server error in a stream": ("whole", {"stream": True}, 500, "broken", "status"),
    "right stream": ("whole", {"stream": True}, 200, stream("the", "the sea"), "equal"),
    "stream without an end": ("whole", {"stream": True}, 200, stream("the sea", end=""), "lost"),
    "stream that takes back": ("whole", {"stream": True}, 200, stream("a", "the sea"), "lost"),
    "cut at the stop string": ("stop", {"where": 0.5}, 200, json.dumps({"text": "the"}), "equal"),
    "not cut at the stop string": ("stop", {"where": 0.5}, 200, WHOLE, "wrong"),
    "cancelled after a right beginning": ("cancel", {"stream": True}, 200, stream("the", "the sea"), "cancelled"),
    "cancelled after a wrong beginning": ("cancel", {"stream": True}, 200, stream("tho", "the sea"), "wrong"),
    "bad and refused": ("bad", {"body": {"input_ids": [-1]}}, 400, "no", "refused"),
    "bad and served": ("bad", {"body": {"input_ids": [-1]}}, 200, WHOLE, "accepted"),
    "bad and turned away": ("bad", {"body": {"input_ids": [-1]}}, 429, "busy", "status"),
    "an answer of another form": ("whole", {"endpoint": "completions"}, 200, json.dumps({"choices": []}), "lost"),
    "bad and a server error": ("bad", {"body": "{"}, 500, "broken", "status"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_answers_are_judged(case: str) -> None:
    kind, fields, status, text, outcome = JUDGED[case]
    question = plan.Question(False, "It was", 8)
    one = plan.Planned(0, kind, **{"endpoint": "generate", "stream": False, "question": question, **fields})

    async def ask(url: str) -> dict[str, Any]:
        client = Client(url, "m", {question.key: "the sea"})
        try:
            return await client.send(one, 0.0)
        finally:
            await client.close()

    with answering(status, text) as url:
        row = asyncio.run(ask(url))
    assert row["outcome"] == outcome
    if outcome in ("status", "refused"):
        assert row["status"] == status


def test_what_is_not_as_it_must_be_is_said() -> None:
    planned = plan.make(4, ["x"], (8,), 1)
    rows = [{**one.told(), "outcome": "equal"} for one in planned[:2]]
    rows.append({**planned[2].told(), "outcome": "status", "status": 500, "error": "broken"})
    told = run.told_of(planned, rows)
    told |= {"pool_before": {"num_running_reqs": 0, "num_used_tokens": 0}, "troubles": ["a zombie"]}
    told |= {"pool_after": {"num_running_reqs": 1, "num_used_tokens": 7, "flushed": False}}
    told["memory"] = [{"of": "RSS", "verdict": "grows", "slope": 64 * MIB}]
    said = "\n".join(run.verdicts(told))
    for what in ("request 2", "broken", "1 requests were not sent", "num_used_tokens is 7", "still held", "RSS grows",
                 "a zombie"):  # fmt: skip
        assert what in said
    assert told["server_errors"] == 1
    assert "speculated" not in said
    # A server that died has neither a pool nor an accept length to tell, and that is no reason to tell nothing.
    said = "\n".join(run.verdicts({**told, "pool_after": {"flushed": False}, "accept_length": None}))
    for what in ("num_running_reqs is None", "nothing was speculated"):
        assert what in said
    assert "speculated" not in "\n".join(run.verdicts({**told, "accept_length": 2.1}))
    unstopped = run.told_of(planned, [{**planned[0].told(), "kind": "stop", "stop": "", "outcome": "equal"}])
    assert "had no stop string" in "\n".join(run.verdicts({**told, **unstopped}))


def test_a_fuzzed_body_asks_for_little_and_for_the_served_model() -> None:
    body = {"max_tokens": 300, "n": 4000, "model": "x", "prompt": "a"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for more in range(40):
            sent = fuzz_cases.within_reach(path, {**body, "user": str(more)}, "m")
            assert sent["max_tokens"] <= 16
            assert sent.get("n", 1) <= 4
    sent = [fuzz_cases.within_reach("/v1/completions", {**body, "user": str(more)}, "m") for more in range(40)]
    assert [one["model"] for one in sent].count("m") >= 30
    assert fuzz_cases.within_reach("/api/chat", {"options": None}, "m")["options"]["num_predict"] == 4
    refused = {"max_tokens": 10**9}
    assert fuzz_cases.within_reach("/no/base", refused, "m") == refused
    assert fuzz_cases.within_reach("/generate", [1], "m") == [1]


@pytest.mark.parametrize(
    "module", ["benchmark.endurance.run", "benchmark.endurance.fuzz", "benchmark.endurance.faults"]
)
def test_commands_want_a_folder(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 2
    assert "--out" in capsys.readouterr().err
    if module == "benchmark.endurance.run":  # the others start a server first
        monkeypatch.setattr(sys, "argv", [module, "--out", str(file)])
        assert run.main() == 2


def test_half_written_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert scenarios.half_written(tmp_path) == []
    (tmp_path / "b.py").write_text("def f(\n")
    (tmp_path / ".c.tmp").write_text("x")
    assert len(scenarios.half_written(tmp_path)) == 2


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler, as the fault does")
def test_the_wall_clock_of_a_process_jumps_and_no_other(tmp_path: Path) -> None:
    """And what waits does not wait longer: `time.sleep`, conditions, and semaphores, which wait until a time of day."""
    code = """
import datetime, multiprocessing, sys, threading, time
def takes(wait):
    begun = time.monotonic()
    wait()
    return time.monotonic() - begun
semaphore = multiprocessing.Semaphore(0)
for line in sys.stdin:
    waits = (lambda: time.sleep(0.05), lambda: threading.Event().wait(0.05), lambda: semaphore.acquire(timeout=0.05))
    print(time.time(), datetime.datetime.now().timestamp(), *map(takes, waits), flush=True)
"""
    clock = Clock(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, **clock.environ}, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    for jump in (0, *scenarios.JUMPS_S):
        clock.set(jump)
        process.stdin.write("now\n")
        process.stdin.flush()
        told, also, *waited = map(float, process.stdout.readline().split())
        assert told - time.time() == pytest.approx(jump, abs=30)
        assert also == pytest.approx(told, abs=5)
        assert all(0.04 < seconds < 20 for seconds in waited), waited
    process.stdin.close()
    assert process.wait(timeout=20) == 0


def test_what_is_left_in_shared_memory_is_told_from_what_others_leave_there(tmp_path: Path) -> None:
    """Several servers may run on a machine; each makes semaphores there, and one that is killed leaves them."""
    server = servers.Tiny(tmp_path / "log")
    server.shm, server.process = set(os.listdir("/dev/shm")), SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]
    held = multiprocessing.get_context("spawn").Semaphore(0)
    file = f"/dev/shm/sem.{held._semlock.name.strip('/')}"  # type: ignore[attr-defined]
    with tempfile.NamedTemporaryFile(prefix="endurance-test-", dir="/dev/shm"):
        assert server.leftovers(0) == []
        server.mapped |= servers.mapped([os.getpid()])
        assert server.leftovers(0) == [file]
    server.mapped = servers.mapped([1 << 22])  # no such process
    assert server.leftovers(0) == []


def test_a_clock_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    stage = scenarios.Stage(tmp_path, tmp_path / "cache", lambda _: None)
    with pytest.raises(scenarios.NotRun, match="no C compiler is here"):
        scenarios.clock_jump(stage)


def test_times_that_went_with_the_clock_are_seen() -> None:
    line = 'sglang_patches_spec_phase_seconds_sum{{phase="verify",clock="host"}} {}'
    for value, fine in ((0.0, True), (99.5, True), (-3599.0, False), (3601.5, False), ("NaN", False)):
        text = f"# HELP x y\nsglang:e2e_request_latency_seconds_sum -86400\n{line.format(value)}\nother 1\n"
        assert scenarios.impossible_times(text, 100) == ([] if fine else [line.format(value)])
    with pytest.raises(scenarios.Unexpected, match="no times of our patches"):
        scenarios.impossible_times("sglang:x_seconds_sum 1\n", 100)


def test_faults_are_told_apart_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `python -m benchmark.endurance.faults` but the servers and what is done to them."""
    from benchmark.endurance import faults

    def raising(error: Exception) -> Any:
        def harm(_: scenarios.Stage) -> dict[str, Any]:
            raise error

        return harm

    harms = {"fine": lambda _: {"seconds": 1.5}, "lacking": raising(scenarios.NotRun("no compiler")),
             "wrong": raising(scenarios.Unexpected("it hangs"))}  # fmt: skip
    monkeypatch.setattr(faults, "SCENARIOS", {name: (f"{name} is", harm) for name, harm in harms.items()})
    monkeypatch.setattr(scenarios.Stage, "server", None)
    monkeypatch.setattr(faults.signal, "signal", lambda *_: None)
    for more, code, outcomes in (
        ([], 1, ["as expected", "not run", "not as expected"]),
        (["--only", "lacking", "--only", "fine"], 0, ["as expected", "not run"]),
    ):
        monkeypatch.setattr("sys.argv", ["faults", "--out", str(tmp_path / "out"), *more])
        assert faults.main() == code
        told = json.loads((tmp_path / "out/faults.json").read_text())
        assert [one["outcome"] for one in told["scenarios"]] == outcomes
        assert (told["finished"], told["headline"]) == (True, f"1 of {len(outcomes)} scenarios as expected")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["faults", "--out", str(tmp_path / "file")])
    assert faults.main() == 2


def test_the_report_shows_such_results(tmp_path: Path) -> None:
    data = {"command": ["python", "-m", "benchmark.endurance.run"], "code_state": {"id": "abc"}, "when": "2026-11-30",
            "headline": "9 requests in 3 s, 0 not as they must be", "kinds": [{"kind": "stop", "equal": 9}],
            "raw": {"requests": [{"index": 0}]}}  # fmt: skip
    (tmp_path / "load.json").write_text(json.dumps(data))
    (section,) = page.find([tmp_path]).sections
    assert (section.kind, section.headline) == ("endurance.run", "9 requests in 3 s, 0 not as they must be")
    assert [table.title for table in section.tables] == ["kinds"]
    assert "headline" not in [name for name, _ in section.facts]
