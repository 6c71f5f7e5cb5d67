"""Upstream's real HTTP application and tokenizer manager in this process, with no scheduler behind them.

A request that passes every check of the HTTP process is answered ``REACHED`` at the place where it would be sent to the
scheduler, so a test can tell "refused" from "would be served" without starting a server.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

MODEL = Path(__file__).resolve().parents[1] / "models/tiny-kimi"
# A status that nothing else gives.
REACHED = 299


@contextmanager
def unscheduled_app(model: Path = MODEL) -> Iterator[Any]:
    """A ``fastapi.testclient.TestClient`` of upstream's application, which serves `model` by its folder's name."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from fastapi import HTTPException
    from fastapi.testclient import TestClient
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    arguments = ["--model-path", str(model), "--served-model-name", model.name, "--device", "cpu"]
    arguments += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"]
    server_args = prepare_server_args([*arguments, "--max-total-tokens", "2048", "--skip-server-warmup"])
    publish(server_args, role="tokenizer")
    manager, templates = init_tokenizer_manager(server_args, PortArgs.init_new(server_args))
    manager.max_req_input_len = 2048

    def reached(*_: Any, **__: Any) -> None:
        raise HTTPException(REACHED, "would be served")

    async def reached_later(*_: Any, **__: Any) -> None:
        reached()

    # Not a coroutine in every lane: one that nobody awaits would let the request wait for ever.
    for name in ("_send_one_request", "_send_batch_request"):
        awaited = inspect.iscoroutinefunction(getattr(manager, name))
        setattr(manager, name, reached_later if awaited else reached)
    app = http_server.app
    app.is_single_tokenizer_mode = True
    app.server_args = server_args
    app.warmup_thread_kwargs = {}
    http_server.set_global_state(
        http_server._GlobalState(tokenizer_manager=manager, template_manager=templates, scheduler_info={})
    )
    with (
        mock.patch.object(http_server, "_wait_and_warmup"),
        TestClient(app, raise_server_exceptions=False) as client,
    ):
        yield client
