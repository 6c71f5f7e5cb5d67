"""Off is absent: with SGLANG_PATCHES=none, everything a real server imports is upstream's, byte for byte.

Unpatched upstream needs a loadable `sgl_kernel` to serve; where its CUDA build cannot load, our CPU package stands on
the path under that name, as any other package might, and the model is a plain Llama of random weights, since upstream
serves neither MLA nor Kimi-K2.5 on such a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sglang_patches.bench.server import free_port
from sglang_patches.provenance import upstream_hashes
from sglang_patches.selection import cuda_driver_loads

from .conftest import MODEL
from .server import REPO, Server

# Runs in every process of the server: writes down, again and again, what has been imported so far.
WATCH = textwrap.dedent(
    """
    import json, os, sys, threading, time

    def watch(out):
        while True:
            try:
                look(out)
            except Exception:  # a module that is half imported
                pass
            time.sleep(0.3)

    def look(out):
        modules = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "sglang"}
        seen = {
            "meta_path": [type(entry).__module__ for entry in sys.meta_path],
            "files": {n: m.__spec__.origin for n, m in modules.items() if getattr(m, "__spec__", None)},
            "loaders": sorted({type(m.__spec__.loader).__module__ for m in modules.values() if m.__spec__}),
            "ours": sorted(name for name in list(sys.modules) if name.partition(".")[0] == "sglang_patches"),
            "title": open("/proc/self/cmdline").read().replace(chr(0), " "),
        }
        with open(out + ".new", "w") as file:
            json.dump(seen, file)
        os.replace(out + ".new", out)

    out = os.path.join(os.environ["SEEN_FOLDER"], str(os.getpid()))
    threading.Thread(target=watch, args=(out,), daemon=True).start()
    """
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


KINDS = {"scheduler", "detokenizer", "launch_server"}


def looks(out: Path, server: Server) -> list[dict]:
    """What the server's processes wrote down last."""
    pids = {str(process.pid) for process in server.tree()}
    return [json.loads((out / pid).read_text()) for pid in sorted(pids) if (out / pid).exists()]


def kinds(processes: list[dict]) -> set[str]:
    """Those of them that have imported the server."""
    whole = [process["title"] for process in processes if len(process["files"]) > 100]
    return {kind for title in whole for kind in KINDS if kind in title}


@pytest.fixture(params=["none", ""], ids=["none", "default"])
def seen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[dict]]:
    """What each process of a served model had imported once it had answered a request; one entry a process."""
    model, hooks, out = tmp_path / "llama", tmp_path / "hooks", tmp_path / "seen"
    for folder in (model, hooks, out):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    for file in MODEL.glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    (hooks / "sitecustomize.py").write_text(WATCH)
    if not cuda_driver_loads():
        (hooks / "sgl_kernel").symlink_to(REPO / "sgl-kernel/python/sgl_kernel_cpu")
    port = free_port()
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy",
        "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--grammar-backend", "none", "--dtype", "float32", "--max-total-tokens", "2048", "--sleep-on-idle",
    ]  # fmt: skip
    env = {
        "SGLANG_PATCHES": request.param,
        "PYTHONPATH": str(hooks),
        "SEEN_FOLDER": str(out),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    server = Server(command, port, model, None, env)
    try:
        server.wait_ready()
        body = {"text": "It was", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        reply = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status().json()
        assert len(reply["output_ids"]) == 4
        deadline = time.monotonic() + 60  # a busy machine may show a process as it was before it had its name
        while not kinds(found := looks(out, server)) >= KINDS and time.monotonic() < deadline:
            time.sleep(0.5)
        yield found
    finally:
        server.stop()
        server.kill()


def test_what_a_server_imports(seen: list[dict], request: pytest.FixtureRequest) -> None:
    """With `none` every file is upstream's; the same look at a patched server finds the patches, so it can fail."""
    expected = upstream_hashes()
    processes = [process for process in seen if len(process["files"]) > 100]
    assert kinds(seen) >= KINDS
    foreign = []
    for process in processes:
        for module, origin in process["files"].items():
            if origin is None:  # a namespace package has no file
                continue
            found = hashlib.sha256(Path(origin).read_bytes()).hexdigest() if os.path.isfile(origin) else "no file"
            if expected.get(os.path.normpath(origin)) != found:
                foreign.append((module, origin))
    if "none" in request.node.callspec.id:
        assert foreign == []
        for process in processes:
            assert not [entry for entry in process["meta_path"] if "sglang_patches" in entry]
            assert [loader for loader in process["loaders"] if "sglang_patches" in loader] == []
            # The start-up file imports this one module, which then does nothing.
            assert set(process["ours"]) <= {"sglang_patches", "sglang_patches.activate"}
    else:
        assert {"sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server"} <= {
            module for module, _ in foreign
        }
