"""eagle-metadata-graph: its graphs leave what upstream's operations leave, and are used only where they do.

Upstream's own runners, backends and kernels run in triton's interpreter, in a process of their own
(`metadata_graph.py`), with a stand-in for the CUDA graph that reads again what was captured. Capture itself, and speed,
need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_made import written

from sglang_patches.runtime import _outcome, eagle_metadata_graph
from sglang_patches.runtime.eagle_metadata_graph import gate, prep, telling
from sglang_patches.runtime.eagle_metadata_graph.prep import Kind

NAMES = [kind.value for kind in Kind]
CHAIN_ON_NVIDIA = gate.Facts(
    algorithm="EAGLE3",
    topk=1,
    tokens=4,
    nvidia=True,
    backend="",
    switched_off=False,
    glued=False,
    window=False,
    translated=False,
    dcp_size=1,
    deterministic=False,
    ragged=False,
    two_batch_overlap=False,
    multiplexed=False,
    lora=False,
)


def part(name: str, folder: Path) -> Any:
    return written("metadata_graph.py", "eagle-metadata-graph", name, folder)


@pytest.fixture(scope="module")
def cycles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return part("cycles", tmp_path_factory.mktemp("cycles"))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return part("refused", tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("kind", NAMES)
def test_every_cycle_finds_what_upstreams_operations_leave(cycles: Any, kind: str) -> None:
    """Growing lengths, other requests, padded batches, and two widths in turn."""
    assert set(cycles[kind]) == {4, 3}
    for width, found in cycles[kind].items():
        assert found["wrong"] == [[]] * 17, width
        assert found["told"]["result"] == "applied"
        assert found["told"]["replays"] >= 4
        assert found["held"]  # nothing of a batch is kept for long


def test_a_replayed_graph_gathers_the_requests_slots(cycles: Any) -> None:
    assert cycles["by hand"] == [True] * 5


@pytest.mark.parametrize("kind", NAMES)
def test_what_a_cycle_costs_and_what_is_counted(cycles: Any, kind: str) -> None:
    told, eager = cycles[kind][4]["told"], cycles[kind][4]["eager"]
    if kind == "verify":  # padded batches are upstream's, and of the three other sizes one comes often enough
        assert told["eager"] == {"warm_up": 3, "checked": 3, "padded": 7}
        assert (told["graphs"], told["replays"], cycles[kind][4]["skips"]) == (1, 4, True)
    else:
        assert told["eager"] == {"warm_up": 5, "checked": 6}
        assert (told["graphs"], told["replays"]) == (2, 6)
    # Each captured view is tried once.
    assert eager == sum(told["eager"].values()) + told["graphs"]
    assert sum(told["eager"].values()) + told["replays"] == 17


def test_the_scheduler_is_told_after_the_preparation_and_before_the_model(cycles: Any) -> None:
    assert cycles["order"] == ["prepared", "read done", "model"]


def test_outcome(cycles: Any) -> None:
    assert cycles["outcome"] == {"result": "applied", "detail": "attention metadata is built by a CUDA graph"}


@pytest.mark.parametrize("name", ["seq_lens", "req_pool_indices", "positions"])
def test_a_view_of_the_batchs_own_tensors_is_not_captured(refused: Any, name: str) -> None:
    found = refused[f"fresh {name}"]
    assert found["told"]["result"] == "failed"
    assert (found["told"]["reason"], found["replays"]) == ("unequal", 0)
    assert found["told"]["detail"] == f"{name} is not in the runner's buffers"
    assert found["told"]["eager"] == {"warm_up": 2, "checked": 1, "failed": 5}
    assert found["wrong"] == [[]] * 8


@pytest.mark.parametrize(("name", "buffer"), [("seq_lens", "kv_indices"), ("positions", "kv_indptr")])
def test_a_graph_that_reads_a_past_batch_is_found_out(refused: Any, name: str, buffer: str) -> None:
    """In its second cycle; and no cycle has wrong metadata."""
    found = refused[f"{name} that stays"]
    assert (found["told"]["result"], found["told"]["replays"], found["replays"]) == ("failed", 0, 2)
    assert found["told"]["detail"] == f"{buffer} of step 0 of 2 requests is not what upstream's operations write"
    assert found["wrong"] == [[]] * 8


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    ("what", "reason", "replays"), [("writes nothing", "unequal", 1), ("cannot be captured", "failed", 0)]
)
def test_a_graph_that_is_wrong_is_not_used(refused: Any, kind: str, what: str, reason: str, replays: int) -> None:
    found = refused[f"{kind} that {what}"]
    told = {name: found["told"][name] for name in ("result", "reason", "graphs", "replays")}
    assert told == {"result": "failed", "reason": reason, "graphs": 0, "replays": 0}
    assert found["told"]["eager"] == {"warm_up": 2, "checked": 1, "failed": 5}
    assert found["replays"] == replays
    assert found["wrong"] == [[]] * 8


def test_a_batch_with_another_mask_or_width_is_prepared_by_upstream(refused: Any) -> None:
    """A slice of a batch has a mask of its own; the next batch is replayed again."""
    found = refused["batches"]
    assert found["wrong"] == [[]] * 12
    assert found["replays"] == 0
    assert found["told"]["eager"] == {"warm_up": 2, "checked": 3, "mask": 3, "width": 1}
    after = refused["batch after"]
    assert (after["replays"], after["wrong"], after["told"]["result"]) == (1, [[]], "applied")


def test_the_operators_switches_win(tmp_path: Path) -> None:
    found = part("operator", tmp_path)
    assert (found["neither"]["glue"], found["neither"]["views"], found["neither"]["replays"]) == ([True] * 3, 5, 7)
    assert (found["view"]["glue"], found["view"]["views"], found["view"]["replays"]) == ([True] * 3, 9, 7)
    off = found["off"]
    assert (off["glue"], off["views"], off["replays"]) == ([False] * 3, 9, 0)
    assert [(told["result"], told["reason"], told["replays"]) for told in off["told"]] == [
        ("not needed", "operator", 0)
    ] * 3


def test_off_is_upstream(tmp_path: Path) -> None:
    file = tmp_path / "off.pt"
    command = [sys.executable, str(Path(__file__).with_name("metadata_graph.py")), "off", str(file)]
    environment = os.environ | {"SGLANG_PATCHES": "-eagle-metadata-graph"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert torch.load(file, weights_only=False) == dict.fromkeys(NAMES, (8, 0, False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"algorithm": "EAGLE"}, None),
        ({"tokens": 16}, None),
        ({"algorithm": None}, "no_speculation"),
        ({"algorithm": "DFLASH"}, "algorithm"),
        ({"algorithm": "NGRAM"}, "algorithm"),
        ({"topk": 4}, "topk"),
        ({"nvidia": False}, "device"),
        ({"backend": "FlashInferMLAAttnBackend"}, "other_backend"),
        ({"switched_off": True}, "operator"),
        ({"glued": True}, "operator"),
        ({"window": True}, "sliding_window"),
        ({"translated": True}, "kv_pool"),
        ({"dcp_size": 2}, "context_parallel"),
        ({"deterministic": True}, "deterministic"),
        ({"ragged": True}, "ragged"),
        ({"two_batch_overlap": True}, "two_batch_overlap"),
        ({"multiplexed": True}, "pd_multiplexing"),
        ({"lora": True}, "lora"),
    ],
    ids=str,
)
def test_where_there_is_a_graph(changes: dict[str, Any], reason: str | None) -> None:
    found = gate.reason(replace(CHAIN_ON_NVIDIA, **changes))
    assert (found and found[0]) == reason


@pytest.mark.parametrize(
    ("name", "draft", "kind"),
    [
        ("DecodeCudaGraphRunner", False, Kind.VERIFY),
        ("DecodeCudaGraphRunner", True, None),
        ("UnoDecodeCudaGraphRunner", False, None),
        ("EAGLEDraftCudaGraphRunner", True, Kind.DRAFT_DECODE),
        ("EAGLEDraftNpuGraphRunner", True, None),
        ("EAGLEDraftExtendCudaGraphRunner", True, Kind.DRAFT_EXTEND),
    ],
)
def test_which_runners_are_meant(name: str, draft: bool, kind: Kind | None) -> None:
    runner = type(name, (), {"model_runner": SimpleNamespace(is_draft_worker=draft)})()
    assert gate.kind(runner) is kind


@pytest.mark.parametrize(
    ("which", "name", "leaves", "other"),
    [
        (Kind.VERIFY, "TritonAttnBackend", None, ""),
        (Kind.VERIFY, "HybridAttnBackend", None, "HybridAttnBackend"),
        (Kind.VERIFY, "TboAttnBackend", None, "TboAttnBackend"),
        (Kind.DRAFT_EXTEND, "FlashAttentionBackend", None, "FlashAttentionBackend"),
        (Kind.DRAFT_DECODE, "TritonMultiStepDraftBackend", ["TritonAttnBackend"] * 3, ""),
        (Kind.DRAFT_DECODE, "TritonMultiStepDraftBackend", ["TritonAttnBackend", "Other"], "Other"),
        (Kind.DRAFT_DECODE, "FlashInferMLAMultiStepDraftBackend", [], "FlashInferMLAMultiStepDraftBackend"),
    ],
)
def test_which_backends_are_known(which: Kind, name: str, leaves: list[str] | None, other: str) -> None:
    def made(of: str, **more: Any) -> Any:
        return type(of, (), {"dllm_attention": None, **more})()

    backend = made(name) if leaves is None else made(name, attn_backends=[made(leaf) for leaf in leaves])
    found, parts = gate._backends(backend, which)
    assert found == other
    assert len(parts) == (0 if other else len(leaves or [name]))
    assert gate._backends(made("TritonAttnBackend", dllm_attention=object()), Kind.VERIFY)[1] == []


def test_what_begins_a_buffer() -> None:
    buffer = torch.zeros(8, dtype=torch.int64)
    assert prep.starts(buffer[:3], buffer)
    assert prep.starts(buffer, buffer)
    for other in (None, buffer[1:3], buffer.clone(), buffer[:6:2], buffer.view(torch.int32)[:4]):
        assert not prep.starts(other, buffer)


def test_graphs_are_captured_into_one_pool_while_others_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As upstream's class captures, but for the pool: each of its own takes 2 MiB of the GPU for a few bytes."""
    from sglang_patches.runtime.eagle_metadata_graph.glue import CheckedGlueGraph

    seen: list[Any] = []

    @contextmanager
    def graph(made: Any, **options: Any) -> Iterator[None]:
        seen.append((made, options))
        yield

    pools, streams = iter(("pool", "other pool")), iter(("stream", "other stream"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: f"graph {len(seen)}")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(streams))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    captured: list[str] = []
    glue = CheckedGlueGraph("cuda", telling.Told().runner(Kind.VERIFY, 4), prep.Prep(lambda _: [], lambda _: []))
    assert [glue._capture(lambda: captured.append("once")) for _ in range(2)] == ["graph 0", "graph 1"]
    options = {"pool": "pool", "stream": "stream", "capture_error_mode": "thread_local"}
    assert seen == [("graph 0", options), ("graph 1", options)]
    assert captured == ["once", "once"]


