"""benchmark/host_cycle: what samples of a thread say, in made-up stacks, in those committed, and in a real process."""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark.host_cycle import run, stacks

REPO = Path(__file__).resolve().parents[2]
COMMITTED = REPO / "benchmark" / "results" / "h200-host-cycle"
SITE, HERE = "/x/lib/python3.12/site-packages", "/repo/python/sglang_patches/runtime/a.py"
LOOP = f"thread (7): MainThread;main (libc.so.6);loop ({SITE}/sglang/srt/scheduler.py:10)"
LINES = [
    f"{LOOP};cudaGraphLaunch (libcudart.so.13);0x12 (libcuda.so.1) 1",
    f"{LOOP};wait ({HERE}:1);THPEvent (libtorch_python.so);cudaEventSynchronize (x.so) 2",
    f"{LOOP};run ({SITE}/triton/runtime/jit.py:3);launch (cuda_utils.so) 3",
    # As they are with full file names: a module that is patched, and libraries with their folders.
    f"{LOOP};op (/c/0123456789abcdef-01234567/sglang/srt/a.py:5);at::add ({SITE}/torch/lib/libtorch_cpu.so);"
    "memcpy (/usr/lib/libc.so.6) 4",
    f"{LOOP};malloc (libc.so.6) 5",
    f"{LOOP};plain ({HERE}:2) 5",
    "thread (8): Thread-1;other (x.py:1) 100",
]


def test_samples_are_told_apart_by_what_is_innermost() -> None:
    told = stacks.summary(stacks.read(LINES), ms=4.0)
    assert (told["samples"], told["pass_ms"]) == (20, 4.0)
    assert [row["kind"] for row in told["kinds"]] == list(stacks.KINDS)
    assert [row["ms"] for row in told["kinds"]] == pytest.approx([0.4, 0.2, 0.6, 0.8, 1.0, 1.0])
    assert told["ours_ms"] == pytest.approx(1.4)
    assert told["inclusive"][0] == {"function": "loop (sglang/srt/scheduler.py)", "ms": 4.0}
    assert [(row["function"], row["ms"]) for row in told["own"]] == [
        ("loop (sglang/srt/scheduler.py)", 1.2), ("plain (sglang_patches/runtime/a.py)", 1.0),
        ("op (sglang/srt/a.py)", 0.8), ("run (triton/runtime/jit.py)", 0.6),
        ("wait (sglang_patches/runtime/a.py)", 0.4),
    ]  # fmt: skip
    assert stacks.headline(told) == "of 4.00 ms a pass the scheduler waits for the GPU for 0.40"
    libraries = {frame for frames, _ in stacks.read(LINES) for frame in frames if ".so" in frame and "/" in frame}
    assert not libraries, "a library's folder is this machine's"
    again = stacks.summary(stacks.read(stacks.shorter(stacks.read(LINES))), ms=4.0)
    assert again == told, "what is kept tells the same"
    lines = stacks.table(told)
    assert "| waits for the GPU | 0.400 | 10.0% |" in lines
    assert "| `op (sglang/srt/a.py)` | 0.800 | 20.0% |" in lines
    assert not any("loop" in line and "100.0%" in line for line in lines), "every sample is below it"


def test_a_function_that_calls_itself_counts_once() -> None:
    told = stacks.summary(
        stacks.read([f"{LOOP};loop (/x/lib/python3.12/site-packages/sglang/srt/scheduler.py:20) 2"]), 1.0
    )
    assert told["inclusive"] == [{"function": "loop (sglang/srt/scheduler.py)", "ms": 1.0}]


@pytest.mark.parametrize(
    ("lines", "told"),
    [(["Collecting..."], "line 1: 'Collecting...' is no stack"), (LINES[-1:], "no sample of the thread MainThread")],
)
def test_it_says_what_is_no_stack(lines: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        stacks.read(lines)


def test_the_committed_samples_say_what_its_page_says() -> None:
    lines = lzma.decompress((COMMITTED / "stacks.txt.xz").read_bytes()).decode().splitlines()
    told = stacks.summary(stacks.read(lines), ms=3.132)
    page = (COMMITTED / "README.md").read_text()
    for line in stacks.table(told)[2:9]:
        assert line in page
    # The finding: the host never waits.
    assert told["kinds"][0]["ms"] < 0.01 * told["pass_ms"]
    assert json.loads((COMMITTED / "host.json").read_text()).items() >= told.items()


def test_py_spy_tells_python_from_what_it_calls(tmp_path: Path) -> None:
    """A real process, nearly always in native code of the interpreter, below one function."""
    script = tmp_path / "busy.py"
    # The import names the main thread.
    begin, work = "import hashlib, threading\ndef turn():", "    hashlib.sha256(b'x' * 50_000_000).digest()"
    script.write_text(f"{begin}\n{work}\nprint(flush=True)\nwhile True: turn()\n")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    out = tmp_path / "stacks.txt"
    sampler = run.spy()
    assert sampler, "py-spy is of the extra `test`"
    words = [sampler, "record", "--pid", str(process.pid), "--duration", "1", "--rate", "100"]
    words += [*stacks.OPTIONS, "--output", str(out)]
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        sampled = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        process.kill()
        process.wait()
    if sampled.returncode and re.search("permi(ssion|tted)", sampled.stderr, re.IGNORECASE):
        pytest.skip(f"this machine lets nobody trace a process: {sampled.stderr.strip()[-100:]}")
    assert sampled.returncode == 0, sampled.stderr
    found = stacks.read(out.read_text().splitlines())
    native = {frame for frames, _ in found for frame in frames if ".so" in frame}
    assert native
    assert not any("/" in frame for frame in native)
    told = stacks.summary(found, ms=1.0)
    assert {row["kind"]: row["ms"] for row in told["kinds"]}["other native code"] > 0.5
    assert any(row["function"].startswith("turn (") for row in told["own"])


def test_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--model", "m", "--draft", "d"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), *pair])
    monkeypatch.setattr(run, "spy", lambda: None)
    assert run.main() == 2
    assert "py-spy is not installed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out"), *pair[:2]])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(run.selection, "has_gpu", lambda: False)
    assert run.main() == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
