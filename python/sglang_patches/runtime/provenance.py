"""Patch ``provenance``: a server tells its code state, and does not start when its processes disagree about it.

Upstream 0.5.23 counts accepted tokens but shows their mean only after every ``--decode-log-interval`` decode steps, so
that short runs show none; here each verify pass counts at once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sglang_patches import lane
from sglang_patches.document import server
from sglang_patches.provenance import code_state
from sglang_patches.runtime import _agreement, _metrics, _outcome, _verify_pass
from sglang_patches.runtime._verify_pass import VerifyPass

# Ranks meet in `init_process_group` just before they compare, so a rank that takes longer will not come.
_RANK_WAIT = timedelta(seconds=60)
_KEY = "sglang_patches"
_KEPT = "_sglang_patches_reports"


class CodeStateMismatch(RuntimeError):
    """Processes of one server run different patch sets."""


class _Acceptance:
    """Tokens accepted (bonus token included) and verify passes of this process, counted per request that was running.

    ``drafts``: by number of draft tokens accepted, how many requests of verify passes had so many; ``steps``: by number
    of positions drafted.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.drafts: Counter[int] = Counter()
        self.steps: Counter[int] = Counter()
        self._verified = _metrics.Exported(_metrics.VERIFIED)
        self._drafted = _metrics.Exported(_metrics.DRAFTED)
        self._accepted = _metrics.Exported(_metrics.ACCEPTED)

    @property
    def passes(self) -> int:
        return self.drafts.total()

    def add(self, seen: VerifyPass) -> None:
        self.tokens += seen.tokens
        self.drafts.update(seen.drafts)
        self.steps[seen.steps] += len(seen.drafts)

    def export(self, labels: Mapping[str, Any]) -> None:
        """Bring the metrics up to date.

        Args:
            labels: upstream's own, from its metrics collector.
        """
        _metrics.ACCEPT_LENGTH.child(labels).set(self.tokens / max(self.passes, 1))
        self._verified.export([((), self.passes)], labels)
        positions = range(1, max(self.steps, default=0) + 1)
        # A position counts where it was drafted, so that one in a hundred passes is not taken for 99 rejections.
        for metric, counts in ((self._drafted, self.steps), (self._accepted, self.drafts)):
            metric.export([((str(at),), _at_least(counts, at)) for at in positions], labels)


def _at_least(counts: Counter[int], least: int) -> int:
    return sum(count for number, count in counts.items() if number >= least)


_acceptance = _Acceptance()


def _draft_steps() -> int:
    """Draft steps of this server, for releases that do not change them; 0 where not known."""
    try:
        return int(lane.here().runtime_context().get_spec().speculative_num_steps or 0)
    except Exception:  # not published in this process; upstream raises errors of several classes
        return 0


@functools.cache
def _patch_set_id() -> str:
    return str(code_state()["id"])


def _mean(tokens: int, passes: int) -> float | None:
    return tokens / passes if passes else None


# Contained, as all metrics are: labels of the operator's own may collide with ours, which ends no scheduler.
_export_acceptance = _metrics.contained(
    "provenance", lambda reporter: _acceptance.export(reporter.metrics_collector.labels)
)


def _count(reporter: Any, seen: VerifyPass) -> None:
    if not seen.drafts:
        return
    _acceptance.add(seen)
    if lane.here().has_metrics(reporter):
        _export_acceptance(reporter)


# For upstream's ``_resolve_spec_v2_tokens(self, result, batch)``.
counts_verify_passes = _verify_pass.tells(_count)


# Draft tokens accepted by the requests of the pass that is under way, in releases that have no such method.
_requests: list[int] = []


