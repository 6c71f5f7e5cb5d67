"""Upstream's ``MetadataGlueGraph``, compared with the operations that it captures before it is relied upon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.runner.metadata_glue_graph import MetadataGlueGraph

from sglang_patches.runtime.eagle_metadata_graph.prep import Prep
from sglang_patches.runtime.eagle_metadata_graph.telling import Runner

logger = logging.getLogger("sglang_patches")

# Cycles in which a graph is compared. In that of its capture it cannot be told whether it reads the batch's tensors or
# copies that are gone in the next one; by the next, every length has grown.
CHECKS = 3
# Written over what is compared, so that a graph that writes nothing is not taken for one that wrote the same.
POISON = -1


class Unequal(RuntimeError):
    """A graph does not give what the operations give."""


class CheckedGlueGraph(MetadataGlueGraph):  # type: ignore[misc]
    """The metadata graphs of one runner, one a batch size.

    A batch size is prepared by the operations `NUM_WARMUP` times, then captured, and by both in `CHECKS` cycles: from
    the next on by the graph alone. Where that fails for one, the runner goes on without any.

    Args:
        runner: where it is told.
        prep: what is read and written.
    """

    def __init__(self, device: Any, runner: Runner, prep: Prep) -> None:
        super().__init__(device)
        self.runner, self.prep = runner, prep
        # Why the next batch is none for a graph, None if it is; set by `looks_at_batch`.
        self.refused: str | None = None
        # Its graphs keep nothing between replays, and one stream replays them one after the other: one pool does.
        self._pool: Any = None
        self._capture_stream: Any = None

    def is_captured(self, key: Any) -> bool:
        """Whether upstream may replay ``key`` for the batch at hand without making a view of it."""
        return self.refused is None and self._is_ready(key)

    def _is_ready(self, key: Any) -> bool:
        state = self._states.get(key)
        return not self.disabled and state is not None and state["checks"] >= CHECKS

    def replay(self, key: Any) -> None:
        """As upstream's. No metadata object is put back: triton's preparation makes none for a replay either."""
        self._states[key]["graph"].replay()
        self.replays += 1
        self.runner.replays += 1

    def note_not_routed(self) -> None:
        """As upstream's: called for a batch that upstream prepares itself."""
        super().note_not_routed()
        self.runner.eager["failed" if self.disabled else "padded"] += 1

    def run(self, attn_backend: Any, fb_view: Any, key: Any) -> None:
        """As upstream's: prepare a batch of which it has made a view."""

        def eager() -> None:
            attn_backend.init_forward_metadata_out_graph(fb_view)

        if self.refused is not None:
            self.runner.eager[self.refused] += 1
            eager()
        elif not self.step(
            key, fb_view.batch_size, lambda: fb_view, attn_backend.init_forward_metadata_out_graph, eager
        ):
            eager()

    def step(
        self,
        key: Any,
        bs: int,
        view: Callable[[], Any],
        prepare: Callable[[Any], None],
        eager: Callable[[], None],
    ) -> bool:
        """Prepare a batch; False says that it is left to the caller, who does as upstream does.

        Args:
            key: what a graph is captured for.
            bs: requests, with padding.
            view: makes the view of the batch that is captured.
            prepare: the backend's preparation.
            eager: does as upstream does.
        """
        if self._is_ready(key):
            self.replay(key)
            return True
        if self.disabled:
            self.runner.eager["failed"] += 1
            return False
        state = self._states.setdefault(key, {"warmups": 0, "graph": None, "checks": 0, "view": None})
        if state["warmups"] < self.NUM_WARMUP:
            state["warmups"] += 1
            self.runner.eager["warm_up"] += 1
            return False
        self.runner.eager["checked"] += 1
        fresh = state["graph"] is None
        try:
            if fresh:
                state["view"] = self._view(view, prepare)
        except Exception as error:
            self._fail(error)
            return False
        held = state["view"]
        eager()
        try:
            if fresh:
                state["graph"] = self._capture(lambda: prepare(held))
            self._compare(state["graph"], bs)
        except Exception as error:
            self._fail(error)
            return True
        state["checks"] += 1
        if state["checks"] == CHECKS:
            # Held until here, so that a graph that reads what it should not finds old values and no other's memory.
            state["view"] = None
            self.runner.graphs += 1
            self.runner.record("applied", "attention metadata is built by a CUDA graph")
        return True

    def _view(self, view: Callable[[], Any], prepare: Callable[[Any], None]) -> Any:
        """The view to capture, tried: a kernel that has to be compiled for it must not be so during capture."""
        made = view()
        if moved := self.prep.moved(made):
            raise Unequal(f"{moved} is not in the runner's buffers")
        prepare(made)
        return made

    def _capture(self, prepare: Callable[[], None]) -> Any:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        return capture(prepare, self._capture_stream, self._pool)

    def _compare(self, graph: Any, bs: int) -> None:
        """Replay and compare with what the operations have just written, which is what remains if it is not equal.

        Raises:
            Unequal: it is not, with the name of the buffer.
        """
        written = self.prep.written(bs)
        wanted = [tensor.clone() for _, tensor in written]
        equal = False
        try:
            for _, tensor in written:
                tensor.fill_(POISON)
            graph.replay()
            for (name, tensor), right in zip(written, wanted, strict=True):
                if not torch.equal(tensor, right):
                    raise Unequal(f"{name} of {bs} requests is not what upstream's operations write")
            equal = True
        finally:
            if not equal:
                for (_, tensor), right in zip(written, wanted, strict=True):
                    tensor.copy_(right)

    def _fail(self, error: Exception) -> None:
        self.disabled = True
        self._states.clear()
        self.runner.graphs = 0
        why = str(error) if isinstance(error, Unequal) else f"{type(error).__name__}: {error}"
        logger.warning(
            "sglang-patches: %s: %s: %s; its metadata is prepared by upstream's operations from here on",
            "eagle-metadata-graph",
            self.runner.name,
            why,
            exc_info=None if isinstance(error, Unequal) else error,
        )
        self.runner.record("failed", why, reason="unequal" if isinstance(error, Unequal) else "failed")


def capture(prepare: Callable[[], None], stream: Any, pool: Any) -> Any:
    """A CUDA graph of ``prepare``, which is not run by that; other threads may use CUDA meanwhile, as in upstream's."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            prepare()
    finally:
        # Where a capture cannot begin or end, torch leaves ``stream`` the current one, and what follows in this cycle
        # would be launched there, in no order with the next cycle's.
        torch.cuda.set_stream(current)
    return graph
