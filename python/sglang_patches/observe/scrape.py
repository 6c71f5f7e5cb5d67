"""One reading of a server's ``/metrics``, and what counted up between two."""

from __future__ import annotations

import functools
import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang_patches import direct
from sglang_patches.document.secrets import mask_text
from sglang_patches.errors import PatchError

_TIMEOUT_S = 10.0
# Ranks of one data-parallel replica see the same requests, and some metrics are told by each of them.
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")

# Ends of the names of what only grows: a counter, and the series of a histogram.
_COUNTED = ("_total", "_count", "_sum", "_bucket")

Labels = Mapping[str, str]
Series = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels.

    Attributes:
        at: seconds of a clock that only goes forward.
    """

    at: float
    samples: Mapping[str, Mapping[Series, float]]

    def __contains__(self, name: object) -> bool:
        return name in self.samples

    def series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series of this name; none where there is no such metric."""
        for labels, value in self.samples.get(name, {}).items():
            yield dict(labels), value


def fetch(url: str, api_key: str = "", timeout: float = _TIMEOUT_S) -> Scrape:
    """Read ``/metrics`` of the server at `url`.

    Raises:
        PatchError: nothing answers there, it wants a key, it has no metrics, or they are not SGLang's.
    """
    shown = mask_text(url)
    request = direct.request(url, "/metrics", api_key)
    try:
        with direct.opener.open(request, timeout=timeout) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise PatchError(f"{shown}/metrics: answered {error.code}\n  remedy     {_remedy(error.code)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise PatchError(
            f"{shown}/metrics: {why}\n  remedy     name a running SGLang server that listens there (--url)"
        ) from None
    found = parse(text, time.monotonic())
    if not any(name.startswith("sglang") for name in found.samples):
        raise PatchError(
            f"{shown}/metrics: answers, but has no metric of SGLang\n"
            f"  expected   names that begin with sglang\n"
            f"  remedy     name an SGLang server (--url), started with --enable-metrics"
        )
    return found


def _remedy(code: int) -> str:
    if code in (401, 403):
        return "give its API key: SGLANG_API_KEY_FILE, SGLANG_API_KEY or --api-key"
    if code == 404:
        return "start it with --enable-metrics (make serve and the recipes do), or name an SGLang server (--url)"
    if 300 <= code < 400:
        return "name the URL that it redirects to: redirects are not followed"
    return "look at its log"


def parse(text: str, at: float) -> Scrape:
    """Samples of a text in Prometheus' exposition format.

    Raises:
        PatchError: it is no such text.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[Series, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isnan(sample.value):
                    continue  # upstream's way to say that it does not know
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise PatchError(
            f"/metrics: not Prometheus' text format: {error}\n  remedy     name an SGLang server (--url)"
        ) from None
    return Scrape(at, samples)


@dataclass(frozen=True)
class Between:
    """What counters counted between two readings of one server."""

    first: Scrape
    last: Scrape

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    @functools.cached_property
    def restarted(self) -> bool:
        """Whether a counter went back: the server was started anew in between."""
        return any(
            value < self.first.samples.get(name, {}).get(labels, 0.0)
            for name, series in self.last.samples.items()
            if name.endswith(_COUNTED)
            for labels, value in series.items()
        )

    def counted(self, name: str, by: tuple[str, ...] = (), where: Labels | None = None) -> dict[tuple[str, ...], float]:
        """Growth of a counter, by the values of labels `by`; empty where there is no such metric.

        Of the ranks of one replica the one that counted most tells; replicas are added up. A series that was not there
        before began at zero, and so did all of them where the server was started anew: also those that have come
        further since than they were, so that shares and means stay what they are.
        """
        before = {} if self.restarted else self.first.samples.get(name, {})
        return _over_replicas(self.last, name, by, where, lambda labels, value: value - before.get(labels, 0.0))


def latest(
    scrape: Scrape, name: str, by: tuple[str, ...] = (), where: Labels | None = None
) -> dict[tuple[str, ...], float]:
    """Values of a gauge (or of a counter since start), as `Between.counted` sums them."""
    return _over_replicas(scrape, name, by, where, lambda labels, value: value)


def _over_replicas(
    scrape: Scrape,
    name: str,
    by: tuple[str, ...],
    where: Labels | None,
    amount: Callable[[Series, float], float],
) -> dict[tuple[str, ...], float]:
    most: dict[Series, float] = {}
    for series, value in scrape.samples.get(name, {}).items():
        labels = dict(series)
        if labels.get("priority"):
            continue  # of one priority: the series without has them all
        if any(labels.get(label) != wanted for label, wanted in (where or {}).items()):
            continue
        replica = tuple(pair for pair in series if pair[0] not in RANKS)
        most[replica] = max(most.get(replica, float("-inf")), amount(series, value))
    found: dict[tuple[str, ...], float] = {}
    for replica, value in most.items():
        labels = dict(replica)
        key = tuple(labels.get(label, "") for label in by)
        found[key] = found.get(key, 0.0) + value
    return found
