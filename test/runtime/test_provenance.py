"""provenance: what a server tells of itself, and that processes with different patch sets do not serve together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lane_table
import pytest
from prometheus_client import generate_latest
from ranks import free_port

from sglang_patches import provenance as code
from sglang_patches.provenance import code_state
from sglang_patches.runtime import _outcome, _verify_pass, provenance
from sglang_patches.runtime._verify_pass import VerifyPass

MINE = code_state()["id"]


def info(patch_set_id: str | None, scheduler: str) -> dict[str, Any]:
    state = {"patch_set_id": patch_set_id, "scheduler": scheduler} if patch_set_id else None
    return {"status": "ready"} | ({"sglang_patches": state} if state else {})


@pytest.mark.parametrize(
    ("edited", "changes"),
    [("runtime/_one.py", True), ("runtime/_package/inside.py", True), ("runtime/a_patch/inside.py", False)],
)
def test_code_that_no_patch_owns_is_part_of_the_patch_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str, changes: bool
) -> None:
    files = ["runtime/_one.py", "runtime/_package/inside.py", "runtime/a_patch/inside.py", "draft/check.py"]
    for name in (*files, "nccl/profile.py", "nccl/topology.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(code, "_RUNTIME", tmp_path / "runtime")
    before = code.shared_sha256()
    (tmp_path / edited).write_text("other = True")
    assert (code.shared_sha256() != before) is changes


def test_schedulers_with_the_same_patch_set_pass() -> None:
    provenance.check_schedulers([info(MINE, "dp 0 pp 0 tp 0"), info(MINE, "dp 0 pp 0 tp 1")])


def test_schedulers_that_differ_or_tell_nothing_are_named_by_their_ranks_in_any_order() -> None:
    reports = [
        info(MINE, "dp 2 pp 0 tp 0"),
        info("0123", "dp 0 pp 0 tp 0"),
        info(None, ""),
        info(MINE, "dp 1 pp 0 tp 0"),
    ]
    with pytest.raises(provenance.CodeStateMismatch) as error:
        provenance.check_schedulers(reports)
    message = str(error.value)
    assert "scheduler dp 0 pp 0 tp 0 has 0123" in message
    assert "scheduler report 2 has reported none" in message
    assert "dp 1" not in message
    assert "dp 2" not in message
    assert MINE in message
    assert "SGLANG_PATCHES" in message


def test_a_data_parallel_controller_compares_its_schedulers() -> None:
    assert provenance.controller_info([info(MINE, "dp 1 pp 0 tp 0")])["patch_set_id"] == MINE
    with pytest.raises(provenance.CodeStateMismatch, match="scheduler dp 1 pp 0 tp 0"):
        provenance.controller_info([info("0123", "dp 1 pp 0 tp 0")])


def test_reports_that_upstream_drops_are_kept_by_controller() -> None:
    one, other = SimpleNamespace(), SimpleNamespace()
    provenance.keep_reports(one, [info(MINE, "dp 0 pp 0 tp 0")])
    provenance.keep_reports(one, [info("0123", "dp 1 pp 0 tp 0")])
    assert provenance.kept_reports(other) == []
    with pytest.raises(provenance.CodeStateMismatch, match="scheduler dp 1 pp 0 tp 0"):
        provenance.controller_info(provenance.kept_reports(one))


def pass_of(*drafts: int, steps: int = 3) -> VerifyPass:
    return VerifyPass(steps, drafts, sum(drafts) + len(drafts))


def test_accept_length_counts_every_verify_pass_at_once() -> None:
    before: dict[str, Any] = {}
    provenance.add_scheduler_state(before)
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=False)
    for seen in (pass_of(1, 2), pass_of(3), pass_of()):
        provenance._count(reporter, seen)
    after: dict[str, Any] = {}
    provenance.add_scheduler_state(after)
    counts = {key: after["sglang_patches"][key] - before["sglang_patches"][key] for key in _COUNTS}
    assert counts == {"accepted_tokens": 9, "verify_passes": 3}


_COUNTS = ("accepted_tokens", "verify_passes")


def test_a_metric_that_cannot_be_made_does_not_end_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    reporter = SimpleNamespace(
        current_scheduler_metrics_enabled=True,
        # As by --extra-metric-labels '{"position": "rack3"}'.
        metrics_collector=SimpleNamespace(labels={"model_name": "x", "position": "rack3"}),
    )
    for _ in range(3):
        provenance._count(reporter, pass_of(2, 1))
    said = [record.message for record in caplog.records if "not up to date" in record.message]
    assert said == ["sglang-patches: provenance: its metrics are not up to date, by an error"]


def test_server_info_weighs_schedulers_by_their_passes_and_tells_the_patches() -> None:
    states = [
        {"sglang_patches": {"accepted_tokens": 30, "verify_passes": 10}},
        {"sglang_patches": {"accepted_tokens": 10, "verify_passes": 10}},
    ]
    told = provenance.server_info(states)
    assert told["accept_length"] == 2.0
    assert told["patch_set_id"] == MINE
    assert told["release"] == lane_table.release()
    patches = {patch["name"]: patch for patch in told["patches"]}
    assert len(patches["provenance"]["sha256"]) == 64
    assert provenance.server_info([{}])["accept_length"] is None


def test_server_info_tells_what_patches_decided_here_and_in_the_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    _outcome.record("a", "applied", "here", width=3)
    scheduler = {
        "sglang_patches": {"outcomes": {"a": {"result": "failed", "detail": "there"}, "b": {"result": "applied"}}}
    }
    told = provenance.server_info([scheduler])["outcomes"]
    assert told["a"]["result"] == "failed"
    assert [entry["detail"] for entry in told["a"]["by_process"]] == ["there", "here"]
    assert told["b"] == {"result": "applied"}


def test_info_metric_carries_the_code_state() -> None:
    provenance.export_info()
    lines = [line for line in generate_latest().decode().splitlines() if line.startswith("sglang_patches_info{")]
    assert len(lines) == 1
    assert f'patch_set_id="{MINE}"' in lines[0]
    assert f'release="{lane_table.release()}"' in lines[0]
    assert lines[0].endswith(" 1.0")


RANK = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
rank, port, behaviour = int(sys.argv[1]), sys.argv[2], sys.argv[3]
where = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=3, timeout=timedelta(seconds=120))
if rank:
    # The others read when rank 0, which serves the store, knows enough to refuse.
    store = type(dist.distributed_c10d._get_default_store())
    wait = store.wait
    store.wait = lambda *given: (time.sleep(1), wait(*given))[1]
if behaviour == "check":
    from sglang_patches.runtime import _outcome, provenance
    try:
        provenance.check_ranks(rank, 3, wait=timedelta(seconds=20))
    except provenance.CodeStateMismatch as error:
        print(error, file=sys.stderr)
        sys.exit(3)
dist.barrier()
"""


