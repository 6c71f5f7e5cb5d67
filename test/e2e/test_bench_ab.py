"""`bench ab` on real servers: two drafts' lengths, a run that is killed, and the result it ends with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sglang_patches.bench import folder

from .server import REPO

SHORTER = "arg:--speculative-num-steps=2,arg:--speculative-num-draft-tokens=3"
# A hang's, not a slow machine's: three servers of a minute each where it is quiet.
SECONDS = 1800


def test_a_killed_comparison_goes_on_and_ends_in_a_verdict(tmp_path: Path) -> None:
    out = tmp_path / "result"
    command = [
        sys.executable, "-m", "sglang_patches.cli", "bench", "ab", "--a", "default", "--b", SHORTER, "--rounds", "2",
        "--prompts", "3", "--output-tokens", "24", "--warm-up", "1", "--out", str(out),
    ]  # fmt: skip
    first = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        turns = out / "turns.jsonl"
        while not (turns.exists() and turns.read_bytes().endswith(b"\n")):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on after 1 turns of an earlier run" in done.stderr

    result = folder.load(out)
    assert [turn.arm for turn in result.turns] == ["a", "b", "b", "a"]
    # Speculation is lossless, so drafts of any length give the same tokens, in every server.
    assert len({turn.output_sha256 for turn in result.turns} - {None}) == 1
    assert result.allowed == []
    # The same prompts give the same accept length in every server of an arm, which is all that there is to remark.
    assert [note.partition(" is equal in all rounds")[0] for note in result.analysis["notes"]] == ["accept_length"]
    for turn in result.turns:
        assert turn.document is not None
        assert turn.document.server_args is not None
        assert turn.document.server_args["speculative_num_steps"] == (3 if turn.arm == "a" else 2)
        assert turn.figures["graph_share"] == 0  # on a CPU
        assert (out / turn.log).stat().st_size > 0
    compared = result.analysis["comparisons"]
    assert {"tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "verify_ms", "accept_length"} <= compared.keys()
    # Counted, not timed: the shorter draft's passes accept less.
    assert compared["accept_length"]["verdict"] == "SLOWER"
    assert compared["tokens_per_s"]["rounds"] == 2

    taken = list(folder.samples(out))
    assert [sample.turn for sample in taken] == [turn for turn in range(4) for _prompt in range(3)]
    for sample in taken:
        assert (sample.prompt_tokens, sample.output_tokens, sample.error) == (64, 24, "")
        # A busy machine may hand over what two passes gave as one piece.
        assert sample.verify_passes is not None
        assert 0 < len(sample.itl) <= sample.verify_passes < sample.output_tokens
    assert f"{compared['tokens_per_s']['ratio']:.4g} times the tokens per second" in (out / "README.md").read_text()
