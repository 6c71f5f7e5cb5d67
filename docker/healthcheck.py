"""Asks the server of this container whether it is healthy: exit code 0 if it is, else 1.

Port and address are those of the running server's command line, so `--port` needs no second place to say it. Only the
standard library: it runs every half minute.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

# Upstream's /health generates one token and gives up after 20 s.
TIMEOUT = 25


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        """No request follows: the answer is an error."""


# The server is in this container, whatever proxy the environment names for others.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)


def server_arguments(proc: Path) -> list[str] | None:
    """The command line of this user's first `sglang.launch_server` in `proc`, a folder like /proc; None without one."""
    for folder in sorted(
        (entry for entry in proc.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name)
    ):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if argv[1:3] == ["-m", "sglang.launch_server"] or argv[1:4] == ["-P", "-m", "sglang.launch_server"]:
            return argv
    return None


def url(argv: Sequence[str]) -> str:
    """The health endpoint of the server with this command line; of an option given twice the last one counts."""
    given = {"--host": "127.0.0.1", "--port": "30000"}
    for index, word in enumerate(argv):
        name, sign, value = word.partition("=")
        if name in given and (sign or index + 1 < len(argv)):
            given[name] = value if sign else argv[index + 1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(given["--host"], given["--host"])
    return f"http://{f'[{host}]' if ':' in host else host}:{given['--port']}/health"


def main() -> int:
    """The exit code; says on standard output what was found, which `docker inspect` shows."""
    argv = server_arguments(Path("/proc"))
    if argv is None:
        print("no server runs")
        return 1
    try:
        with DIRECT.open(url(argv), timeout=TIMEOUT):
            return 0
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"{url(argv)}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
