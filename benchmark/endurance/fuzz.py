"""Fuzz of a server's HTTP API from its own OpenAPI schema: no 5xx, no death, no hang, and right answers afterwards.

    python -m benchmark.endurance.fuzz --out benchmark/results/NAME            # starts its own server, about 10 minutes
    python -m benchmark.endurance.fuzz --out /tmp/f --url http://127.0.0.1:30000 --only /generate --examples 500

schemathesis draws requests from the schema: half of them valid by it, half not. Paths that change or end the server by
design are left out; `--list` names each with the reason. The folder gets `fuzz.json`: every operation with its counts
by status, every failure with the request that made it, and the code state of the server. It is written again after each
operation, so a run that is killed keeps what it found. The same seed sends the same requests.

Exit code: 0 nothing found, 1 something was, 2 it could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import requests

from benchmark.endurance import fuzz_cases
from benchmark.endurance.servers import Tiny, provenance_of, write
from sglang_patches.errors import PatchError

# Longer than any answer here takes on a busy machine; what takes longer hangs.
TIMEOUT_S = 90.0
_KEPT = 600
# The one of them that is right: not implemented, and said so.
NOT_IMPLEMENTED = 501
PROBES = ("It was a dark and stormy night; the rain", "The captain looked at the", "Of these causes and")


# The connection, and an answer that ends before its end or is garbled.
_BROKEN = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError,
           requests.exceptions.ContentDecodingError)  # fmt: skip


def server_error(text: str) -> str:
    """The first event of a stream that tells of a server's error; empty where there is none.

    A stream that has begun has its status, 200, so its error is in it, with a code: that of an HTTP status.
    """
    for line in text.splitlines():
        if not (line.startswith("data: {") and '"error"' in line):
            continue
        with contextlib.suppress(ValueError):
            error = json.loads(line.removeprefix("data: ")).get("error")
            code = error.get("code") if isinstance(error, dict) else None
            if isinstance(code, int) and code >= 500 and code != NOT_IMPLEMENTED:
                return line
    return ""


class Fuzzer:
    """Sends cases to one server and keeps what was wrong with the answers."""

    def __init__(self, url: str, seed: int, session: requests.Session | None = None) -> None:
        self.url, self.seed = url, seed
        self.session = session or requests.Session()
        self.session.trust_env = False
        self.schema = httpx.get(f"{url}/openapi.json", timeout=60).raise_for_status().json()
        self.model: str = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
        self.operations: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    def answers(self) -> list[str]:
        """Greedy answers to `PROBES`."""
        body = {"model": self.model, "max_tokens": 24, "temperature": 0}
        found = []
        for prompt in PROBES:
            response = httpx.post(f"{self.url}/v1/completions", json={**body, "prompt": prompt}, timeout=TIMEOUT_S)
            found.append(response.raise_for_status().json()["choices"][0]["text"])
        return found

    def operation(self, operation: fuzz_cases.Operation, examples: int) -> dict[str, Any]:
        """Send so many cases of one operation; its row."""
        label, begun, statuses = operation.label, time.monotonic(), Counter[str]()

        def send(case: Any) -> None:
            case.body = fuzz_cases.within_reach(operation.path, case.body, self.model)
            status = self._send(label, case)
            statuses[str(status)] += 1
            if status == "dead":
                raise PatchError(f"{label}: the server does not answer any more\n{self.failures[-1]['request']}")

        try:
            fuzz_cases.draw(operation, examples, self.seed, send)
        finally:
            sent = statuses.total() - statuses["unsent"]
            row = {"operation": label, "sent": sent, "seconds": round(time.monotonic() - begun, 1)}
            self.operations.append({**row, "statuses": dict(sorted(statuses.items()))})
        return self.operations[-1]

    def _send(self, label: str, case: Any) -> str:
        """Status, or ``hangs``, ``broken`` (the connection), ``dead``, ``unsent`` (no HTTP request can carry it)."""
        request = case.as_transport_kwargs(base_url=self.url)
        try:
            status, text = self._answer(request)
        except requests.Timeout:
            return self._failed(label, request, "hangs", f"no answer in {TIMEOUT_S:.0f} s")
        except _BROKEN as error:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/model_info", timeout=30)
                return self._failed(label, request, "broken", str(error))
            return self._failed(label, request, "dead", str(error))
        except (requests.RequestException, ValueError):
            return "unsent"
        if status >= 500 and status != NOT_IMPLEMENTED:
            return self._failed(label, request, str(status), text)
        if status < 400 and (told := server_error(text)):
            return self._failed(label, request, "5xx in a stream", told)
        return str(status)

    def _answer(self, request: dict[str, Any]) -> tuple[int, str]:
        """Status and text, all of which must be there in time: `requests` limits only the wait for each piece."""
        deadline, body = time.monotonic() + TIMEOUT_S, b""
        with self.session.request(**request, timeout=TIMEOUT_S, allow_redirects=False, stream=True) as response:
            for piece in response.iter_content(1 << 16):
                body += piece
                if time.monotonic() > deadline:
                    raise requests.Timeout
            return response.status_code, body.decode("utf-8", "replace")

    def _failed(self, label: str, request: dict[str, Any], what: str, told: str) -> str:
        kept = {name: request[name] for name in ("method", "url", "params", "headers", "json", "data", "files")
                if request.get(name)}  # fmt: skip
        self.failures.append({"operation": label, "what": what, "told": told[:_KEPT], "request": repr(kept)[:4000]})
        return what

    def result(self) -> dict[str, Any]:
        """What was found so far."""
        return {
            "headline": f"{sum(row['sent'] for row in self.operations)} requests to {len(self.operations)} operations, "
            f"{len(self.failures)} failures",
            "seed": self.seed,
            "sent": sum(row["sent"] for row in self.operations),
            "excluded": fuzz_cases.excluded(self.schema),
            "operations": self.operations,
            "failures": self.failures,
        }


def fuzz(fuzzer: Fuzzer, examples: int, only: str, after: Callable[[str, float], None]) -> None:
    """All operations whose path has `only` in it; `after` is told each row and the seconds left."""
    todo = [one for one in fuzz_cases.operations(fuzzer.schema) if only in one.path]
    begun = time.monotonic()
    for at, operation in enumerate(todo, 1):
        row = fuzzer.operation(operation, examples)
        left = (time.monotonic() - begun) / at * (len(todo) - at)
        after(f"{at}/{len(todo)} {operation.label}: {row['sent']} sent, {row['statuses']}", left)


@contextlib.contextmanager
def _server(url: str, out: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """URL of the server, given or started here, and what is wrong with its processes."""
    if url:
        yield url.rstrip("/"), list
        return
    with Tiny(out / "server.log", speculative=True) as server:
        yield server.url, server.troubles


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for fuzz.json and the server's log")
    parser.add_argument("--url", default="", help="a server that runs (default: start one of the bundled pair)")
    parser.add_argument("--examples", type=int, default=60, help="requests an operation (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other requests (default %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="paths with this in them")
    parser.add_argument("--list", action="store_true", help="name what is left out, and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{path:46} {why}" for path, why in fuzz_cases.EXCLUDED.items()))
        return 0
    if given.out is None:
        parser.error("--out is missing: the folder for fuzz.json")
    try:
        import schemathesis  # noqa: F401
    except ImportError:
        print("fuzz: schemathesis is not installed\n  remedy     pip install schemathesis", file=sys.stderr)
        return 2
    try:
        return _run(given)
    except (PatchError, httpx.HTTPError) as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    given.out.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmark.endurance.fuzz", *sys.argv[1:]],
        "finished": False,
    }
    with _server(given.url, given.out) as (url, troubles):
        fuzzer = Fuzzer(url, given.seed)
        told["provenance"] = provenance_of(url)
        before = fuzzer.answers()

        def after(line: str, left: float) -> None:
            print(f"{line}; {left:.0f} s left", file=sys.stderr, flush=True)
            write(given.out / "fuzz.json", {**told, **fuzzer.result()})

        try:
            fuzz(fuzzer, given.examples, given.only, after)
            told["right_afterwards"] = fuzzer.answers() == before
            told["troubles"] = troubles()
            told["finished"] = True
        finally:
            write(given.out / "fuzz.json", {**told, **fuzzer.result()})
    for failure in fuzzer.failures[:20]:
        print(f"{failure['operation']}: {failure['what']}: {failure['told'][:200]}")
    bad = len(fuzzer.failures) + len(told["troubles"]) + (not told["right_afterwards"])
    print(f"{given.out / 'fuzz.json'}: {fuzzer.result()['sent']} requests, {bad or 'no'} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
