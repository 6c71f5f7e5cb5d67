"""What a thread was doing, from stacks that `py-spy record` sampled with `OPTIONS`.

A line is one stack and how often it was seen: frames from the outermost to the innermost, joined by semicolons, the
first naming the thread; Python's as ``function (file.py:line)``, others as ``function (library.so)``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

OPTIONS = ("--native", "--threads", "--full-filenames", "--format", "raw")
#: What a sample's innermost frames say that it was; the first that fits.
KINDS = (
    "waits for the GPU",
    "launches CUDA graphs",
    "launches Triton kernels",
    "PyTorch operations",
    "other native code",
    "Python",
)
_PYTHON = re.compile(r" \((<[^>]+>|[^()]+\.py):\d+\)$")
_LINE = re.compile(r":\d+\)$")
# What stands before a package's name in a file's full path: here, in an installation and in the cache of patched files.
_BEFORE = re.compile(
    r"(?<= \()[^()]*/(?:site-packages|dist-packages|lib/python3\.\d+|python|[0-9a-f]{16}(?:-[0-9a-f]{8})?)/"
)
# With full file names py-spy tells a library's folder, too, in which machines differ; `kind` goes by the name.
_FOLDER = re.compile(r"(?<= \()[^()]*/(?=[^()/]+\.so[.\d]*\)$)")
_OURS = re.compile(r" \(sglang_patches/")

Stack = tuple[list[str], int]


def read(lines: Iterable[str], thread: str = "MainThread") -> list[Stack]:
    """Stacks of one thread and how often each was seen.

    Raises ValueError for a line that is none of py-spy's, and where the thread was never seen.
    """
    stacks: list[Stack] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        stack, _, count = line.rstrip("\n").rpartition(" ")
        if not count.isdecimal() or not stack:
            raise ValueError(f"line {number}: {line[:60]!r} is no stack of py-spy's raw format")
        first, *frames = stack.split(";")
        if first.endswith(f": {thread}"):
            stacks.append(([_BEFORE.sub("", _FOLDER.sub("", frame)) for frame in frames], int(count)))
    if not stacks:
        raise ValueError(f"no sample of the thread {thread}")
    return stacks


def kind(frames: list[str]) -> str:
    """Which of `KINDS` a sample is."""
    native = _native(frames)
    if any("Synchronize" in frame for frame in native):
        return KINDS[0]
    if any(frame.startswith("cudaGraphLaunch") for frame in native):
        return KINDS[1]
    # Also its own compiled launcher, which a Python frame of it calls.
    if any("(triton/" in frame for frame in frames):
        return KINDS[2]
    if any("(libtorch" in frame or "(libc10" in frame for frame in native):
        return KINDS[3]
    return KINDS[4] if native else KINDS[5]


def summary(stacks: list[Stack], ms: float) -> dict[str, Any]:
    """Where the milliseconds of one pass went.

    Args:
        ms: of one pass of the server; the samples are spread over it.

    Returns: ``samples``; ``pass_ms`` (as given); ``kinds`` (``ms`` of each of `KINDS`); ``ours_ms``, in which the
        innermost Python frame was of this project; ``inclusive`` and ``own`` (``ms`` by ``function``: while it or what
        it called ran, and while it was the innermost Python frame), most first, those of at least half a percent.
    """
    kinds: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    own: Counter[str] = Counter()
    ours = total = 0
    for frames, count in stacks:
        total += count
        kinds[kind(frames)] += count
        python = [frame for frame in frames if _PYTHON.search(frame)]
        inclusive.update(dict.fromkeys({_LINE.sub(")", frame) for frame in python}, count))
        if python:
            own[_LINE.sub(")", python[-1])] += count
            ours += count if _OURS.search(python[-1]) else 0
    share = ms / total

    def most(counted: Counter[str]) -> list[dict[str, Any]]:
        counts = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
        return [{"function": name, "ms": round(n * share, 4)} for name, n in counts if n >= total / 200]

    return {
        "samples": total,
        "pass_ms": ms,
        "ours_ms": round(ours * share, 4),
        "kinds": [{"kind": name, "ms": round(kinds[name] * share, 4)} for name in KINDS],
        "inclusive": most(inclusive),
        "own": most(own),
    }


def headline(told: dict[str, Any]) -> str:
    """In words: of a pass, how long the thread waited for the GPU."""
    waits = told["kinds"][0]["ms"]
    return f"of {told['pass_ms']:.2f} ms a pass the scheduler waits for the GPU for {waits:.2f}"


def shorter(stacks: list[Stack]) -> list[str]:
    """Lines with the Python frames and the two ends of the native ones below the last of them, which `kind` needs."""
    counted: Counter[str] = Counter()
    for frames, count in stacks:
        native = _native(frames)
        kept = [frame for frame in frames if _PYTHON.search(frame)]
        telling = [frame for frame in native if "Synchronize" in frame or frame.startswith("cudaGraphLaunch")]
        ends = list(dict.fromkeys([*native[:1], *telling[:1], *native[-1:]]))
        counted[";".join(["thread (0): MainThread", *kept, *ends])] += count
    return [f"{stack} {count}" for stack, count in counted.most_common()]


def table(told: dict[str, Any], functions: int = 30) -> list[str]:
    """Markdown: kinds, and the functions that take most."""
    whole = told["pass_ms"]
    lines = ["| the thread | ms a pass | share |", "|---|---|---|"]
    lines += [f"| {row['kind']} | {row['ms']:.3f} | {row['ms'] / whole:.1%} |" for row in told["kinds"]]
    lines += [f"| of all this in this project's code | {told['ours_ms']:.3f} | {told['ours_ms'] / whole:.1%} |"]
    for name, heads in (("inclusive", "with what it calls"), ("own", "itself and native code below it")):
        lines += ["", f"| function, {heads} | ms a pass | share |", "|---|---|---|"]
        # Those that nearly all samples are below are the loop itself.
        most = [row for row in told[name] if row["ms"] < 0.95 * whole][:functions]
        lines += [f"| `{row['function']}` | {row['ms']:.3f} | {row['ms'] / whole:.1%} |" for row in most]
    return lines


def _native(frames: list[str]) -> list[str]:
    """Frames below the innermost Python frame."""
    last = max((at for at, frame in enumerate(frames) if _PYTHON.search(frame)), default=-1)
    return frames[last + 1 :]
