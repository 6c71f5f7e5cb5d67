"""Memory of a process tree over time, and whether it grows.

The question is how much a tree gains per 1,000 requests. A line is fitted by least squares through (requests done,
bytes) after the warm-up; its slope has a 95% interval from a moving-block bootstrap of the residuals (Künsch 1989),
since one sample's deviation from the line is the next one's too. The verdict compares the interval with a limit that is
chosen before: ``flat`` if all of it is below, ``grows`` if all of it is above, ``undecided`` otherwise.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from sglang_patches.errors import PatchError

#: Bytes per 1,000 requests: 32 KiB a request, about what one of the bundled model's answers takes as JSON log
#: probabilities, and a hundredth of the tree.
LIMIT = 32 << 20
_DRAWS = 2000


def growth(done: npt.ArrayLike, size: npt.ArrayLike, limit: float = LIMIT, seed: int = 0) -> dict[str, Any]:
    """Bytes per 1,000 requests with their 95% interval, and the verdict.

    Args:
        done: requests that had ended at each sample.
        size: bytes of the tree then.

    Returns: ``slope``, ``low``, ``high`` (bytes per 1,000 requests), ``verdict``, ``samples``, ``block`` (samples).

    Raises:
        ValueError: fewer than 12 samples, or all at the same count of requests.
    """
    x, y = np.asarray(done, float) / 1000, np.asarray(size, float)
    if len(x) < 12 or np.ptp(x) == 0:
        raise ValueError(
            f"{len(x)} samples over {np.ptp(x) * 1000 if len(x) else 0:.0f} requests; 12 samples are needed"
        )
    slope, base = np.polyfit(x, y, 1)
    fitted = base + slope * x
    rest = y - fitted
    block = max(2, int(np.ceil(np.sqrt(len(x)))))
    drawn = np.random.default_rng(seed)
    starts = drawn.integers(0, len(x) - block + 1, (_DRAWS, -(-len(x) // block)))
    picked = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, : len(x)]
    around = x - x.mean()
    # Least squares is linear in y, so a slope of fitted + residuals is the slope plus that of the residuals.
    slopes = slope + (rest[picked] * around).sum(1) / (around**2).sum()
    low, high = np.quantile(slopes, [0.025, 0.975])
    verdict = "flat" if high < limit else "grows" if low > limit else "undecided"
    return {"slope": round(float(slope)), "low": round(float(low)), "high": round(float(high)), "limit": limit,
            "verdict": verdict, "samples": len(x), "block": block}  # fmt: skip


def size(tree: Sequence[psutil.Process]) -> dict[str, Any]:
    """RSS and USS of all processes together, in bytes, and how many there are; those that end meanwhile do not count.

    Raises psutil.AccessDenied for a process whose memory may not be read: without it, the sum would be flat.

    RSS counts a shared page once a process, USS only pages that are one process' own, which ``by`` has by title.
    """
    total: dict[str, Any] = {"rss": 0, "uss": 0, "processes": 0, "by": {}}
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory, title = process.memory_full_info(), _title(process.cmdline())
            total["rss"] += memory.rss
            total["uss"] += memory.uss
            total["processes"] += 1
            total["by"][title] = total["by"].get(title, 0) + memory.uss
    return total


def _title(command: Sequence[str]) -> str:
    """What to call a process: the title it gave itself, or the module that it runs."""
    if command and command[0].startswith("sglang::"):
        return command[0].strip()
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    return module or ("resource tracker" if any("resource_tracker" in word for word in command) else "other")


class Watch(AbstractContextManager["Watch"]):
    """Samples a process tree every `seconds` in a thread; rows are in `samples` and given to `kept`.

    What ends the sampling early is raised on leaving: the samples until then are no verdict on what came after.
    """

    def __init__(
        self,
        tree: Callable[[], Sequence[psutil.Process]],
        done: Callable[[], int],
        kept: Callable[[dict[str, Any]], None] = lambda row: None,
        seconds: float = 2.0,
    ) -> None:
        self._tree, self._done, self._kept, self._seconds = tree, done, kept, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._failure: Exception | None = None
        self.samples: list[dict[str, Any]] = []

    def __enter__(self) -> Watch:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None and failure[0] is None:
            raise PatchError(f"memory was watched for {len(self.samples)} samples only") from self._failure

    def _watch(self) -> None:
        try:
            self._sample()
        except Exception as error:  # told by the thread that waits
            self._failure = error

    def _sample(self) -> None:
        while True:
            row = {"s": round(time.monotonic() - self._begun, 1), "done": self._done(), **size(self._tree())}
            self.samples.append(row)
            self._kept(row)
            if self._ended.wait(self._seconds):
                return
