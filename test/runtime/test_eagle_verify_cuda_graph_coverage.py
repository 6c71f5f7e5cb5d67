"""eagle-verify-cuda-graph: which sizes a server captures, what its audit tells, and when start-up is refused.

Upstream's argument resolution and its ``get_batch_sizes_to_capture`` are the real ones, for a CUDA server's arguments;
the model runner and the GPU's free memory are stand-ins, because capturing needs a GPU.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from contexts import published_for_scheduler, resolve
from graph_coverage import forget
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from sglang_patches import lane
from sglang_patches.runtime import _outcome
from sglang_patches.runtime.eagle_verify_cuda_graph import counting, coverage
from sglang_patches.runtime.eagle_verify_cuda_graph.reasons import Phase, Reason


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


MODEL, DRAFT = "test/models/tiny-kimi", "test/models/tiny-kimi-eagle3"
BASE = ["--model-path", MODEL, "--dtype", "float32", "--grammar-backend", "none", "--sampling-backend", "pytorch"]
CPU = ["--device", "cpu", "--attention-backend", "torch_native"]
CUDA = ["--device", "cuda", "--attention-backend", "triton"]
SPECULATION = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", DRAFT),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]


def resolved(*arguments: str) -> ServerArgs:
    return resolve(prepare_server_args([*BASE, *arguments]))


def test_an_unknown_mode_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"SGLANG_PATCHES_VERIFY_GRAPH='yes' is not known; it can be auto, require"):
        resolved(*CPU, *SPECULATION)


def test_require_refuses_a_cpu_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    with pytest.raises(coverage.GraphsRequired) as error:
        resolved(*CPU, *SPECULATION, "--max-running-requests", "7")
    message = str(error.value)
    for phase in Phase:
        assert f"{phase} batch size 1-7: cpu" in message
    assert "SGLANG_PATCHES_VERIFY_GRAPH=auto" in message


def test_require_names_what_switched_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    with pytest.raises(coverage.GraphsRequired, match="verify batch size 1-48: off_by_flag"):
        resolved(*CUDA, *SPECULATION, "--disable-cuda-graph")
    resolved(*CUDA, *SPECULATION)


def test_require_names_no_size_where_the_limit_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    server_args = resolved(*CUDA, *SPECULATION)
    view = SimpleNamespace(
        speculative_algorithm="EAGLE3",
        enable_multi_layer_eagle=False,
        disaggregation_mode="null",
        device="cpu",
        max_running_requests=None,
        speculative_num_steps=3,
    )
    monkeypatch.setattr(type(lane.here()), "resolving", lambda self, server_args: view)
    with pytest.raises(coverage.GraphsRequired, match="verify batch size 1 and above: cpu;"):
        coverage.check_arguments(server_args)


def test_require_lets_a_prefill_node_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    resolved(*CUDA, *SPECULATION, "--disaggregation-mode", "prefill")


def test_require_refuses_forwards_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    with pytest.raises(coverage.GraphsRequired, match="speculates with NGRAM"):
        resolved(*CUDA, "--speculative-algorithm", "NGRAM")
    monkeypatch.delenv(coverage.VARIABLE)
    resolved(*CUDA, "--speculative-algorithm", "NGRAM")
    assert "not all forwards of NGRAM are counted" in _outcome.outcomes()[counting.PATCH]["detail"]


def test_without_speculation_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coverage.VARIABLE, "require")
    resolved(*CPU)
    assert _outcome.outcomes()[counting.PATCH]["result"] == "not needed"


_published: list[ServerArgs] = []


def target_runner(limit: int, **changes: Any) -> Any:
    made = SimpleNamespace(
        is_draft_worker=False,
        device="cuda",
        gpu_id=0,
        req_to_token_pool=SimpleNamespace(size=limit),
        lora_manager=None,
        model_config=SimpleNamespace(vocab_size=163840),
        layer_info=SimpleNamespace(num_effective_layers=61),
        decode_num_tokens_per_req=lambda: 4,
        server_args=_published[-1],
    )
    made.__dict__.update(changes)
    return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Gives this process a CUDA server's configuration, with this much free memory (GiB), until the test ends."""
    active = ExitStack()

    def publish_with(free: float, *arguments: str) -> ServerArgs:
        server_args = resolved(*CUDA, *SPECULATION, *arguments)
        # Resolving arguments replaces the root logger's handlers, pytest's with them.
        coverage.logger.addHandler(caplog.handler)
        active.callback(coverage.logger.removeHandler, caplog.handler)
        active.enter_context(published_for_scheduler(server_args))
        _published.append(server_args)
        monkeypatch.setattr("sglang.srt.utils.common.get_available_gpu_memory", lambda *args, **named: free)
        monkeypatch.setattr(type(get_parallel()), "world_group", SimpleNamespace(cpu_group=None), raising=False)
        monkeypatch.setattr(type(lane.here()), "launch_world_size", lambda self: 1)
        active.enter_context(get_parallel().override(attn_tp_size=1, attn_cp_size=1))
        monkeypatch.setattr("sglang.srt.dllm.config.DllmConfig.from_server_args", lambda server_args: None)
        return server_args

    with active:
        yield publish_with


