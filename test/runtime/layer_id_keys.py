"""Where a draft and an operator name the layers to capture, and in which convention."""

from __future__ import annotations

KEY, HOW = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention"
IDS, CONVENTION = "SGLANG_PATCHES_AUX_LAYER_IDS", "SGLANG_PATCHES_AUX_LAYER_CONVENTION"
SPECULATORS = {"speculators_model_type": "eagle3"}
