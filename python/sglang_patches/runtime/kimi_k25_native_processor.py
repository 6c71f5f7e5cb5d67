"""Serve Kimi-K2.5 with the processor that transformers ships, without ``trust_remote_code``.

Upstream 0.5.23 (``multimodal/processors/kimi_k25.py``) is written for the processor in the checkpoint's own Python
files: it reads ``processor.media_processor.media_proc_cfg`` and passes images as ``medias=``. transformers' own
``Kimi_K25Processor``, which a checkpoint without ``auto_map`` gets, has neither and start-up ends in AttributeError.
A transformers without that class (5.12, which 0.5.17 pins) gives the bare tokenizer; images are then cut here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_patches import lane


def _resize_plan(width: int, height: int, patch: int, merge: int, patches: int, patches_on_side: int) -> dict[str, int]:
    """Size and padding of an image, and its tokens: upstream's ``navit_resize_config``, or the same where it has none.

    Args:
        width, height: of the image, in pixels.
        patch: pixels on the side of a patch.
        merge: patches on the side of one token.
        patches, patches_on_side: the most of an image, and of each of its sides.
    """
    try:
        from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config
    except ImportError:
        pass
    else:
        return navit_resize_config(width, height, patch, merge, patches, patches_on_side)
    return resize_plan(width, height, patch, merge, patches, patches_on_side)


def resize_plan(width: int, height: int, patch: int, merge: int, patches: int, patches_on_side: int) -> dict[str, int]:
    """What upstream's ``navit_resize_config`` gives, for a release without it; arguments as above."""
    whole = max(width // patch, 1) * max(height // patch, 1)
    longest = patches_on_side * patch
    scale = min(1.0, math.sqrt(patches / whole), longest / width, longest / height)
    new_width, new_height = (min(max(int(side * scale), 1), longest) for side in (width, height))
    columns, rows = (-(-side // (merge * patch)) for side in (new_width, new_height))
    return {
        "num_tokens": rows * columns,
        "new_width": new_width,
        "new_height": new_height,
        "pad_width": columns * merge * patch - new_width,
        "pad_height": rows * merge * patch - new_height,
    }


class CheckpointImages:
    """Images as the checkpoint's ``preprocessor_config.json`` asks, for a transformers without ``Kimi_K25Processor``.

    Resized with Pillow's bicubic filter (never enlarged), padded with zeros at the right and below to whole merged
    patches, scaled to [0, 1], normalised, and cut into patches.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.patch_size = int(settings["patch_size"])
        self.merge_size = int(settings["merge_size"])
        self.max_patches = int(settings["max_patches"])
        self.size = dict(settings["size"])
        self.image_mean = list(settings["image_mean"])
        self.image_std = list(settings["image_std"])

    @classmethod
    def of(cls, name_or_path: str) -> CheckpointImages:
        """Those of a checkpoint's folder or hub name; OSError where it has no such file."""
        from transformers.image_processing_base import ImageProcessingMixin

        settings, _ = ImageProcessingMixin.get_image_processor_dict(name_or_path)
        return cls(settings)

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
        """Of PIL images: ``pixel_values`` float32 ``[patches, 3, patch, patch]`` of all, ``image_grid_thw`` int64."""
        import torch

        cut = [self._patches(image) for image in images]
        return {
            "pixel_values": torch.cat([patches for patches, _ in cut]),
            "image_grid_thw": torch.tensor([grid for _, grid in cut], dtype=torch.int64),
        }

    def _patches(self, image: Any) -> tuple[Any, tuple[int, int, int]]:
        import numpy as np
        import torch
        from PIL import Image

        patch = self.patch_size
        width, height = image.size
        to = _resize_plan(width, height, patch, self.merge_size, self.max_patches, self.size["max_height"])
        resized = image.convert("RGB").resize((to["new_width"], to["new_height"]), Image.Resampling.BICUBIC)
        pixels = np.pad(np.asarray(resized), ((0, to["pad_height"]), (0, to["pad_width"]), (0, 0)))
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        mean, std = (np.asarray(values, dtype=np.float32) for values in (self.image_mean, self.image_std))
        scaled = (pixels.astype(np.float32) / 255 - mean) / std
        patches = scaled.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        flat = np.ascontiguousarray(patches).reshape(rows * columns, 3, patch, patch)
        return torch.from_numpy(flat), (1, rows, columns)


class NativeKimiProcessor:
    """transformers' ``Kimi_K25Processor`` with the three things upstream asks of the checkpoint's own one.

    Everything else is the wrapped processor's, which may be the bare tokenizer.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        native = getattr(processor, "image_processor", None)
        images = CheckpointImages.of(processor.name_or_path) if native is None else native
        self.image_processor = images
        self.media_processor = SimpleNamespace(
            media_proc_cfg={
                "patch_size": images.patch_size,
                "merge_kernel_size": images.merge_size,
                "in_patch_limit": images.max_patches,
                # transformers names this limit `size`; it too counts patches, not pixels.
                "patch_limit_on_one_side": images.size["max_height"],
                "fixed_output_tokens": None,
                "image_mean": images.image_mean,
                "image_std": images.image_std,
            },
            media_tokens_calculator=self._count_tokens,
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # not set yet: upstream deep-copies processors, which asks a bare object
            raise AttributeError(name)
        return getattr(self._processor, name)

    def _count_tokens(self, media: dict[str, Any]) -> int:
        """Placeholder tokens of one ``{"type": "image", "image": PIL.Image}``."""
        cfg = self.media_processor.media_proc_cfg
        keys = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
        width, height = media["image"].size
        return _resize_plan(width, height, *(cfg[key] for key in keys))["num_tokens"]

    def __call__(self, text: list[str], medias: list[dict[str, Any]] | None = None, **kwargs: Any) -> Any:
        """Tokenise text whose placeholders are expanded already, and preprocess its images on the CPU.

        Returns:
            ``input_ids`` int64 ``[1, tokens]`` and, with images, ``pixel_values`` float32
            ``[patches, 3, patch, patch]`` and ``image_grid_thw``, by the name of this release, int64 ``[images, 3]``.
        """
        out = self.tokenizer(text, return_tensors="pt")
        if medias:
            found = dict(self.image_processor([m["image"] for m in medias], return_tensors="pt"))
            out.update({lane.here().image_grid: found.pop("image_grid_thw"), **found})
        return out


def tokens_as_read(name_or_path: str) -> dict[str, Any]:
    """Arguments for a tokenizer whose configuration transformers 5 has written: a list that transformers 4 cannot read.

    The tokens are in ``tokenizer.json`` as well, so that nothing is lost without it.
    """
    file = Path(name_or_path) / "tokenizer_config.json"
    if not file.is_file() or not isinstance(json.loads(file.read_text()).get("extra_special_tokens"), list):
        return {}
    return {"extra_special_tokens": {}}


def tokenizer_alone(config: Any, name_or_path: str, **named: Any) -> Any:
    """The tokenizer of a Kimi-K2.5 checkpoint without Python code, where transformers raises for want of a processor.

    For ``get_processor`` of upstream 0.5.9; None for every other checkpoint.

    Args:
        config: the checkpoint's.
    """
    if config.model_type != "kimi_k25" or getattr(config, "auto_map", None):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **named, **tokens_as_read(name_or_path))


def adapt(processor: Any) -> Any:
    """A processor upstream's Kimi-K2.5 code can use: the one given where it already can, else wrapped."""
    return processor if hasattr(processor, "media_processor") else NativeKimiProcessor(processor)