def sizes(runner: Any) -> list[int]:
    # Asked with what has no default in the newest lane.
    asked = {"gathered_buffer_required": False}.keys() & inspect.signature(get_batch_sizes_to_capture).parameters.keys()
    return list(get_batch_sizes_to_capture(runner, **dict.fromkeys(asked, False))[0])


def test_auto_captures_up_to_the_request_limit(server: Any) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "4")
    assert sizes(target_runner(16)) == [1, 2, 3, 4, 6, 8, 10, 12, 15, 16]
    assert get_exec().graph.cuda_graph_config.decode.max_bs == 16
    # The draft's runners get the same.
    assert sizes(target_runner(16, is_draft_worker=True))[-1] == 16
    assert counting.passes.failures == {}


def test_upstreams_sizes_stay_where_they_suffice(server: Any) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "32")
    assert sizes(target_runner(16))[-1] == 16
    assert coverage._state.plan is None


def test_report_adds_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "4")
    monkeypatch.setenv(coverage.VARIABLE, "report")
    assert sizes(target_runner(16)) == [1, 2, 3, 4]


def test_little_memory_adds_fewer_sizes(server: Any) -> None:
    server(13.0, "--cuda-graph-max-bs-decode", "4")
    # A tenth of 13 GiB pays for 48 requests with 4 sizes (1162 MiB), not with 6 or 12.
    assert sizes(target_runner(48)) == [1, 2, 3, 4, 8, 16, 32, 48]
    assert coverage._state.plan is not None
    assert coverage._state.plan.left_out == ""
    assert coverage._state.plan.estimated_mib == 4 * 61 * 3.5 + 44 * 7


def test_still_less_memory_leaves_sizes_out_and_says_so(server: Any) -> None:
    server(4.0, "--cuda-graph-max-bs-decode", "4")
    assert sizes(target_runner(48))[-1] == 8  # 241.5 of 409.6 MiB
    assert coverage._state.plan is not None
    assert coverage._state.plan.left_out == ("4.00 GiB of GPU memory are free, and 10% of it pays for sizes up to 8")


def test_a_prefill_node_adds_nothing(server: Any) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "4", "--disaggregation-mode", "prefill")
    assert sizes(target_runner(16)) == [1, 2, 3, 4]
    assert coverage._state.plan is None


def test_a_change_of_role_captures_the_sizes_it_asks_for(server: Any) -> None:
    """Upstream's ``ensure_decode_cuda_graphs`` on a prefill node that becomes a decode node, long after start."""
    server(20.0, "--disaggregation-mode", "prefill")
    Worker(eagle_worker(None, None, None)).init_cuda_graphs()
    get_context().override("role_switch.flip", disaggregation_mode="decode")
    get_exec().graph.cuda_graph_config.decode.bs = [2, 4]
    assert sizes(target_runner(16)) == [2, 4]
    assert coverage._state.plan is None


