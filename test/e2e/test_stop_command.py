"""`sglang-patches stop` on a real server, with another one beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_patches.bench.server import free_port

from .conftest import MODEL
from .server import Server, serve_command


def test_the_stop_command_ends_this_server_and_no_other(plain_server: Server) -> None:
    port = free_port()
    server = Server(serve_command(port, MODEL, None), port, MODEL, None, {})
    try:
        server.wait_ready()
        tree = server.tree()
        command = [str(Path(sys.prefix) / "bin" / "sglang-patches"), "stop", "--port", str(server.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        assert server.leftovers(tree) == []
    finally:
        server.kill()
    assert plain_server.healthy()
