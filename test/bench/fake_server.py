"""An interpreter that serves like a pristine SGLang, in half a second: for tests of what happens around servers.

`python:` in a selection names a script that runs this file. Variables set what it does:

    FAKE_TOKEN_S      seconds between two chunks (default 0.002)
    FAKE_SALT         added to each token id, so that outputs differ
    FAKE_DIE          `start`: ends before it is ready; a number: ends at so many requests
    FAKE_LATE         seconds before it binds its port
    FAKE_NEVER_READY  answers 503
    FAKE_FAIL         a path, to which it appends a line a server start; requests of the first FAIL_STARTS starts fail
    FAKE_CHUNK        tokens a chunk (default 1); above 1 it tells verify passes
    FAKE_FIRST        tokens of the first chunk (default 1), as of a server that joins chunks
    FAKE_ADDED        tokens that it puts before each prompt
    FAKE_INCREMENTAL  each line has the new ids only
    FAKE_NO_TEXT      as a server without a tokenizer
    FAKE_PORT_TAKEN   a path; without that file it makes it and ends as a server whose port is taken
    FAKE_STUBBORN     ignores SIGTERM
    FAKE_CUT          ends in the middle of its second answer at /server_info
    FAKE_CHILD        a path; it starts a child that outlives it and writes its pid there
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web


def interpreter(folder: Path) -> Path:
    """Write the script for `python:`."""
    script = folder / "fake-python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{__file__}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def option(name: str) -> str:
    """The value of a server argument; the last one counts."""
    at = len(sys.argv) - 1 - sys.argv[::-1].index(name)
    return sys.argv[at + 1]


class Fake:
    """What it was asked and what it answers."""

    def __init__(self) -> None:
        self.requests = self.asked = 0
        starts = os.environ.get("FAKE_FAIL")
        self.failing = False
        if starts:
            with open(starts, "a+") as file:
                file.write("x\n")
                file.seek(0)
                self.failing = len(file.readlines()) <= int(os.environ.get("FAIL_STARTS", "1"))

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if os.environ.get("FAKE_NEVER_READY") else 200)

    async def info(self, request: web.Request) -> web.Response:
        self.asked += 1
        if os.environ.get("FAKE_CUT") and self.asked > 1:
            cut = web.StreamResponse(headers={"Content-Length": "1000"})
            await cut.prepare(request)
            await cut.write(b'{"tp_size"')
            os._exit(4)
        told = {"tp_size": 1, "port": int(option("--port")), "internal_states": [{}], "version": "0"}
        return web.json_response(told | json.loads(os.environ.get("FAKE_INFO", "{}")))

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response(text="flushed")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if os.environ.get("FAKE_DIE", "").isdecimal() and self.requests >= int(os.environ["FAKE_DIE"]):
            print("RuntimeError: the planted end", flush=True)
            os._exit(3)
        if self.failing:
            return web.Response(status=500, text="planted failure")
        body = await request.json()
        count, chunk = body["sampling_params"]["max_new_tokens"], int(os.environ.get("FAKE_CHUNK", "1"))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        ids: list[int] = []
        added = int(os.environ.get("FAKE_ADDED", "0"))
        salt, passes = int(os.environ.get("FAKE_SALT", "0")), 0
        first = int(os.environ.get("FAKE_FIRST", "1"))
        while len(ids) < count:
            await asyncio.sleep(float(os.environ.get("FAKE_TOKEN_S", "0.002")))
            new = min(count - len(ids), chunk if ids else first)
            passes += 1 if ids else (first - 1) // chunk
            ids += [(sum(body["input_ids"]) + len(ids) + at) % 1000 + salt for at in range(new)]
            meta = {"completion_tokens": len(ids), "prompt_tokens": len(body["input_ids"]) + added}
            if chunk > 1:
                meta |= {"spec_verify_ct": passes}
            data = {"output_ids": ids[-new:] if os.environ.get("FAKE_INCREMENTAL") else ids, "meta_info": meta}
            if not os.environ.get("FAKE_NO_TEXT"):
                data["text"] = " ".join(map(str, ids))
            await answer.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer


def main() -> None:
    if "-c" in sys.argv[1:2]:
        print(True, False)  # has sglang, has not sglang_patches
        return
    assert sys.argv[1:3] == ["-m", "sglang.launch_server"], sys.argv
    if os.environ.get("FAKE_DIE") == "start":
        print("loading\nTraceback (most recent call last):\nValueError: the planted mistake\nbye", flush=True)
        sys.exit(7)
    if (taken := os.environ.get("FAKE_PORT_TAKEN")) and not Path(taken).exists():
        Path(taken).touch()
        print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
        sys.exit(1)
    time.sleep(float(os.environ.get("FAKE_LATE", "0")))
    if child := os.environ.get("FAKE_CHILD"):
        Path(child).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    fake = Fake()
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    app = web.Application()
    app.router.add_get("/ready", fake.ready)
    app.router.add_get("/server_info", fake.info)
    app.router.add_post("/flush_cache", fake.flush)
    app.router.add_post("/generate", fake.generate)
    handle = not os.environ.get("FAKE_STUBBORN")
    web.run_app(app, host="127.0.0.1", port=int(option("--port")), print=None, handle_signals=handle)


if __name__ == "__main__":
    main()
