"""What `top` and the dashboard read is what a real server tells."""

from __future__ import annotations

import httpx
import promql
import pytest
import torch

from sglang_patches.observe import upstream
from sglang_patches.observe.figures import figures
from sglang_patches.observe.scrape import Between, Scrape, fetch
from sglang_patches.runtime import _metrics

from .server import Server

TOKENS = 48


@pytest.fixture
def seen(spec_server: Server) -> Between:
    """Readings around one request of `TOKENS` tokens."""
    first = fetch(spec_server.url)
    body = {"text": "The river", "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    httpx.post(f"{spec_server.url}/generate", json=body, timeout=120).raise_for_status()
    return Between(first, fetch(spec_server.url))


def labels_of(scrape: Scrape, name: str) -> set[str]:
    """All labels that some series of this name has."""
    return {label for labels, _ in scrape.series(name) for label in labels}


def test_every_expression_of_the_dashboard_finds_its_metrics_and_labels(seen: Between) -> None:
    # Not on every server: several ranks, patches that are off, upstream's options.
    elsewhere = {
        metric.name for metric in (_metrics.ALLREDUCE, _metrics.OEA_PASSES, _metrics.OEA_EXPERTS, _metrics.OEA_LAYERS)
    }
    optional = {*promql.SCRAPED, *_metrics.OPTIONAL_LABELS}
    for expression in promql.expressions():
        for name, needed in promql.selectors(expression):
            if name in elsewhere:
                continue
            assert name in seen.last, f"{name} in {expression}"
            assert needed - optional <= labels_of(seen.last, name), f"{name} in {expression}"


def test_metrics_of_the_patches_have_the_labels_that_are_declared(seen: Between) -> None:
    for metric in _metrics.ALL:
        for name, own in _metrics.series_names(metric).items():
            if name in seen.last:
                upstreams = {*_metrics.SCHEDULER_LABELS} if metric.scheduler else set()
                assert labels_of(seen.last, name) == {*own, *upstreams}, name
    for name in upstream.ALL:
        assert name in seen.last, name


def test_figures_of_one_request_are_right(spec_server: Server, seen: Between) -> None:
    found = figures(seen)
    told = spec_server.get("/server_info")["sglang_patches"]
    assert found.patch_set_id == told["patch_set_id"]
    assert found.model == spec_server.get("/server_info")["served_model_name"]
    assert found.running is not None
    # The first token is the prefill's.
    assert found.output_tokens_per_s is not None
    assert TOKENS - 1 <= round(found.output_tokens_per_s * found.seconds) <= TOKENS + 4
    assert found.accept_length is not None
    passes = seen.counted(_metrics.VERIFIED.name)[()]
    assert TOKENS - 1 <= round(found.accept_length * passes) <= TOKENS + 4
    shares = [share for share in found.accepted if share is not None]
    assert len(shares) == len(found.accepted) == 3
    assert shares == sorted(shares, reverse=True)
    clock = "device" if torch.cuda.is_available() else "host"
    for phase in found.phases.values():
        assert phase.clock == clock
        assert phase.mean_ms is not None
        assert 0.01 < phase.mean_ms < 5000
        assert phase.graph_share == (1.0 if torch.cuda.is_available() else 0.0)
    assert found.accept_alarm is False
    assert not {"accept_length", "running", "kv_share", "patch_set_id"} & set(found.missing)


def test_passes_are_those_that_upstream_counts_for_the_requests(spec_server: Server) -> None:
    """Not the one more that overlap scheduling runs for a request that has finished: of these, it would be half."""
    first, passes = fetch(spec_server.url), 0
    for length in (2, 3, 4, 9):
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        answer = httpx.post(f"{spec_server.url}/generate", json={"text": "I", "sampling_params": sampling}, timeout=120)
        passes += answer.raise_for_status().json()["meta_info"]["spec_verify_ct"]
    counted = Between(first, fetch(spec_server.url)).counted
    assert counted(_metrics.VERIFIED.name) == {(): passes}
    assert counted(_metrics.DRAFTED.name, ("position",)) == dict.fromkeys([("1",), ("2",), ("3",)], passes)