def test_thousands_are_not_captured(server: Any) -> None:
    server(140.0, "--cuda-graph-max-bs-decode", "4")
    assert sizes(target_runner(4096))[-1] == coverage.MAX_ADDED_SIZE
    assert coverage._state.plan is not None
    assert coverage._state.plan.left_out == "sizes above 256 are not added"
    assert len(coverage._state.plan.added) < 25


def test_lora_buffers_are_not_outgrown(server: Any) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "4")
    assert sizes(target_runner(16, lora_manager=object())) == [1, 2, 3, 4]
    assert coverage._state.plan is not None
    assert "LoRA" in coverage._state.plan.left_out


def test_a_failure_leaves_upstreams_sizes(server: Any) -> None:
    server(20.0, "--cuda-graph-max-bs-decode", "4")
    assert sizes(target_runner(16, model_config=None)) == [1, 2, 3, 4]
    assert counting.passes.failures == {"extend": 1}


def graphs(*captured: int) -> Any:
    return SimpleNamespace(capture_bs=list(captured), max_bs=max(captured), disable_padding=False)


def eagle_worker(verify: Any, draft: Any, extend: Any, limit: int = 8) -> Any:
    target = SimpleNamespace(
        decode_cuda_graph_runner=verify, req_to_token_pool=SimpleNamespace(size=limit), device="cuda"
    )
    return SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target),
        speculative_num_steps=3,
        draft_worker=SimpleNamespace(
            cuda_graph_runner=draft,
            cuda_graph_runner_for_draft_extend=extend,
            draft_runner=SimpleNamespace(device="cpu"),
        ),
    )


def test_gaps_are_ranges_with_reasons() -> None:
    found = coverage.gaps(eagle_worker(graphs(1, 2, 4), graphs(8), None))
    assert found == {
        Phase.VERIFY: [(5, 8, Reason.BATCH_TOO_LARGE)],
        Phase.DRAFT_EXTEND: [(1, 8, Reason.CPU)],
    }
    no_padding = graphs(1, 2, 4)
    no_padding.disable_padding = True
    found = coverage.gaps(eagle_worker(no_padding, graphs(8), graphs(8)))
    assert found == {Phase.VERIFY: [(3, 3, Reason.SIZE_NOT_CAPTURED), (5, 8, Reason.BATCH_TOO_LARGE)]}


