"""constant-lookups: what is kept is what upstream answers now, asked no more often than it can have changed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.configs import Qwen3NextConfig, hybrid_arch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers import scheduler, utils
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative import spec_utils
from torch.profiler import record_function

from sglang_patches import hunks, series, upstream
from sglang_patches.runtime import constant_lookups

PATH = "sglang/srt/environ.py"
TARGET = Path(__file__).parents[1] / "models/tiny-kimi"
NAME = "SGLANG_PATCHES_TEST_LOOKUP"


def environ_module(name: str, patched: bool) -> Any:
    """Upstream's module of variables, with the patch's lines in it or without."""
    installed = upstream.locate()
    assert installed is not None
    lines = installed.read(PATH)
    assert lines is not None
    insertions = series.load(installed.release)["constant-lookups"].insertions[PATH] if patched else ()
    module = types.ModuleType(name)
    exec(compile(hunks.apply(lines, insertions, PATH), PATH, "exec"), vars(module))
    return module


PLAIN, PATCHED = environ_module("plain_environ", False), environ_module("patched_environ", True)
KINDS: dict[str, Callable[[Any], Any]] = {
    "str": lambda module: module.EnvStr("as it is"),
    "bool": lambda module: module.EnvBool(False),
    "int": lambda module: module.EnvInt(7),
    "float": lambda module: module.EnvFloat(None),
    "tuple": lambda module: module.EnvTuple(("a",)),
    "json": lambda module: module.EnvJSON({"n": 1}),
    "computed": lambda module: module.EnvInt(lambda: len(os.environ.get("SGLANG_PATCHES_TEST_OTHER", ""))),
    "alias": lambda module: module.EnvBoolWithAlias(True, deprecated_name="SGLANG_PATCHES_TEST_OTHER"),
}


def field(module: Any, kind: str) -> Any:
    made = KINDS[kind](module)
    made.name = NAME
    return made


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAME, "SGLANG_PATCHES_TEST_OTHER"):
        monkeypatch.delenv(name, raising=False)


def asked(get: Any) -> Any:
    """What `get` gives: its answer, its warnings, or the kind of its error."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            answer = get()
        except Exception as error:
            answer = type(error)
    return answer, type(answer), [str(warning.message) for warning in seen]


TEXTS = st.sampled_from(["", "0", "1", "true", "No", "12", "1.5", "a, b", "[1, 2]", "None", "nonsense", "ä"])
STEPS = st.one_of(
    st.tuples(st.just("put"), TEXTS),
    st.tuples(st.just("other"), TEXTS),
    st.tuples(st.just("set"), st.one_of(st.none(), TEXTS, st.booleans(), st.integers(0, 9))),
    st.tuples(st.just("default"), st.one_of(st.none(), TEXTS)),
    st.tuples(st.sampled_from(["delete", "clear", "leave", "ask"]), st.none()),
    st.tuples(st.just("override"), st.one_of(st.none(), TEXTS)),
)


def answers(module: Any, kind: str, steps: list[tuple[str, Any]]) -> list[Any]:
    """What a variable of `kind` answers, twice after each of `steps`."""
    variable, found, overrides = field(module, kind), [], ExitStack()
    with mock.patch.dict(os.environ), ExitStack() as left:
        left.callback(overrides.close)
        for step, value in steps:
            if step == "put":
                os.environ[NAME] = value
            elif step == "other":
                os.environ["SGLANG_PATCHES_TEST_OTHER"] = value
            elif step == "delete":
                os.environ.pop(NAME, None)
            elif step == "default" and kind != "computed":
                variable.default = value
            elif step == "override":
                overrides.enter_context(variable.override(value))
            elif step == "leave":
                overrides.close()
            elif step in ("set", "clear"):
                getattr(variable, step)(*([value] if step == "set" else []))
            found += [asked(variable.get), asked(variable.get)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.lists(STEPS, max_size=12))
def test_a_variable_means_what_upstream_says_whatever_became_of_it(kind: str, steps: list[tuple[str, Any]]) -> None:
    assert answers(PATCHED, kind, steps) == answers(PLAIN, kind, steps)


def test_a_variable_that_stays_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    variable, read = field(PATCHED, "bool"), mock.Mock(side_effect=os.getenv)
    monkeypatch.setattr(os, "getenv", read)
    for value, answer in ((None, False), ("1", True), ("1", True), ("0", False), (None, False)):
        os.environ.pop(NAME, None)
        if value is not None:
            os.environ[NAME] = value
        read.reset_mock()
        assert [variable.get() for _ in range(3)] == [answer] * 3
        assert read.call_count <= 1
    plain = field(PLAIN, "bool")
    read.reset_mock()
    assert [plain.get() for _ in range(3)] == [False] * 3
    assert read.call_count == 3


