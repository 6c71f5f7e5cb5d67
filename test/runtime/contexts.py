"""Upstream's arguments resolved and published in this process, in every lane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt import runtime_context


def resolve(server_args: Any) -> Any:
    """The arguments, resolved; where upstream does so as they are made, they are already."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


@contextmanager
def published_for_scheduler(server_args: Any) -> Iterator[None]:
    """A scheduler's published configuration until the block ends."""
    if hasattr(runtime_context, "create_context"):
        with runtime_context.use_context(runtime_context.create_context(server_args, role="scheduler")):
            yield
        return
    runtime_context.publish(server_args, role="scheduler")
    try:
        yield
    finally:
        runtime_context.reset_context()
