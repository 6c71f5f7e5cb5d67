"""NCCL's rules for a communicator without graph mixing, kept by waiting where a call would break one.

NCCL leaves out the events around captured calls for a communicator with ``graphUsageMode`` 1, and asks in return that
no two graphs with calls of it run in parallel, and that no uncaptured call of it is issued while such a graph is
outstanding, whatever the streams (NCCL user guide, NCCL_GRAPH_MIXING_SUPPORT). Upstream does neither in the
configurations this is used for; should it, the host waits first, and the wait is counted.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from sglang_patches.runtime import _outcome

logger = logging.getLogger("sglang_patches")


class Guard:
    """Follows every call of one communicator and every replay of a graph that has calls of it (one thread)."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.unknown = False  # a hook has failed: any graph may have calls
        self.stream: Any = None  # of the latest replay
        self.captured = 0  # calls in the capture that is going on
        self.replaying = False  # a replay may not have finished
        self.eager = False  # an uncaptured call may not have finished
        self.eager_calls_held = 0
        self.replays_held = 0
        self.replays_ordered = 0
        self.hooks_failed = 0

    def register(self) -> None:
        """Have torch tell of every capture and replay in this process."""
        from torch.cuda import graphs

        graphs.register_graph_capture_start_hook(self.told(self.before_capture))
        graphs.register_graph_capture_end_hook(self.told(self.after_capture))
        graphs.register_graph_replay_start_hook(self.told(self.before_replay, replays=True))

    def told(self, hook: Callable[..., None], replays: bool = False) -> Callable[..., None]:
        """`hook` for torch, which swallows whatever a hook raises: the rules are then kept by waiting instead."""

        def called(*arguments: Any) -> None:
            try:
                hook(*arguments)
            except Exception as error:
                self._failed(error, replays)

        return called

    def _failed(self, error: Exception, replays: bool) -> None:
        self.hooks_failed += 1
        self.unknown = True
        if self.hooks_failed == 1:
            logger.error(
                "sglang-patches: pcie-nccl-allreduce: the guard of the communicator for graphs alone failed, and from "
                "now on takes every graph for one with calls of it (hooks_failed at /server_info counts on); "
                "SGLANG_PATCHES_NCCL_PROFILE=none does without it",
                exc_info=error,
            )
        if not replays:
            return
        import torch

        torch.cuda.synchronize()
        # The stream of this replay is not known, so the next one waits on the host, too.
        self.eager, self.replaying, self.stream = False, True, None

    def before_call(self) -> None:
        """A call of the communicator is about to be issued on the current stream."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            self.captured += 1
            return
        if self.replaying:
            torch.cuda.synchronize()
            self.replaying = False
            self.eager_calls_held += 1
            if self.eager_calls_held == 1:
                logger.warning(
                    "sglang-patches: pcie-nccl-allreduce: a collective outside of CUDA graphs came on the communicator "
                    "that is for graphs alone; it waits until no graph is running, each time. If this happens often "
                    "(eager_calls_held at /server_info), SGLANG_PATCHES_NCCL_PROFILE=none is faster."
                )
        self.eager = True

    def before_capture(self, graph: Any) -> None:
        """The capture of `graph` has begun; calls of an earlier one that failed are not its own."""
        self.captured = 0

    def after_capture(self, graph: Any) -> None:
        """The capture of `graph` has ended."""
        captured, self.captured = self.captured, 0
        if captured:
            self.graphs.add(graph)

    def before_replay(self, graph: Any = None, handle: int | None = None) -> None:
        """`graph` is about to be launched; None for one that is not known.

        Args:
            handle: of its CUDA stream; the current stream if None.
        """
        import torch

        if graph is not None and not self.unknown and graph not in self.graphs:
            return
        if self.eager:
            torch.cuda.synchronize()
            self.eager = self.replaying = False
            self.replays_held += 1
        stream = torch.cuda.current_stream() if handle is None else torch.cuda.ExternalStream(handle)
        if self.replaying and (self.stream is None or stream.cuda_stream != self.stream.cuda_stream):
            if self.stream is None:
                torch.cuda.synchronize()
            else:
                stream.wait_stream(self.stream)
            self.replays_ordered += 1
        self.stream = stream
        self.replaying = True

    def figures(self) -> dict[str, int]:
        return {
            "graphs": len(self.graphs),
            "eager_calls_held": self.eager_calls_held,
            "replays_held": self.replays_held,
            "replays_ordered": self.replays_ordered,
            "hooks_failed": self.hooks_failed,
        }


_expected_group: Any = None
_guard: Guard | None = None


def expect(group: Any) -> None:
    """The next communicator on `group`, a gloo process group, is to be made for graphs alone; on none if it is None."""
    global _expected_group
    _expected_group = group


def made_for_graphs(communicator: Any, group: Any) -> bool:
    """Whether this ``PyNcclCommunicator``, on the process group `group`, shall have ``graphUsageMode`` 1.

    Called before NCCL makes it. From then on its calls and the graphs that have them are followed.
    """
    global _expected_group, _guard
    if _expected_group is None or group is not _expected_group:
        return False
    _expected_group = None
    _guard = Guard(communicator)
    _guard.register()
    _outcome.live_figures("pcie-nccl-allreduce", _guard.figures)
    return True


def follows(communicator: Any) -> bool:
    """Whether `communicator` was made for graphs alone, by NCCL too (`comm` is what its constructor gets from NCCL)."""
    return _guard is not None and _guard.communicator is communicator and hasattr(communicator, "comm")


def guards_eager_calls(resolve_stream: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate ``PyNcclCommunicator._resolve_stream``, which each of its methods calls just before it calls NCCL."""

    @functools.wraps(resolve_stream)
    def resolved(self: Any) -> Any:
        if _guard is not None and self is _guard.communicator:
            _guard.before_call()
        return resolve_stream(self)

    return resolved


def replays_graph(replay: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DedupedCudaGraph.replay``, which launches without torch, on the stream given or the current one."""

    @functools.wraps(replay)
    def replayed(self: Any, stream: int | None = None) -> None:
        if _guard is not None:
            _guard.told(_guard.before_replay, replays=True)(None, stream)
        replay(self, stream)

    return replayed
