"""Lets upstream serve a Kimi-K2.5 checkpoint that carries no code of its own.

Upstream's `multimodal/processors/kimi_k25.py` speaks to the processor class that Kimi's checkpoints bring along
(`trust_remote_code`). `transformers` has a processor for `kimi_k25` too; this adapts it to what upstream asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.configs.kimi_k25 import KimiK25Config
from sglang.srt.multimodal.customized_mm_processor_utils import register_customized_processor
from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config
from transformers import BatchFeature
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor


class MediaProcessor:
    """The `media_processor` attribute that upstream reads: image settings and the number of tokens of an image."""

    def __init__(self, image_processor: Any) -> None:
        self.media_proc_cfg: dict[str, Any] = {
            "patch_size": image_processor.patch_size,
            "merge_kernel_size": image_processor.merge_size,
            "in_patch_limit": image_processor.max_patches,
            "patch_limit_on_one_side": image_processor.size["max_height"],
            "fixed_output_tokens": None,
            "image_mean": list(image_processor.image_mean),
            "image_std": list(image_processor.image_std),
        }

    def media_tokens_calculator(self, media: Mapping[str, Any]) -> int:
        """Placeholder tokens of one `{"type": "image", "image": PIL image}`."""
        config = self.media_proc_cfg
        width, height = media["image"].size
        return navit_resize_config(
            width,
            height,
            config["patch_size"],
            config["merge_kernel_size"],
            config["in_patch_limit"],
            config["patch_limit_on_one_side"],
        )["num_tokens"]


class KimiK25Processor(Kimi_K25Processor):
    """The library's processor with the call signature of the one in Kimi's checkpoints."""

    @property
    def media_processor(self) -> MediaProcessor:
        return MediaProcessor(self.image_processor)

    def __call__(
        self, text: str | Sequence[str] | None = None, medias: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Tokenise `text`, whose image placeholders are already expanded, and cut the images into patches.

        Returns:
            `input_ids` (1, T); with images also `pixel_values` (patches, 3, patch size, patch size) float32 and
            `grid_thws` (images, 3) int64.
        """
        features = dict(self.tokenizer(text, return_tensors=kwargs.get("return_tensors", "pt")))
        if medias:
            images = self.image_processor([media["image"] for media in medias], return_tensors="pt")
            features |= {"pixel_values": images["pixel_values"], "grid_thws": images["image_grid_thw"]}
        return BatchFeature(features)


register_customized_processor(KimiK25Processor)(KimiK25Config)
