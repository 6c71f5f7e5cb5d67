"""Says when the server that a process becomes by ``exec`` is ready, and what to try then."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import sys
import time
import urllib.error
from pathlib import Path

from sglang_patches import direct, lane


def try_line(url: str, name: str, key: str = "") -> str:
    """A shell command that asks the server at ``url`` for a chat completion.

    ``key`` is the first part of what `api_key.header` gives.
    """
    body = {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}
    asked = f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return f"curl -s {url}/v1/chat/completions{key} {asked}"


def program() -> str:
    """How ``sglang-patches`` is called from the shell that started this, which may not have its environment active."""
    if shutil.which("sglang-patches"):
        return "sglang-patches"
    beside = Path(sys.executable).parent / "sglang-patches"
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m sglang_patches.cli"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def what_to_try(url: str, name: str, header: tuple[str, str]) -> str:
    """What is told of a server that is ready; ``header`` as `api_key.header` gives it."""
    key, before = header
    commands = [*([before] if before else []), try_line(url, name, key)]
    return "\n".join([
        "Try:",
        *(f"  {command}" for command in commands),
        f"Code state and accept length: curl -s{key} {url}/server_info",
        f"Watch it: {program()} top --url {url}\n",
    ])  # fmt: skip


def watch(who: str, pid: int, url: str, name: str, header: tuple[str, str]) -> None:
    """Wait until the server at ``url`` is ready, then print a request to try; give up when process ``pid`` ends.

    The other arguments are those of `announce`.
    """
    started = time.monotonic()
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    while not ended.poll(500):
        try:
            # Upstream answers 503 here until its own warm-up request has been served.
            with direct.opener.open(f"{url}{lane.here().ready_path}", timeout=5):
                break
        except (urllib.error.URLError, OSError):
            continue
    else:
        print(f"{who}: the server ended after {time.monotonic() - started:.0f} s, before it was ready", flush=True)
        return
    print(
        f"\n{who}: ready after {time.monotonic() - started:.0f} s. {what_to_try(url, name, header)}",
        flush=True,
    )


def announce(who: str, url: str, name: str, header: tuple[str, str]) -> None:
    """Start `watch` over the server that this process becomes, in a process that is no child of it, which neither
    waits for it nor must kill it.

    Args:
        who: the command that speaks, such as ``launch``.
        url: where this machine reaches the server.
        name: of the served model.
        header: as `api_key.header` gives it.
    """
    server = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        with contextlib.suppress(KeyboardInterrupt):
            watch(who, server, url, name, header)
    os._exit(0)
