"""benchmark/endurance without a server: how it judges answers and memory, what a fuzz sends, what is reported."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from benchmark.endurance import fuzz_cases, memory, plan, run, scenarios
from benchmark.endurance.client import Client

from sglang_patches.bench.report import page

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


def test_half_written_files_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert scenarios.half_written(tmp_path) == []
    (tmp_path / "b.py").write_text("def f(\n")
    (tmp_path / ".c.tmp").write_text("x")
    assert len(scenarios.half_written(tmp_path)) == 2


def test_faults_are_told_apart_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `python -m benchmark.endurance.faults` but the servers and what is done to them."""
    from benchmark.endurance import faults

    def raising(error: Exception) -> Any:
        def harm(_: scenarios.Stage) -> dict[str, Any]:
            raise error

        return harm

    harms = {"fine": lambda _: {"seconds": 1.5}, "lacking": raising(scenarios.NotRun("no libfaketime")),
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