def test_an_override_in_an_override_ends_as_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "3")
    variable = field(PATCHED, "int")
    assert variable.get() == 3
    with variable.override(4):
        assert variable.get() == 4
        with variable.override(None):
            assert variable.get() is None
        assert variable.get() == 4
    assert variable.get() == 3
    variable.clear()
    assert variable.get() == 7


def test_an_environment_that_a_test_puts_in_place_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = field(PATCHED, "int")
    assert variable.get() == 7
    with monkeypatch.context() as put:
        put.setattr(os, "environ", {NAME: "5"})
        assert variable.get() == 5
    assert variable.get() == 7


def test_what_a_file_says_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, variable = tmp_path / "value.json", field(PATCHED, "json")
    monkeypatch.setenv(NAME, str(file))
    for value in ([1], [2], 3):
        file.write_text(json.dumps(value))
        assert variable.get() == value
    monkeypatch.setenv(NAME, "[1]")
    variable.get().append(2)
    assert variable.get() == [1]


def test_a_process_without_bytes_behind_its_environment_has_upstreams_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    get = PLAIN.EnvField.get
    assert constant_lookups.keeps_meanings(get) is get


@dataclasses.dataclass
class Config:
    """A model's, as much as upstream asks for; compares by value, so that it has no hash."""

    hf_config: Any
    is_draft_model: bool = False
    linear_attn_registry_result: Any = None


def test_target_and_draft_have_their_own_answers() -> None:
    ask = mock.Mock(side_effect=lambda config: (config.hf_config, config.is_draft_model))
    kept = constant_lookups.kept_by_model(ask)
    target, draft = Config("one"), Config("one", is_draft_model=True)
    alike = Config("one")
    for _ in range(3):
        assert (kept(target), kept(draft), kept(alike)) == (("one", False), ("one", True), ("one", False))
    assert ask.call_count == 3
    target.hf_config = "two"
    draft.is_draft_model = False
    assert (kept(target), kept(draft), kept(alike)) == (("two", False), ("one", False), ("one", False))
    assert ask.call_count == 5


def test_a_model_that_is_gone_leaves_no_answer_to_the_next() -> None:
    kept = constant_lookups.kept_by_model(lambda config: config.linear_attn_registry_result)
    places = set()
    for answer in range(50):
        config = Config("one", linear_attn_registry_result=answer)
        places.add(id(config))
        assert kept(config) == answer
        del config
    assert len(places) < 50


def test_a_verify_asks_once_whether_its_model_has_mamba_states(monkeypatch: pytest.MonkeyPatch) -> None:
    kimi = ModelConfig(str(TARGET), dtype="float32")
    mamba = Config(Qwen3NextConfig())
    for config in (kimi, mamba):
        assert spec_utils.mambaish_config(config) is hybrid_arch.mambaish_config(config)
    assert spec_utils.mambaish_config(kimi) is None
    assert spec_utils.mambaish_config(mamba) is mamba.hf_config
    look = mock.Mock(return_value=None)
    monkeypatch.setattr(hybrid_arch, "mamba2_config", look)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=ModelConfig(str(TARGET), dtype="float32")))
    for _ in range(3):
        spec_utils.commit_mamba_states_after_verify(worker, None, None, None, 4)
    assert look.call_count == 1


def result() -> Any:
    return utils.GenerationBatchResult(next_token_ids=torch.arange(3), accept_lens=torch.ones(3, dtype=torch.int32))


def copied() -> list[int]:
    made = result()
    made.copy_done = mock.Mock()
    made.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    made.copy_done.record.assert_called_once_with()
    return made.next_token_ids.tolist()  # type: ignore[no-any-return]


def names(profile: Any) -> set[str]:
    return {event.key for event in profile.key_averages()}


