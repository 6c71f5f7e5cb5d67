"""Serve Kimi-K2.5 with the processor that transformers ships, without ``trust_remote_code``.

Upstream 0.5.23 (``multimodal/processors/kimi_k25.py``) is written for the processor in the checkpoint's own Python
files: it reads ``processor.media_processor.media_proc_cfg`` and passes images as ``medias=``. transformers' own
``Kimi_K25Processor``, which a checkpoint without ``auto_map`` gets, has neither and start-up ends in AttributeError.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NativeKimiProcessor:
    """transformers' ``Kimi_K25Processor`` with the three things upstream asks of the checkpoint's own one.

    Everything else is the wrapped processor's.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        images = processor.image_processor
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
        from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config

        cfg = self.media_processor.media_proc_cfg
        keys = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
        width, height = media["image"].size
        return navit_resize_config(width, height, **{key: cfg[key] for key in keys})["num_tokens"]

    def __call__(self, text: list[str], medias: list[dict[str, Any]] | None = None, **kwargs: Any) -> Any:
        """Tokenise text whose placeholders are expanded already, and preprocess its images on the CPU.

        Returns:
            ``input_ids`` int64 ``[1, tokens]`` and, with images, ``pixel_values`` float32
            ``[patches, 3, patch, patch]`` and ``image_grid_thw`` int64 ``[images, 3]``.
        """
        out = self._processor.tokenizer(text, return_tensors="pt")
        if medias:
            out.update(self._processor.image_processor([m["image"] for m in medias], return_tensors="pt"))
        return out


def adapt(processor: Any) -> Any:
    """A processor upstream's Kimi-K2.5 code can use: the one given where it already can, else wrapped."""
    return processor if hasattr(processor, "media_processor") else NativeKimiProcessor(processor)
