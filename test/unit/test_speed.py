"""benchmark.tiny_kimi.speed against servers that answer what a test wants: what its file holds, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from benchmark.tiny_kimi import speed

from sglang_patches.bench.report import older
from sglang_patches.document import schema

from .documents import made, patch


@contextlib.contextmanager
def serving(info: dict[str, Any], tokens: list[int]) -> Iterator[str]:
    """URL of a server that tells `info` at /server_info and generates `tokens`."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.answer(info)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            meta = {"completion_tokens": len(tokens), "spec_verify_ct": 2}
            self.answer({"output_ids": tokens, "meta_info": meta})

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def told(**changed: Any) -> dict[str, Any]:
    document = made(**changed).model_dump(mode="json")
    return {"sglang_patches": {"document": document, "outcomes": {"one": {"result": "applied"}}}}


def run(monkeypatch: pytest.MonkeyPatch, out: Path, a: str, b: str) -> None:
    monkeypatch.setattr("sys.argv", ["speed", "--a", a, "--b", b, "--prompts", "3", "--tokens", "4", "--out", str(out)])
    speed.main()


def test_its_file_holds_both_documents_and_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    other = told(id="ba9876543210", patches=[patch("one"), patch("two")])
    with serving(told(), [1, 2, 3, 4]) as a, serving(other, [1, 2, 3, 4]) as b:
        run(monkeypatch, out, a, b)
    assert "same arguments, but `two` was off in A and on in B" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert [schema.parse(data[arm], arm).code.id for arm in "ab"] == ["0123456789ab", "ba9876543210"]
    assert data["a"]["outcomes"] == {"one": {"result": "applied"}}
    assert [len(data["samples"][arm]) for arm in "ab"] == [3, 3]
    section = older.read(out)
    assert section is not None
    assert section.apart[0][0] == "same arguments, but `two` was off in A and on in B"
    assert section.machine.startswith("1x H200")


def test_servers_that_differ_in_tokens_or_tell_no_code_state_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speed.json"
    with serving(told(), [1, 2]) as a, serving(told(), [1, 3]) as b, serving({}, [1, 2]) as untold:
        with pytest.raises(SystemExit, match="tokens differ"):
            run(monkeypatch, out, a, b)
        with pytest.raises(SystemExit, match="no provenance document"):
            run(monkeypatch, out, a, untold)
    assert not out.exists()