class Worker:
    """Stands where ``EAGLEWorkerV2`` does; a real one needs two models on a GPU."""

    def __init__(self, inner: Any) -> None:
        self.__dict__ = dict(inner.__dict__)

    @coverage.audit
    def init_cuda_graphs(self) -> None:
        self.captured = True


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_audit_tells_full_coverage_and_what_it_cost(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server(20.0)
    coverage._state.plan = coverage.Plan(limit=8, added=(6, 8), estimated_mib=200, seconds=4.21, mib=130.7)
    Worker(eagle_worker(graphs(8), graphs(8), graphs(8))).init_cuda_graphs()
    told = _outcome.outcomes()[counting.PATCH]
    assert told["result"] == "applied"
    assert "every batch up to 8 requests has a CUDA graph in verify, draft_decode, draft_extend" in told["detail"]
    assert (told["added_sizes"], told["added_seconds"], told["added_mib"]) == ([6, 8], 4.2, 131)
    assert told["estimated_mib"] == 200
    assert "passes" in told
    assert warnings(caplog) == []


def test_the_audit_warns_where_capture_took_more_than_estimated(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server(20.0)
    coverage._state.plan = coverage.Plan(limit=8, added=(6, 8), estimated_mib=100, mib=130.7)
    Worker(eagle_worker(graphs(8), graphs(8), graphs(8))).init_cuda_graphs()
    (line,) = warnings(caplog)
    assert "capturing sizes 6, 8 took 131 MiB of GPU memory, more than the estimated 100" in line
    assert "--mem-fraction-static" in line


def test_the_audit_tells_gaps_and_require_refuses_them(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server(20.0)
    coverage._state.plan = coverage.Plan(limit=8, left_out="no memory")
    inner = eagle_worker(graphs(4), graphs(8), graphs(8))
    Worker(inner).init_cuda_graphs()
    told = _outcome.outcomes()[counting.PATCH]
    assert told["result"] == "failed"
    assert told["detail"] == "without a CUDA graph: verify batch size 5-8: batch_too_large (no memory)"
    monkeypatch.setenv(coverage.VARIABLE, "require")
    with pytest.raises(coverage.GraphsRequired, match="verify batch size 5-8: batch_too_large"):
        Worker(inner).init_cuda_graphs()


def test_batches_beyond_what_is_ever_added_are_told_not_failed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server(20.0)
    coverage._state.plan = coverage.Plan(limit=300, left_out="sizes above 256 are not added")
    inner = eagle_worker(graphs(256), graphs(300), graphs(256), limit=300)
    Worker(inner).init_cuda_graphs()
    told = _outcome.outcomes()[counting.PATCH]
    assert told["result"] == "applied"
    assert told["detail"] == (
        "every batch up to 256 requests has a CUDA graph in verify, draft_decode, draft_extend; without a CUDA graph: "
        "verify batch size 257-300: batch_too_large; draft_extend batch size 257-300: batch_too_large "
        "(sizes above 256 are not added)"
    )
    # A gap below it is still a failure, and whoever requires graphs up to the limit does not get them.
    Worker(eagle_worker(graphs(255), graphs(300), graphs(256), limit=300)).init_cuda_graphs()
    assert _outcome.outcomes()[counting.PATCH]["result"] == "failed"
    monkeypatch.setenv(coverage.VARIABLE, "require")
    with pytest.raises(coverage.GraphsRequired, match="257-300"):
        Worker(inner).init_cuda_graphs()


def test_the_audit_of_a_prefill_node_wants_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server(20.0, "--disaggregation-mode", "prefill")
    monkeypatch.setenv(coverage.VARIABLE, "require")
    Worker(eagle_worker(None, None, None)).init_cuda_graphs()
    told = _outcome.outcomes()[counting.PATCH]
    assert told["result"] == "not needed"
    assert "a prefill node runs no verify and no draft decode" in told["detail"]


def test_only_the_first_rank_tells(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server(20.0)
    monkeypatch.setattr(type(get_parallel()), "attn_tp_rank", 1, raising=False)
    Worker(eagle_worker(graphs(8), graphs(8), graphs(8))).init_cuda_graphs()
    assert "result" not in _outcome.outcomes()[counting.PATCH]


NOT_IN_EVERY_LANE = ("gathered_buffer_required", "attention_variant")


@pytest.mark.parametrize(
    ("hooked", "parameters"),
    [
        (get_batch_sizes_to_capture, ["model_runner", "captured_req_width", "gathered_buffer_required"]),
        *(
            (
                runner.capture_one_shape,
                ["self", "size", "forward", "stream_idx", "variant_label", "attention_variant"],
            )
            for runner in (DecodeCudaGraphRunner, EAGLEDraftCudaGraphRunner, EAGLEDraftExtendCudaGraphRunner)
        ),
        (EAGLEWorkerV2.init_cuda_graphs, ["self"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_upstreams_own_functions_carry_the_hooks(hooked: Any, parameters: list[str]) -> None:
    """The stand-ins of tests decorate themselves; these are the ones that serve."""
    assert inspect.unwrap(hooked) is not hooked
    assert hooked.__code__.co_filename == coverage.__file__
    found = list(inspect.signature(hooked).parameters)
    assert found in (parameters, [name for name in parameters if name not in NOT_IN_EVERY_LANE])
