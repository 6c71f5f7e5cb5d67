"""strict-api: whole requests to upstream's application, up to where they would be sent to the scheduler."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from unscheduled import MODEL, REACHED, unscheduled_app

from sglang_patches.runtime.strict_api import media

CHAT, TEXT, GENERATE, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
SECRET = b"TOPSECRET of a private page"


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 56), (20, 120, 220)).save(out, "PNG")
    return out.getvalue()


def bomb() -> str:
    """A data: URL of a PNG of 40 bytes that says it is 60000 x 60000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + header).decode()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with unscheduled_app() as client:
        yield client


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """A web server: /image is a picture, /gone is not there, anything else a secret."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path == "/gone" else 200)
            self.end_headers()
            self.wfile.write(png() if self.path == "/image" else SECRET)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def picture(url: str, kind: str = "image_url", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": url}}]
    return {"model": MODEL.name, "messages": [{"role": "user", "content": parts}], **fields}


def told(response: Any) -> str:
    body = response.json()
    error = body.get("error")
    return body.get("message") or (error if isinstance(error, str) else error["message"])


def text(**fields: Any) -> tuple[str, Any]:
    return TEXT, {"model": MODEL.name, "prompt": "x", **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"model": MODEL.name, "messages": MESSAGES, **fields}


def generate(**fields: Any) -> tuple[str, Any]:
    return GENERATE, {"text": "x", **fields}


PASSING: dict[str, tuple[str, Any]] = {
    "text": text(),
    "chat": chat(top_logprobs=0, stop=[], chat_template_kwargs={"thinking": False}),
    "generate": generate(sampling_params={"n": 2, "max_new_tokens": 0}, stream=True),
    "batch": generate(text=["a", "b"], sampling_params=[{}, {}], return_logprob=[True, False]),
    "anthropic": (ANTHROPIC, {"model": MODEL.name, "max_tokens": 2, "messages": MESSAGES}),
    "ollama": ("/api/chat", {"model": MODEL.name, "messages": MESSAGES, "stream": False}),
    "ollama with a tag, streaming": ("/api/generate", {"model": f"{MODEL.name}:latest", "prompt": "x", "stream": True}),
    "ollama with a seed": (
        "/api/generate",
        {"model": MODEL.name, "prompt": "x", "options": {"seed": 7}, "stream": False},
    ),
    "vertex": ("/vertex_generate", {"instances": [{"text": "x"}], "parameters": {"sampling_params": {"n": 1}}}),
    "score": ("/v1/score", {"model": MODEL.name, "query": "x", "items": ["a"], "label_token_ids": [5]}),
}


@pytest.mark.parametrize("case", PASSING)
def test_good_requests_reach_the_scheduler(client: Any, case: str) -> None:
    path, body = PASSING[case]
    assert client.post(path, json=body).status_code == REACHED


UNSERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "completions": (TEXT, {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "embeddings": ("/v1/embeddings", {"input": "x"}),
    "classify": ("/v1/classify", {"input": "x"}),
    "score": ("/v1/score", {"query": "x", "items": ["a"], "label_token_ids": [5]}),
    "tokenize": ("/v1/tokenize", {"prompt": "x"}),
    "detokenize": ("/v1/detokenize", {"tokens": [5]}),
    "invocations": ("/invocations", {"messages": MESSAGES}),
    "anthropic": (ANTHROPIC, {"max_tokens": 2, "messages": MESSAGES}),
    "anthropic stream": (ANTHROPIC, {"max_tokens": 2, "messages": MESSAGES, "stream": True}),
    "anthropic count": (f"{ANTHROPIC}/count_tokens", {"messages": MESSAGES}),
    "ollama chat": ("/api/chat", {"messages": MESSAGES}),
    "ollama generate": ("/api/generate", {"prompt": "x"}),
    "ollama empty": ("/api/generate", {"prompt": ""}),
    "ollama show": ("/api/show", {}),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_a_model_that_is_not_served_is_not_found_on_any_api(client: Any, case: str) -> None:
    path, body = UNSERVED[case]
    response = client.post(path, json={"model": "gpt-4o", **body})
    assert response.status_code == 404
    assert "gpt-4o" in told(response)
    if path.startswith(ANTHROPIC):
        assert response.json()["error"]["type"] == "not_found_error"
    if path.startswith("/api/"):
        assert isinstance(response.json()["error"], str)


BAD: dict[str, tuple[str, Any, str]] = {
    "n null": (*generate(sampling_params={"n": None}), "n is null"),
    "list of parameters": (*generate(sampling_params=[{}]), "sampling_params is a list"),
    "list of parameters, streaming": (*generate(sampling_params=[{}, {}], stream=True), "sampling_params is a list"),
    "short list of parameters": (*generate(text=["a", "b"], sampling_params=[{}]), "but there are 2"),
    "refused in a stream": (*generate(sampling_params={"n": 0}, stream=True), "n is 0"),
    "list of return_logprob": (*generate(return_logprob=[True, True]), "return_logprob is a list"),
    "short list of top_logprobs_num": (*generate(text=["a", "b"], top_logprobs_num=[1]), "top_logprobs_num"),
    "stop of a wrong type": (*generate(sampling_params={"stop": 5}), "expected"),
    "text and input_ids": (*generate(input_ids=[5]), "Both text and input_ids"),
    "undeclared metric label": (*generate(custom_labels={"team": "x"}), "'team'"),
    "no prompts": (*generate(text=[]), "empty"),
    "negative token": ("/detokenize", {"tokens": [-1]}, "token id -1"),
    "token beyond all": ("/v1/detokenize", {"tokens": [[5], [10**9]]}, "token id 1000000000"),
    "unknown tool parser": ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "no"}, "no"),
    "unknown reasoning parser": ("/separate_reasoning", {"text": "x", "reasoning_parser": "no"}, "no"),
    "template option of messages": (*chat(chat_template_kwargs={"messages": 5}), "'messages'"),
    "template option of tools": (*chat(chat_template_kwargs={"tools": 5}), "'tools'"),
    "template option in Anthropic's API": (
        ANTHROPIC,
        {"model": MODEL.name, "max_tokens": 2, "messages": MESSAGES, "tools": [{"name": "f", "input_schema": 5}]},
        "input_schema",
    ),
    "Ollama option": (
        "/api/generate",
        {"model": MODEL.name, "prompt": "x", "options": {"num_predict": "x"}, "stream": True},
        "max_new_tokens is 'x'",
    ),
    "seed of a wrong type for Ollama": (
        "/api/chat",
        {"model": MODEL.name, "messages": MESSAGES, "options": {"seed": 2.5}},
        "sampling_seed is 2.5",
    ),
    "unknown sampling parameter for Vertex": (
        "/vertex_generate",
        {"instances": [{"text": "x"}], "parameters": {"sampling_params": {"seed": 5}}},
        "'seed', which is no sampling parameter",
    ),
    "unknown parameter for Vertex": (
        "/vertex_generate",
        {"instances": [{"text": "x"}], "parameters": {"depth": 5}},
        "'depth'",
    ),
    "prompt as a parameter for Vertex": (
        "/vertex_generate",
        {"instances": [{"text": "x"}], "parameters": {"text": "y"}},
        "multiple values",
    ),
    "no messages for Ollama": ("/api/chat", {"model": MODEL.name, "messages": []}, "empty"),
    "unknown log level": ("/configure_logging", {"log_level": "no"}, "NO"),
    "max_tokens 0": (*text(max_tokens=0), "max_tokens"),
    "max_tokens 0 in chat": (*chat(max_tokens=0), "max_tokens is 0"),
    "best_of": (*text(best_of=2), "best_of"),
    "suffix": (*text(suffix="x"), "suffix"),
    "top_logprobs alone": (*chat(top_logprobs=2), "top_logprobs"),
    "empty stop": (*chat(stop=["", "x"]), "stop holds"),
    "repetition penalty": (*text(repetition_penalty=3), "between 0.001 and 2"),
    "top_k 0": (*text(top_k=0), "-1"),
    "video for an image model": (CHAT, picture("data:video/mp4;base64,AAAA", "video_url"), "video"),
    "audio for an image model": (CHAT, picture("data:audio/wav;base64,AAAA", "audio_url"), "audio"),
    "video on /generate": (*generate(video_data="http://127.0.0.1:9/x"), "video"),
    "unreachable image": (CHAT, picture("http://127.0.0.1:9/x.png"), "could not be fetched"),
    "unreachable image, streaming": (CHAT, picture("http://127.0.0.1:9/x.png", stream=True), "could not be fetched"),
    "image of no data": (CHAT, picture("data:nothing"), "comma"),
    "image that is none": (CHAT, picture("data:image/png;base64,AAAA"), "could not be decoded"),
    "image too large to decode": (CHAT, picture(bomb()), "could not be decoded"),
    "wrong type": (*text(n="many"), "n: "),
    "wrong type of a message": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0"),
    "no JSON": (CHAT, '{"messages": [', "JSON"),
    "validator's own verdict": (CHAT, [1], "wrong type"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_a_400_that_names_the_thing_and_no_file(client: Any, case: str) -> None:
    path, body, named = BAD[case]
    content = body if isinstance(body, str) else json.dumps(body)
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert named.casefold() in told(response).casefold()
    for leak in (".py", "site-packages", "Traceback", "function-after"):
        assert leak not in response.text


def media_requests(source: str) -> dict[str, tuple[str, Any]]:
    """Every way to name an image."""
    anthropic = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": source}}]}]
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": source}]}]
    return {
        "chat": (CHAT, picture(source)),
        "chat stream": (CHAT, picture(source, stream=True)),
        "anthropic": (ANTHROPIC, {"model": MODEL.name, "max_tokens": 2, "messages": anthropic}),
        "anthropic stream": (ANTHROPIC, {"model": MODEL.name, "max_tokens": 2, "messages": anthropic, "stream": True}),
        "responses": ("/v1/responses", {"model": MODEL.name, "input": image}),
        "generate": generate(text="<|media_pad|>", image_data=source),
        "generate, a list": generate(text="<|media_pad|>", image_data=[source]),
        "generate, a batch": generate(text=["<|media_pad|>", "x"], image_data=[[source], None]),
        "generate, an object": generate(text="<|media_pad|>", image_data={"url": source}),
        "generate, streaming": generate(text="<|media_pad|>", image_data=source, stream=True),
    }


@pytest.mark.parametrize("way", media_requests(""))
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_no_file_of_the_server_is_read(client: Any, tmp_path: Path, way: str, scheme: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes(SECRET)
    path, body = media_requests(f"{scheme}{secret}")[way]
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "local file" in response.text
    assert "TOPSECRET" not in response.text
    if way.startswith("anthropic"):
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("way", media_requests(""))
def test_nothing_of_a_fetched_page_is_told(client: Any, web: str, way: str) -> None:
    path, body = media_requests(f"{web}/page")[way]
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "could not be decoded" in response.text
    assert "TOPSECRET" not in response.text


def test_a_missing_page_is_the_clients_mistake(client: Any, web: str) -> None:
    response = client.post(CHAT, json=picture(f"{web}/gone"))
    assert response.status_code == 400
    assert "answered 404" in told(response)


@pytest.mark.parametrize("form", ["http", "data", "base64", "allowed path", "allowed URL"])
def test_good_images_reach_the_scheduler(
    client: Any, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(png())
    coded = base64.b64encode(png()).decode()
    source = {
        "http": f"{web}/image",
        "data": f"data:image/png;base64,{coded}",
        "base64": coded,
        "allowed path": str(file),
        "allowed URL": f"file://{str(file).replace(' ', '%20')}",
    }[form]
    if form.startswith("allowed"):
        monkeypatch.setenv(media.ALLOWED_PATH, str(tmp_path))
    response = client.post(CHAT, json=picture(source))
    assert response.status_code == REACHED, response.text
