"""What one verify pass did for the requests that were still running, read off upstream's own result.

Under overlap scheduling a request is verified once more after it has finished, because the next pass was launched
before anyone knew; upstream throws that result away. Under ``--speculative-adaptive`` the draft's length changes from
pass to pass, and may have changed already when a result is looked at: so it is read off the result.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("sglang_patches")
# Those who could not be told of a pass, so that the log has one line.
_failed: set[Callable[..., Any]] = set()


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """Of the requests that were running; there may be none.

    Attributes:
        steps: positions that were drafted, the same for all requests; in a tree its depth; 0 where nothing was drafted.
        drafts: by request, how many draft tokens were accepted, 0 to `steps`.
        tokens: accepted by all of them together, those that were not drafted (the bonus token) included.
    """

    steps: int
    drafts: tuple[int, ...]
    tokens: int


def tells(seen: Callable[[Any, VerifyPass], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for upstream's ``_resolve_spec_v2_tokens(self, result, batch)``, called once a verify pass.

    Args:
        seen: gets upstream's metrics reporter and the pass, after upstream is done with it.
    """

    def decorate(resolve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(resolve)
        def resolved(self: Any, result: Any, batch: Any) -> Any:
            before = [getattr(request, "spec_verify_ct", 0) for request in batch.reqs]
            tokens = resolve(self, result, batch)
            try:
                seen(self.metrics_reporter, _read(result, batch, before))
            except Exception:  # another algorithm's result may have another shape; no figure is worth the scheduler
                if not _failed:
                    logger.exception("sglang-patches: a verify pass cannot be counted; answers do not depend on it")
                _failed.add(seen)
            return tokens

        return resolved

    return decorate


def _read(result: Any, batch: Any, before: list[int]) -> VerifyPass:
    # Upstream counts a pass for a request unless it had finished or was retracted.
    running = [at for at, request in enumerate(batch.reqs) if request.spec_verify_ct > before[at]]
    # Both are left there by upstream, by request: accepted draft tokens, and those with what was not drafted.
    drafts, lengths = result.num_correct_drafts_per_req_cpu, result.accept_lens.tolist()
    accepted = tuple(drafts[at] for at in running)
    return VerifyPass(max(_steps(result), *accepted, 0), accepted, sum(lengths[at] for at in running))


def _steps(result: Any) -> int:
    """Of the pass that `result` is of. Its width is that of the pass; depth follows from it where drafts are chains."""
    width = int(result.speculative_num_draft_tokens or 1)  # the token before the drafts is one of them
    from sglang.srt.runtime_context import get_spec

    try:
        spec = get_spec()
        tree = int(spec.speculative_eagle_topk or 1) > 1
        # Upstream adapts no trees, so their depth stays what it was at start.
        return min(width - 1, int(spec.speculative_num_steps or 0)) if tree else width - 1
    except Exception:  # not published in this process; upstream raises errors of several classes
        return width - 1