@pytest.mark.parametrize("step", ["capture_begin", "capture_end"])
def test_a_capture_that_fails_leaves_the_current_stream(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own ``graph``, which does not put the stream back where the capture cannot begin or end."""
    from sglang_patches.runtime.eagle_metadata_graph.glue import capture

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    current = ["forward"]

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        yield
        current[0] = before

    steps = dict.fromkeys(("capture_begin", "capture_end"), lambda *_, **__: None) | {step: fail}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(**steps))
    for module, name in ((torch.cuda, "synchronize"), (torch.cuda, "empty_cache"), (torch._C, "_host_emptyCache")):
        monkeypatch.setattr(module, name, lambda: None, raising=False)
    monkeypatch.setattr("torch.cuda._graph_annotations.maybe_stamp_capture_root", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    launched: list[str] = []
    with pytest.raises(RuntimeError, match="during capture"):
        capture(lambda: launched.append(current[0]), "capturing", (0, 1))
    assert launched == ([] if step == "capture_begin" else ["capturing"])
    assert current == ["forward"]


def test_what_is_told_of_several_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    told = telling.Told()
    verify, extend = told.runner(Kind.VERIFY, 4), told.runner(Kind.DRAFT_EXTEND, 4)
    verify.record("not needed", "no NVIDIA GPU", reason="device")
    extend.record("not needed", "no NVIDIA GPU", reason="device")
    found = _outcome.outcomes()[telling.PATCH]
    assert (found["result"], found["detail"], found["reason"]) == ("not needed", "no NVIDIA GPU", "device")
    verify.record("applied", "built by a graph")
    found = _outcome.outcomes()[telling.PATCH]
    assert found["result"] == "applied"
    verified, extended = "verify of 4 draft tokens: built by a graph", "draft_extend of 4 draft tokens: no NVIDIA GPU"
    assert found["detail"] == f"{verified}; {extended}"
    assert "reason" not in found
    assert found["runners"]["draft_extend"]["4"]["reason"] == "device"
    extend.record("failed", "kv_indices", reason="unequal")
    found = _outcome.outcomes()[telling.PATCH]
    assert (found["result"], found["reason"]) == ("failed", "unequal")
    # One of another width, as adaptive speculation has; and one that upstream makes anew forgets the counts.
    told.runner(Kind.VERIFY, 2).record("not needed", "nothing", reason="not_yet")
    verify.replays = 5
    assert set(_outcome.outcomes()[telling.PATCH]["runners"]["verify"]) == {"4", "2"}
    told.runner(Kind.VERIFY, 4)
    assert _outcome.outcomes()[telling.PATCH]["runners"]["verify"]["4"]["replays"] == 0


def test_a_warning_names_runner_and_buffer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_patches.runtime.eagle_metadata_graph.glue import CheckedGlueGraph

    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    buffer = torch.zeros(3)
    runner = telling.Told().runner(Kind.VERIFY, 4)
    glue = CheckedGlueGraph("cpu", runner, prep.Prep(lambda _: [], lambda bs: [("kv_indptr", buffer[:bs])]))
    monkeypatch.setattr(glue, "_capture", lambda prepare: SimpleNamespace(replay=lambda: buffer.fill_(9)))

    def eager() -> None:
        buffer.fill_(1)

    done = [glue.step("key", 2, lambda: None, lambda _: None, eager) for _ in range(4)]
    assert done == [False, False, True, False]
    assert buffer.tolist() == [1, 1, 9]  # what was compared is as the operations left it
    warned = [record.getMessage() for record in caplog.records if "from here on" in record.message]
    assert len(warned) == 1
    assert "verify of 4 draft tokens" in warned[0]
    assert "kv_indptr of 2 requests" in warned[0]


def test_decorators_and_calls_are_where_upstream_prepares() -> None:
    """The patch's lines, all of which the processes above run through but the decorators of ``__init__``."""
    from sglang_patches import series, upstream

    installed = upstream.locate()
    assert installed is not None
    inserted = series.load(installed.release)["eagle-metadata-graph"].insertions
    for path, insertions in inserted.items():
        lines = Path(installed.root, path).read_bytes().split(b"\n")
        below = {b"\n".join(found.lines).strip(): lines[found.after].strip() for found in insertions}
        assert below.pop(b"@eagle_metadata_graph.glues") == b"def __init__(", path
        del below[b"from sglang_patches.runtime import eagle_metadata_graph"]
        (added, upstreams), *others = below.items()
        assert not others
        # A call that is in place of upstream's statement where it has done its work.
        assert upstreams.startswith(b"def _init_replay_attn_metadata(") or (
            added.endswith(b" or \\") and b"attn_backend.init_forward_metadata_out_graph(" in upstreams
        )
    assert eagle_metadata_graph.__all__ == ["glues", "looks_at_batch", "prepares_draft", "prepares_extend"]
