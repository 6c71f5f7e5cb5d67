"""Each question that constant-lookups keeps the answer of, asked of upstream and asked again: microseconds on this CPU.

Upstream's own functions, in this process, without a server. Without a GPU the look for the kind of device is timed with
two calls of the CUDA runtime taken for nothing.
"""

from __future__ import annotations

import dataclasses
import os
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sglang_patches.runtime import constant_lookups as kept

TARGET = Path(__file__).parents[2] / "test/models/tiny-kimi"
ROUNDS = 15


def microseconds(*asked: Callable[[], Any]) -> list[float]:
    """The fastest round of each, taken in turn, so that a busy machine is busy for all."""
    calls = [max(1, int(2e-3 / min(timeit.repeat(ask, number=1, repeat=3)))) for ask in asked]
    best = [float("inf")] * len(asked)
    for _ in range(ROUNDS):
        for at, ask in enumerate(asked):
            best[at] = min(best[at], timeit.timeit(ask, number=calls[at]) / calls[at] * 1e6)
    return best


@contextmanager
def cuda_taken_for_nothing() -> Iterator[None]:
    with (
        mock.patch.object(torch._C, "_cuda_getDeviceCount", (1).__int__),
        mock.patch.object(torch._C, "_cuda_getDevice", (0).__int__),
        mock.patch.object(torch.cuda, "_initialized", True),
    ):
        yield


def questions() -> Iterator[tuple[str, list[float]]]:
    """What is asked, and microseconds: of upstream, and kept."""
    from sglang.srt import environ
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    get: Any = getattr(environ.EnvField.get, "__wrapped__", environ.EnvField.get)
    again = kept.keeps_meanings(get)
    variable = vars(environ.Envs)["SGLANG_IS_IN_CI"]
    with mock.patch.dict(os.environ):
        for value, words in ((None, "that is not set"), ("false", "that is set")):
            os.environ.pop(variable.name, None)
            if value is not None:
                os.environ[variable.name] = value
            yield f"a variable {words}", microseconds(lambda: get(variable), lambda: again(variable))

    model = ModelConfig(str(TARGET), dtype="float32")
    by_model = kept.kept_by_model(mambaish_config)
    yield "whether a model has Mamba states", microseconds(lambda: mambaish_config(model), lambda: by_model(model))

    ranged = torch.profiler.record_function("a range")(lambda: None)
    yield "a range that nobody records", microseconds(ranged, kept.only_while_recorded(ranged))

    with_fields = kept.with_kept_fields(dataclasses)
    batch = object.__new__(ScheduleBatch)
    yield "the fields of a batch", microseconds(lambda: dataclasses.fields(batch), lambda: with_fields.fields(batch))

    with cuda_taken_for_nothing():
        before = torch._utils._get_current_device_index
        own = getattr(before, "__wrapped__", before)
        with mock.patch.object(torch._utils, "_get_current_device_index", own):
            kept.keep_device_kind()
            yield "the index of the device", microseconds(own, torch._utils._get_current_device_index)


def main() -> None:
    print("| question | upstream, µs | kept, µs | upstream takes |\n|---|---|---|---|")
    for question, (upstream, again) in questions():
        print(f"| {question} | {upstream:.2f} | {again:.2f} | {upstream / again:.1f} times as long |", flush=True)


if __name__ == "__main__":
    main()