def test_a_range_is_left_out_until_someone_records(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    enter = record_function.__enter__

    def told(self: Any) -> Any:
        entered.append(self.name)
        return enter(self)

    monkeypatch.setattr(record_function, "__enter__", told)
    assert copied() == [0, 1, 2]
    assert entered == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert copied() == [0, 1, 2]
    assert "copy_result_to_cpu" in names(profile)
    assert entered == ["copy_result_to_cpu"]
    assert copied() == [0, 1, 2]
    assert entered == ["copy_result_to_cpu"]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
@pytest.mark.parametrize("kind", ["kineto", "all threads", "legacy"])
def test_every_profiler_sees_the_ranges_that_upstreams_shows_it(kind: str, elsewhere: bool) -> None:
    def run(call: Callable[[], Any]) -> None:
        if elsewhere:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            call()

    ranged = record_function("a range")(lambda: None)
    options: dict[str, Any] = {"use_kineto": kind != "legacy"}
    if kind == "all threads":
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    seen = []
    for call in (ranged, constant_lookups.only_while_recorded(ranged)):
        with torch.autograd.profiler.profile(**options) as profile:
            run(call)
        seen.append("a range" in names(profile))
    assert seen == [not elsewhere or kind == "all threads"] * 2


def test_an_execution_trace_without_a_profiler_has_the_range(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    trace = torch.profiler.ExecutionTraceObserver().register_callback(str(file))
    trace.start()
    copied()
    trace.stop()
    trace.unregister_callback()
    assert "copy_result_to_cpu" in {node["name"] for node in json.loads(file.read_text())["nodes"]}


def test_where_torch_does_not_tell_who_listens_the_range_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_lookups.ranges, "_HAS_LISTENERS", "_ZN2at7unknownEv")
    constant_lookups.ranges._listened.cache_clear()
    ranged = record_function("a range")(lambda: None)
    assert constant_lookups.only_while_recorded(ranged) is ranged
    constant_lookups.ranges._listened.cache_clear()


def test_torchs_monitor_gets_its_annotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = mock.Mock()
    monkeypatch.setattr(torch.autograd.profiler, "_active_cupti_profiler_observer", monitor)
    copied()
    monitor.push_annotation.assert_called_once_with("copy_result_to_cpu")
    monitor.pop_annotation.assert_called_once_with()


def test_what_was_not_decorated_is_left_alone() -> None:
    assert constant_lookups.only_while_recorded(copied) is copied


@dataclasses.dataclass
class Base:
    a: int = 0


@dataclasses.dataclass
class More(Base):
    b: int = 0


class Plain(More):
    pass


def test_fields_are_those_of_the_class() -> None:
    kept = constant_lookups.with_kept_fields(dataclasses)
    for _ in range(2):
        for made in (Base, More, Plain, Base(), More(), Plain()):
            assert kept.fields(made) == dataclasses.fields(made)
        for wrong in (3, int):
            with pytest.raises(TypeError, match="must be called with a dataclass"):
                kept.fields(wrong)
    others = {name: value for name, value in vars(dataclasses).items() if name != "fields"}
    assert {name: vars(kept)[name] for name in others} == others


def test_a_class_that_becomes_a_dataclass_later_has_its_own_fields() -> None:
    kept = constant_lookups.with_kept_fields(dataclasses)
    late: Any = type("Late", (Base,), {"__annotations__": {"c": int}, "c": 0})
    assert [field.name for field in kept.fields(late)] == ["a"]
    dataclasses.dataclass(late)
    assert [field.name for field in kept.fields(late)] == ["a", "c"]


def test_a_forward_restores_its_batch_without_telling_its_fields_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = object.__new__(ScheduleBatch)
    for each in dataclasses.fields(ScheduleBatch):
        setattr(batch, each.name, None)
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    batch.input_ids = before = torch.arange(2)
    own: Any = SimpleNamespace(batch_record_ct=0, batch_record_buf=[None, None])
    own.record_batch_in_overlap = lambda given: scheduler.Scheduler.record_batch_in_overlap(own, given)
    told = mock.Mock(side_effect=dataclasses.fields)
    monkeypatch.setattr(dataclasses, "fields", told)
    for _ in range(3):
        with scheduler.Scheduler._forward_isolation(own, batch, overlap=True):
            batch.input_ids = None
            pinned = own.batch_record_buf[own.batch_record_ct][1]
            assert len(pinned) == len(ScheduleBatch.__dataclass_fields__)
            assert any(value is before for value in pinned)
        assert batch.input_ids is before
    assert told.call_count <= 1


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Torch's look for the kind of device, before the patch wraps it."""
    look = mock.Mock(return_value=None, spec=[])
    monkeypatch.setattr(torch._utils, "_get_current_device_index", look)
    constant_lookups.keep_device_kind()
    return look


def test_the_kind_of_device_is_looked_for_until_cuda_runs(looked: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.cuda._utils._get_device_index
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert index(None, optional=True) is None
    assert looked.call_count == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert index(None, optional=True) == 3
    assert index(1) == 1
    assert looked.call_count == 1


def test_the_look_is_replaced_once(looked: mock.Mock) -> None:
    once = torch._utils._get_current_device_index
    constant_lookups.keep_device_kind()
    assert torch._utils._get_current_device_index is once


def test_upstream_reads_its_variables_before_torch_is_there() -> None:
    code = "import sys; from sglang_patches.runtime import constant_lookups; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