def counts_request(update: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``Req.update_spec_acceptance_histogram(self, accepted_draft_tokens)``.

    Upstream 0.5.9 calls it for every request that it has verified; `counts_requests` is told once for all of them.
    """

    @functools.wraps(update)
    def counted(self: Any, accepted_draft_tokens: int) -> None:
        update(self, accepted_draft_tokens)
        _requests.append(int(accepted_draft_tokens))

    return counted


def counts_requests(update: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``update_spec_metrics(self, ...)``, which upstream calls after the requests of one pass."""

    @functools.wraps(update)
    def counted(self: Any, *args: Any, **named: Any) -> None:
        update(self, *args, **named)
        drafts = tuple(_requests)
        _requests.clear()
        _count(self, VerifyPass(max(_draft_steps(), *drafts, 0), drafts, sum(drafts) + len(drafts)))

    return counted


def export_info() -> None:
    """Publish the gauge ``sglang_patches_info``, always 1, whose labels tell the code state (HTTP process)."""
    state = code_state()
    patches = ",".join(patch["name"] for patch in state["patches"])
    _metrics.INFO.child({}, patch_set_id=state["id"], release=state["release"], patches=patches).set(1)


def add_scheduler_state(state: dict[str, Any]) -> None:
    """Add what this scheduler tells to ``state``, one entry of ``internal_states``.

    That is its patch set, its acceptance counts, what its patches decided, and its ``process`` of the document.
    """
    state[_KEY] = {
        "patch_set_id": _patch_set_id(),
        "accepted_tokens": _acceptance.tokens,
        "verify_passes": _acceptance.passes,
        "accept_length": _mean(_acceptance.tokens, _acceptance.passes),
        "outcomes": _outcome.outcomes(),
        "process": server.process(_scheduler_name),
    }


def server_info(internal_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry ``sglang_patches`` of ``/server_info``.

    It is the code state of the process that answers (``patch_set_id``, ``release``, ``patches`` with name and sha256,
    ``version``), and ``accept_length``: mean tokens per request and verify pass since start over all data-parallel
    schedulers, bonus token included; None before the first pass and without speculation. ``outcomes`` has what each
    patch decided in this process and in the schedulers (`_outcome.merge`). ``document`` is the provenance document
    (`sglang_patches.document.schema.Document`), None where it cannot be told.
    """
    counts = [state.get(_KEY, {}) for state in internal_states]
    tokens = sum(count.get("accepted_tokens", 0) for count in counts)
    passes = sum(count.get("verify_passes", 0) for count in counts)
    state = code_state()
    return {
        "patch_set_id": state["id"],
        "release": state["release"],
        "version": state["version"],
        "patches": state["patches"],
        "accept_length": _mean(tokens, passes),
        "accepted_tokens": tokens,
        "verify_passes": passes,
        "outcomes": _outcome.merge([_outcome.outcomes(), *(count.get("outcomes", {}) for count in counts)]),
        "document": server.document(_server_args, [count.get("process") for count in counts]),
    }


def _server_args() -> dict[str, Any]:
    return lane.here().resolved_arguments()


def scheduler_info(scheduler: Any = None) -> dict[str, Any]:
    """What a scheduler reports of its code state, and which one it is, when it is ready.

    Args:
        scheduler: upstream's, in lanes where it alone knows its data-parallel rank.
    """
    return {"patch_set_id": _patch_set_id(), "scheduler": _scheduler_name(scheduler)}


def _scheduler_name(scheduler: Any = None) -> str:
    ranks = lane.here().runtime_context().get_parallel()
    return f"dp {lane.here().dp_rank(scheduler)} pp {ranks.pp_rank} tp {ranks.tp_rank}"


def controller_info(scheduler_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a data-parallel controller reports for its schedulers; raises as `check_schedulers` does."""
    check_schedulers(scheduler_infos)
    return {"patch_set_id": _patch_set_id(), "scheduler": "data-parallel controller"}


def keep_reports(controller: object, scheduler_infos: Sequence[Mapping[str, Any]]) -> None:
    """Keep the ready reports of some of a data-parallel controller's schedulers, where upstream drops them (0.5.17)."""
    vars(controller).setdefault(_KEPT, []).extend(scheduler_infos)


def kept_reports(controller: object) -> list[Mapping[str, Any]]:
    """All reports that `keep_reports` was given for this controller."""
    return vars(controller).get(_KEPT, [])


def check_schedulers(scheduler_infos: Sequence[Mapping[str, Any]]) -> None:
    """Compare the ready reports of the schedulers with this process.

    Under data parallelism they come in the order in which schedulers got ready, so each tells its own ranks; one that
    tells nothing (this patch is off there) is named by its place among the reports.

    Raises `CodeStateMismatch` naming the schedulers whose patch set differs.
    """
    reports = [info.get(_KEY, {}) for info in scheduler_infos]
    seen = {
        f"scheduler {report.get('scheduler', f'report {place}')}": report.get("patch_set_id")
        for place, report in enumerate(reports)
    }
    _compare(seen, _patch_set_id(), "the launching process")


def check_ranks(rank: int, world_size: int, wait: timedelta = _RANK_WAIT) -> None:
    """Compare the patch sets of all ranks of the default process group, on all nodes.

    Goes through the group's key-value store rather than a collective: a rank on which this patch is off takes no part,
    and a collective without it would hang. Raises `CodeStateMismatch` naming the ranks that differ or do not report.
    """
    if world_size == 1:
        return
    from torch.distributed import DistStoreError
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    mine = _patch_set_id()
    store.set(f"{_KEY}/{rank}", mine)
    seen: dict[int, str | None] = {}
    for other in range(world_size):
        key = f"{_KEY}/{other}"
        try:
            store.wait([key], wait if None not in seen.values() else timedelta(seconds=1))
            seen[other] = store.get(key).decode()
        except DistStoreError:
            seen[other] = None
    if set(seen.values()) != {mine}:
        _agreement.before_refusing("patch set", rank, [other for other, found in seen.items() if found is not None])
    _compare({f"rank {other}": found for other, found in seen.items()}, mine, f"rank {rank}")


def _compare(seen: Mapping[str, str | None], expected: str, reference: str) -> None:
    different = {who: found for who, found in seen.items() if found != expected}
    if not different:
        return
    told = "; ".join(
        f"{who} has {found or 'reported none (patch provenance off there?)'}" for who, found in different.items()
    )
    raise CodeStateMismatch(
        f"processes of this server run different patch sets: {reference} has {expected}, but {told}. "
        "Start every rank with the same SGLANG_PATCHES, the same sglang-patches version and the same upstream release; "
        "`sglang-patches status` shows them on each host."
    )
