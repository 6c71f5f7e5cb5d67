"""pcie-nccl-allreduce: NCCL's rules for a communicator that is for graphs alone, kept by its guard."""

from __future__ import annotations

import ast
import contextlib
import inspect
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.distributed.utils import StatelessProcessGroup

from sglang_patches.runtime import _outcome, cpu_tensor_parallel
from sglang_patches.runtime.pcie_nccl_allreduce import guard
from sglang_patches.runtime.pcie_nccl_allreduce.decision import PATCH


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_outcome, "_recorded", {})
    monkeypatch.setattr(_outcome, "_suppliers", {})
    monkeypatch.setattr(guard, "_guard", None)
    monkeypatch.setattr(guard, "_expected_group", None)


class Stream:
    broken = False

    def __init__(self, name: str, log: list[str], handle: int) -> None:
        self.name, self.log, self.cuda_stream = name, log, handle

    def wait_stream(self, other: Stream) -> None:
        if self.broken:
            raise RuntimeError("no event")
        self.log.append(f"{self.name} waits for {other.name}")


class Cuda:
    """Stands for the CUDA runtime: which stream is current, whether it captures, and what was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.streams = {name: Stream(name, self.log, handle) for handle, name in enumerate(("forward", "side"), 5)}
        self.current = "forward"
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("host waits"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.streams[self.current])
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: Stream(f"number {handle}", self.log, handle))


class Graph:
    """A captured graph, as far as it is followed: an object with an identity."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def captured(following: guard.Guard, cuda: Cuda, calls: int) -> Graph:
    graph = Graph()
    following.before_capture(graph)
    cuda.capturing = True
    for _ in range(calls):
        following.before_call()
    cuda.capturing = False
    following.after_capture(graph)
    return graph


def test_graphs_on_one_stream_wait_for_nothing(cuda: Cuda) -> None:
    following = guard.Guard(object())
    target, draft = captured(following, cuda, 122), captured(following, cuda, 2)
    for graph in (target, draft, draft, target):
        following.before_replay(graph)
    assert cuda.log == []
    assert following.figures() == {
        "graphs": 2,
        "eager_calls_held": 0,
        "replays_held": 0,
        "replays_ordered": 0,
        "hooks_failed": 0,
    }


