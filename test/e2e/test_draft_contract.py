"""kimi-k25-eagle3-delegation over HTTP: the outcome, the gauge, image requests, and a start that must fail."""

from __future__ import annotations

import base64
import io
import random
import re
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from safetensors.torch import load_file, save_file

from sglang_patches import selection, serve
from sglang_patches.bench.server import free_port
from sglang_patches.draft import refusal

from .conftest import DRAFT, MODEL
from .server import Server, serve_command

PATCH = "kimi-k25-eagle3-delegation"


def outcome(server: Server) -> dict[str, Any]:
    return server.get("/server_info")["sglang_patches"]["outcomes"][PATCH]


def picture(seed: int, width: int, height: int) -> str:
    """A PNG of random dots as a data URI."""
    dots = random.Random(seed)
    image = Image.frombytes("RGB", (width, height), dots.randbytes(3 * width * height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def describe(server: Server, *images: str) -> tuple[str, int]:
    """The greedy answer to a question about `images`, and the number of prompt tokens."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content.append({"type": "text", "text": "Tell me a story about the sea."})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 48, "temperature": 0}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json={"model": server.model_path.name, **body}, timeout=120).raise_for_status().json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


def test_the_outcome_tells_that_the_draft_fits(spec_server: Server) -> None:
    told = outcome(spec_server)
    assert (told["result"], told["unfilled"], told["untaken"]) == ("applied", [], [])
    assert told["detail"] == "the draft fits the target and was loaded whole"
    assert told["draft"] == str(spec_server.draft_path)
    assert told["accept_alarm"] is False


def test_the_bundled_draft_is_in_upstreams_own_convention(spec_server: Server) -> None:
    told = spec_server.get("/server_info")["sglang_patches"]["outcomes"]["llama-eagle3-draft-loading"]
    assert (told["result"], told["read_as"]) == ("not needed", [])
    assert (told["embedding"], told["head"]) == ("target", "own")


def test_the_gauge_is_the_mean_over_the_window(spec_server: Server) -> None:
    describe(spec_server)
    told = outcome(spec_server)
    (found,) = re.findall(r"^sglang_patches_accept_length_window\{[^}]*\} (\S+)$", spec_server.metrics(), re.MULTILINE)
    assert told["accept_window_passes"] > 0
    assert float(found) == told["accept_length_window"] > 1.3


def test_an_image_has_the_same_answer_with_and_without_a_draft(spec_server: Server, plain_server: Server) -> None:
    small, wide = picture(1, 80, 60), picture(2, 200, 90)
    before = spec_server.get("/server_info")["sglang_patches"]
    # The last one comes from the radix cache.
    asked: list[tuple[str, ...]] = [(small,), (wide,), (small, wide), (small,)]
    speculated = [describe(spec_server, *images) for images in asked]
    assert speculated == [describe(plain_server, *images) for images in asked]
    assert speculated[0] == speculated[3] != speculated[1]
    text = describe(spec_server)
    assert speculated[0][1] > text[1]
    assert speculated[0][0] != text[0], "the image made no difference"
    after = spec_server.get("/server_info")["sglang_patches"]
    gained = after["accepted_tokens"] - before["accepted_tokens"]
    assert gained > 1.3 * (after["verify_passes"] - before["verify_passes"])


def test_without_a_draft_there_is_nothing_to_check(plain_server: Server) -> None:
    assert outcome(plain_server) == {"result": "not needed", "detail": "no EAGLE-3 draft is served"}


def test_a_draft_in_the_targets_place_ends_the_start() -> None:
    """Of a server that nothing examined before; without the check it is the tokenizer that is missed."""
    port = free_port()
    asked = {refusal.CONTRACT: "warn"}
    launch = serve.plan(str(DRAFT), "", 1, port, [], cuda=selection.has_gpu(), environ=asked)
    environ = {name: value for name, value in launch.env.items() if name not in asked}
    server = Server(launch.argv, port, DRAFT, None, environ)
    while server.process.poll() is None and time.monotonic() < server.started + 120:
        time.sleep(0.5)
    left = server.leftovers([])
    assert server.process.returncode == 1, server.log_tail()
    assert f"DraftContractError: {DRAFT} is no target:" in server.log()
    assert left == []


def test_a_draft_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    tensors = load_file(DRAFT / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DRAFT / "config.json").read_text())
    port = free_port()
    server = Server(serve_command(port, MODEL, tmp_path), port, MODEL, tmp_path, {})
    while server.process.poll() is None and time.monotonic() < server.started + 120:
        time.sleep(0.5)
    left = server.leftovers([])
    assert server.process.returncode == 1, server.log_tail()
    log = server.log()
    assert f"DraftContractError: the EAGLE-3 draft {tmp_path} does not fit the target {MODEL}:" in log
    assert "draft_vocab_size is 3072 of the target's 4096, but no tensor d2t in" in log
    assert "Load weight begin" not in log
    assert left == []