def run_ranks(odd_rank: int | None, behaviour: str, selection: str) -> list[tuple[int, str]]:
    """Three real ranks, ``odd_rank`` of which differs: exit status and error output of each."""
    port = free_port()
    processes = []
    for rank in range(3):
        odd = rank == odd_rank
        env = os.environ | ({"SGLANG_PATCHES": selection} if odd else {})
        command = [sys.executable, "-c", RANK, str(rank), str(port), behaviour if odd else "check"]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        return [
            (process.returncode, errors) for process in processes for _, errors in [process.communicate(timeout=200)]
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_ranks_with_one_patch_set_go_on() -> None:
    results = run_ranks(None, "check", "")
    assert [status for status, _ in results] == [0, 0, 0], results


@pytest.mark.parametrize(("behaviour", "selection"), [("check", "-strict-api"), ("skip", "none")])
def test_a_rank_that_differs_or_is_silent_is_named_by_the_others(behaviour: str, selection: str) -> None:
    results = run_ranks(1, behaviour, selection)
    for rank in (0, 2):
        status, errors = results[rank]
        assert status == 3, errors
        assert "rank 1 has" in errors
        assert f"rank {rank} has" in errors
        assert f"rank {2 - rank} has" not in errors


def test_a_pass_that_cannot_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Another algorithm's result may have another shape."""
    told: list[VerifyPass] = []
    tell = _verify_pass.tells(lambda reporter, seen: told.append(seen))
    batch = SimpleNamespace(reqs=[SimpleNamespace(spec_verify_ct=0)])
    scheduler = SimpleNamespace(metrics_reporter=None)
    for _ in range(2):
        assert tell(lambda self, result, batch: ["tokens"])(scheduler, SimpleNamespace(), batch) == ["tokens"]
    assert told == []
    assert [record.message for record in caplog.records] == [
        "sglang-patches: a verify pass cannot be counted; answers do not depend on it"
    ]
