"""Real ranks for a test: processes that meet on a port of this machine and say what they saw as lines of JSON."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SAID = "SAID "


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meet(code: str, *given: str, behaviours: Sequence[str]) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """Two ranks run `code` (arguments: rank, port, what is given, behaviours), once through all behaviours.

    Returns:
        What each said, by behaviour and rank: its lines ``SAID {"behaviour": ..., "rank": ...}``; and each rank's
        whole output.
    """
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), port, *given, *behaviours],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line.removeprefix(SAID) for out in outputs for line in out.splitlines() if line.startswith(SAID)]
    said = {(entry["behaviour"], entry["rank"]): entry for entry in map(json.loads, lines)}
    assert len(said) == 2 * len(behaviours), "\n".join(outputs)
    return said, outputs
