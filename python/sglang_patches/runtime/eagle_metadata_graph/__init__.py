"""Patch ``eagle-metadata-graph``: the attention metadata of an EAGLE cycle is built by small CUDA graphs.

Before each graph of a cycle upstream's triton backend fills the buffers that it reads with some ten small operations,
which cost the scheduler's Python more than the GPU. Upstream can capture them (``MetadataGlueGraph``), for one of the
three runners of a cycle and off by default. Here all three do it, each with a graph of its own (`glue`): the target's
verify by upstream's own route, draft decode and draft extend where they call the backend. `gate` says where, `prep`
what such a graph reads and writes, and `telling` what came of it. A graph is compared with the operations themselves
before it is relied upon, and whatever cannot be captured goes on as upstream does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang_patches.runtime.eagle_metadata_graph import gate, prep
from sglang_patches.runtime.eagle_metadata_graph.prep import Kind
from sglang_patches.runtime.eagle_metadata_graph.telling import told

if TYPE_CHECKING:
    from sglang_patches.runtime.eagle_metadata_graph.glue import CheckedGlueGraph

__all__ = ["glues", "looks_at_batch", "prepares_draft", "prepares_extend"]

# What `glues` leaves on a draft's runner; a target's has upstream's own attribute.
ATTRIBUTE = "_sglang_patches_metadata_graph"


def glues(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of upstream's graph runners: one of an EAGLE cycle gets a metadata graph, where it can."""

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        kind = gate.kind(self)
        if kind is not None:
            _glue(self, kind)

    return wrapped


def _glue(runner: Any, kind: Kind) -> None:
    seen = gate.facts(runner, kind)
    ours = told.runner(kind, seen.tokens)
    if refused := gate.reason(seen):
        ours.record("not needed", refused[1], reason=refused[0])
        return
    from sglang_patches.runtime.eagle_metadata_graph.glue import CheckedGlueGraph

    made = CheckedGlueGraph(runner.device, ours, prep.of(runner, kind))
    ours.record("not needed", "nothing was replayed here so far", reason="not_yet")
    if kind is not Kind.VERIFY:
        setattr(runner, ATTRIBUTE, made)
        return
    runner._metadata_glue = made
    if not gate.operator_skips_view():
        runner._skip_glued_replay_view = True


def looks_at_batch(prepare: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``DecodeCudaGraphRunner._init_replay_attn_metadata``: upstream's route sees no batch once a graph is
    captured, so a batch whose metadata that graph would not give is told to it before."""

    @functools.wraps(prepare)
    def wrapped(self: Any, forward_batch: Any, **kwargs: Any) -> None:
        glue = self._metadata_glue
        if glue is not None and hasattr(glue, "refused"):
            glue.refused = prep.verify_reason(self, forward_batch)
        prepare(self, forward_batch, **kwargs)

    return wrapped


def prepares_extend(runner: Any, view: Any) -> bool:
    """In ``EAGLEDraftExtendCudaGraphRunner.execute``, before it has the backend prepare; True says that it is done.

    Args:
        view: of the batch, as the backend gets it: its tensors are those of the runner's buffers.
    """
    glue: CheckedGlueGraph | None = getattr(runner, ATTRIBUTE, None)
    if glue is None:
        return False
    bs, prepare = view.batch_size, runner.draft_extend_attn_backend.init_forward_metadata_out_graph
    return glue.step(bs, bs, lambda: view, prepare, lambda: prepare(view))


def prepares_draft(runner: Any, forward_batch: Any, raw_bs: int, bs: int) -> bool:
    """In ``EAGLEDraftCudaGraphRunner.execute``, before it has the backend prepare; True says that it is done.

    Args:
        forward_batch: as the backend would get it. Without padding its tensors are the batch's own, of which the
            runner's buffers hold copies: the graph reads those.
        raw_bs, bs: requests without and with padding.
    """
    glue: CheckedGlueGraph | None = getattr(runner, ATTRIBUTE, None)
    if glue is None:
        return False
    backend = runner.draft_attn_backend

    def eager() -> None:
        # What upstream passes.
        backend.init_forward_metadata_out_graph(SimpleNamespace(**vars(forward_batch), num_padding=bs - raw_bs))

    return glue.step(
        bs,
        bs,
        lambda: prep.static_draft_view(runner, forward_batch, raw_bs, bs),
        backend.init_forward_metadata_out_graph,
        eager,
    )