def test_an_eager_call_waits_for_graphs_and_the_next_graph_for_it(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    following = guard.Guard(object())
    graph = captured(following, cuda, 1)
    following.before_call()  # nothing is running yet
    assert cuda.log == []
    following.before_replay(graph)
    assert cuda.log == ["host waits"]
    following.before_call()
    following.before_call()  # on the first's heels: calls that are not captured need no order of ours
    assert cuda.log == ["host waits"] * 2
    following.before_replay(graph)
    assert cuda.log == ["host waits"] * 3
    assert following.figures() | {"graphs": 0} == {
        "graphs": 0,
        "eager_calls_held": 1,
        "replays_held": 2,
        "replays_ordered": 0,
        "hooks_failed": 0,
    }
    assert len(caplog.messages) == 1
    assert "SGLANG_PATCHES_NCCL_PROFILE=none" in caplog.messages[0]


def test_graphs_on_two_streams_are_put_in_order_unless_one_has_no_calls(cuda: Cuda) -> None:
    following = guard.Guard(object())
    graph, metadata_only = captured(following, cuda, 3), captured(following, cuda, 0)
    following.before_replay(graph)
    cuda.current = "side"
    following.before_replay(metadata_only)
    assert cuda.log == []
    following.before_replay(graph)
    cuda.current = "forward"
    following.before_replay()  # launched without torch: may have calls
    assert cuda.log == ["side waits for forward", "forward waits for side"]
    assert following.replays_ordered == 2


def test_a_capture_that_failed_leaves_no_calls_to_the_next(cuda: Cuda) -> None:
    following = guard.Guard(object())
    following.before_capture(Graph())
    cuda.capturing = True
    following.before_call()
    without_calls = captured(following, cuda, 0)
    assert without_calls not in following.graphs


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> guard.Guard:
    """A guard that torch's own registries of hooks call, as captures and replays do; they swallow what it raises."""
    from torch.cuda import graphs

    for registry in ("capture_start", "capture_end", "replay_start"):
        monkeypatch.setattr(graphs, f"_global_{registry}_hooks", type(graphs._global_capture_end_hooks)())
    following = guard.Guard(object())
    following.register()
    return following


def tell(registry: str, graph: Any) -> None:
    graphs = torch.cuda.graphs
    graphs._run_global_hooks(getattr(graphs, f"_global_{registry}_hooks"), graph)


def test_a_replay_that_cannot_be_ordered_waits_on_the_host(
    hooked: guard.Guard, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, unseen = captured(hooked, cuda, 1), Graph()
    tell("replay_start", graph)
    monkeypatch.setattr(Stream, "broken", True)
    cuda.current = "side"
    tell("replay_start", graph)
    assert cuda.log == ["host waits"]
    monkeypatch.setattr(Stream, "broken", False)
    tell("replay_start", unseen)  # any graph may have calls now, and on which stream the last one went is not known
    assert cuda.log == ["host waits"] * 2
    hooked.before_call()
    assert cuda.log == ["host waits"] * 3
    assert hooked.figures()["hooks_failed"] == 1
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "takes every graph for one with calls" in caplog.messages[0]


def test_a_graph_whose_capture_could_not_be_followed_counts_as_having_calls(hooked: guard.Guard, cuda: Cuda) -> None:
    graph = (1, 2)  # no weak references to tuples
    tell("capture_start", graph)
    cuda.capturing = True
    hooked.before_call()
    cuda.capturing = False
    tell("capture_end", graph)
    assert (hooked.unknown, hooked.hooks_failed, cuda.log) == (True, 1, [])
    tell("replay_start", Graph())
    hooked.before_call()
    assert cuda.log == ["host waits"]


def test_every_method_of_upstreams_communicator_passes_the_guard_before_it_calls_nccl() -> None:
    """All that issue a collective ask for the stream, where the guard sits, and after the check for `disabled`."""
    tree = ast.parse(inspect.getsource(pynccl.PyNcclCommunicator))
    issuing = []
    for method in ast.walk(tree):
        if not isinstance(method, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
        streams = [call for call in calls if ast.unparse(call.func) == "cudaStream_t"]
        if not streams:
            continue
        issuing.append(method.name)
        asked = [call.lineno for call in calls if ast.unparse(call.func) == "self._resolve_stream"]
        assert len(asked) == 1, method.name
        assert all(asked[0] < call.lineno for call in streams), method.name
    assert {"all_reduce", "outplace_all_reduce", "all_gather", "reduce_scatter", "broadcast"} <= set(issuing)
    assert hasattr(pynccl.PyNcclCommunicator._resolve_stream, "__wrapped__")


class Alone(StatelessProcessGroup):
    """One rank that says it is one of two."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 2

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return obj


class Nccl:
    """Stands for the NCCL library: keeps how communicators were asked for."""

    made: ClassVar[list[int | None]] = []

    def __init__(self, path: str | None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: "2.30.7"

    def ncclCommInitRankConfig(self, size: int, identifier: Any, rank: int, config: Any) -> object:
        self.made.append(config.graphUsageMode)
        return object()

    def ncclCommInitRank(self, size: int, identifier: Any, rank: int) -> object:
        self.made.append(None)
        return object()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Any:
    """Upstream's own constructor on a group, with NCCL and CUDA replaced."""
    monkeypatch.setattr(pynccl, "NCCLLibrary", Nccl)
    monkeypatch.setattr(pynccl, "get_current_device_stream_fast", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(Nccl, "made", [])
    # The CPU stands for a GPU here.
    monkeypatch.setattr(cpu_tensor_parallel, "refuse_cpu", lambda device: None)
    return lambda group: pynccl.PyNcclCommunicator(group, "cpu")


def test_only_the_expected_communicator_is_made_for_graphs_and_followed(make: Any, cuda: Cuda) -> None:
    ours, other = Alone(), Alone()
    make(other)
    guard.expect(ours)
    make(other)
    communicator = make(ours)
    make(ours)  # another one on the same group later, as upstream makes for KV transfers
    assert Nccl.made == [None, None, 1, None]
    assert guard._guard is not None
    assert guard._guard.communicator is communicator

    data = torch.zeros(4)
    graph: Any = Graph()
    cuda.capturing = True
    with communicator.change_state(enable=True):
        communicator.all_reduce(data)
    cuda.capturing = False
    torch.cuda.graphs._run_global_hooks(torch.cuda.graphs._global_capture_end_hooks, graph)
    torch.cuda.graphs._run_global_hooks(torch.cuda.graphs._global_replay_start_hooks, graph)
    cuda.log.clear()
    communicator.all_reduce(data)  # disabled: issues nothing
    assert cuda.log == []
    with communicator.change_state(enable=True):
        communicator.all_reduce(data)
    assert cuda.log == ["host waits"]
    assert _outcome.outcomes()[PATCH]["eager_calls_held"] == 1
    assert _outcome.outcomes()[PATCH]["graphs"] == 1


def test_graphs_that_upstream_launches_without_torch_are_followed(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    from sglang.srt.model_executor.runner_backend.cuda_graph_dedup_mixin import DedupedCudaGraph

    following = guard.Guard(object())
    monkeypatch.setattr(guard, "_guard", following)
    launched: list[Any] = []
    registry: Any = SimpleNamespace(replay=lambda graph, stream: launched.append((following.replaying, stream)))
    graph = DedupedCudaGraph(raw_graph=1, original_graph=None, registry=registry)
    graph.replay(7)
    graph.replay(stream=7)
    assert launched == [(True, 7)] * 2
    assert cuda.log == []
    graph.replay(cuda.streams["side"].cuda_stream)
    following.before_replay()
    assert cuda.log == ["number 6 waits for number 7", "forward waits for number 6"]
