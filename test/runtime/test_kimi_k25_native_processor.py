"""kimi-k25-native-processor: upstream's processor code on the processor that transformers loads for the test model."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from sglang_patches.runtime import kimi_k25_native_processor

MODEL = Path(__file__).parents[1] / "models/tiny-kimi"


@pytest.fixture(scope="module")
def adapted() -> Any:
    processor = AutoProcessor.from_pretrained(MODEL)
    assert not hasattr(processor, "media_processor"), "transformers has grown what this patch adds: remove the patch"
    return kimi_k25_native_processor.adapt(processor)


@pytest.mark.parametrize("size", [(14, 14), (28, 28), (29, 27), (80, 60), (333, 57), (900, 700), (2000, 40)])
def test_stated_token_count_is_what_preprocessing_makes(adapted: Any, size: tuple[int, int]) -> None:
    media = {"type": "image", "image": Image.new("RGB", size, (200, 30, 90))}
    out = adapted(["<|media_pad|>"], medias=[media])
    merge = adapted.media_processor.media_proc_cfg["merge_kernel_size"]
    assert adapted.media_processor.media_tokens_calculator(media) == int(out["image_grid_thw"].prod()) // merge**2
    assert out["pixel_values"].shape[0] == int(out["image_grid_thw"].prod())
    assert out["pixel_values"].dtype == torch.float32


@pytest.mark.parametrize("size", [(14, 14), (29, 27), (333, 57), (900, 700), (2000, 40)])
def test_images_cut_here_are_those_of_transformers(size: tuple[int, int]) -> None:
    native = getattr(AutoProcessor.from_pretrained(MODEL), "image_processor", None)
    if native is None:
        pytest.skip("this transformers has no Kimi_K25Processor to compare with")
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).convert("RGB")
    ours = kimi_k25_native_processor.CheckpointImages.of(str(MODEL))([image])
    theirs = native([image], return_tensors="pt")
    assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"].tolist()
    assert ours["pixel_values"].shape == theirs["pixel_values"].shape
    # Resized by Pillow here and by torch there, whose fixed-point arithmetic differs by a few of 255 levels.
    resized = size in ((900, 700), (2000, 40))
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], rtol=0, atol=0.05 if resized else 1e-5)


def test_text_alone_is_only_tokenised(adapted: Any) -> None:
    out = adapted(["the sea"])
    assert out["input_ids"].tolist() == [adapted.tokenizer("the sea")["input_ids"]]
    assert "pixel_values" not in out


def test_copies_as_upstream_copies_processors(adapted: Any) -> None:
    twin = copy.deepcopy(adapted)
    assert twin.media_processor.media_proc_cfg == adapted.media_processor.media_proc_cfg
    assert twin.tokenizer is not adapted.tokenizer


def test_a_processor_that_has_it_all_is_left_alone() -> None:
    class Remote:
        media_processor = object()

    remote = Remote()
    assert kimi_k25_native_processor.adapt(remote) is remote


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 3), st.integers(1, 4096), st.integers(1, 512))
def test_the_plan_for_older_releases_is_upstreams(width: int, height: int, merge: int, most: int, side: int) -> None:
    from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config

    from sglang_patches.runtime.kimi_k25_native_processor import resize_plan

    given_sizes = (width, height, 14, merge, most, side)
    assert resize_plan(*given_sizes) == navit_resize_config(*given_sizes)


def test_a_list_of_extra_tokens_is_read_as_transformers_4_can(tmp_path: Path) -> None:
    from sglang_patches.runtime.kimi_k25_native_processor import tokenizer_alone, tokens_as_read

    assert tokens_as_read(str(MODEL)) == {"extra_special_tokens": {}}
    assert tokens_as_read(str(tmp_path)) == {}
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": {"image_token": "<i>"}}')
    assert tokens_as_read(str(tmp_path)) == {}
    assert tokenizer_alone(SimpleNamespace(model_type="kimi_k25", auto_map={"AutoProcessor": "x"}), str(MODEL)) is None
    assert tokenizer_alone(SimpleNamespace(model_type="llava"), str(MODEL)) is None
