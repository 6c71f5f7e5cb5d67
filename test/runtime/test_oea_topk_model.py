"""oea-topk in the real target: logits of verify and decode equal transformers' with the rule in its router, float32.

`oea_model.py` runs upstream's patched `ModelRunner`. The reference is transformers' forward of the same weights, whose
router chooses by a loop over tokens written from the paper.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.tiny_kimi.reference import load_text_model
from oea_paper import PREFIX, RULES, WIDTH, naive, text
from transformers import DynamicCache

from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import Rule

HERE = Path(__file__).parent
MOE_LAYERS = 11


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("oea") / "found.pt"
    environ = os.environ | {"SGLANG_PATCHES": "+oea-topk", "SGLANG_PATCHES_OEA_K0": "1"}
    command = [sys.executable, str(HERE / "oea_model.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(torch.load(out))


class Reference:
    """transformers' model; of the prompts its own routing, of what follows them that of a rule."""

    def __init__(self) -> None:
        self.model = load_text_model(HERE.parent / "models/tiny-kimi")
        self.rule: Rule | None = None
        self.loaded = self.upstream = self.layers = 0
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self.route)

    def route(self, gate: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self.rule is None:
            return output
        logits, weights, ids = output
        router = Router(2, scale=gate.routed_scaling_factor)
        self.upstream += len(set(ids.flatten().tolist()))
        weights, ids = torch.zeros_like(weights), torch.zeros_like(ids)
        chosen = naive(logits, gate.e_score_correction_bias, len(logits), self.rule, router)
        self.loaded += max(2, len({expert for slots in chosen for expert, _ in slots}))
        self.layers += 1
        for row, slots in enumerate(chosen):
            for slot, (expert, weight) in enumerate(slots):
                ids[row, slot], weights[row, slot] = expert, weight
        return logits, weights, ids

    @torch.inference_mode()
    def logits(self, rule: Rule | None, width: int) -> torch.Tensor:
        """Of the first `width` draft tokens of each request, in one batch."""
        self.rule, cache = None, DynamicCache(config=self.model.config)
        self.model(torch.tensor([text(1, PREFIX), text(2, PREFIX)]), past_key_values=cache, use_cache=True)
        self.rule = rule
        self.loaded = self.upstream = self.layers = 0
        drafts = torch.tensor([text(11, WIDTH)[:width], text(12, WIDTH)[:width]])
        return self.model(drafts, past_key_values=cache, use_cache=True).logits.flatten(0, 1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if name != "decode only"])
def test_logits_are_transformers_with_the_rule(served: Any, reference: Reference, name: str) -> None:
    for phase, width in (("verify", WIDTH), ("decode", 1)):
        got = served["found"][name]["logits"][phase]
        torch.testing.assert_close(got, reference.logits(RULES[name], width), atol=2e-4, rtol=0)
        told = served["found"][name]["experts"].get(phase)
        if served["found"][name]["passes"].get((phase, "eager", "applied")):
            experts = {"loaded": reference.loaded, "upstream": reference.upstream, "layers": MOE_LAYERS}
            assert told == experts
            assert reference.layers == MOE_LAYERS
            assert phase == "decode" or reference.loaded < reference.upstream
        else:
            assert told is None


def test_what_leaves_upstreams_choice_leaves_its_very_bits(served: Any) -> None:
    found = served["found"]
    for name, phase in (("all of one's own", "verify"), ("all of one's own", "decode"), ("too few", "verify"),
                        ("too few", "decode"), ("decode only", "verify")):  # fmt: skip
        assert torch.equal(found[name]["logits"][phase], found["off"]["logits"][phase])
    for name in ("one", "none added", "rank cap", "share"):
        assert not torch.allclose(found[name]["logits"]["verify"], found["off"]["logits"]["verify"], atol=1e-2)


def test_passes_and_layers_are_told(served: Any) -> None:
    found = served["found"]
    assert found["one"]["passes"] == {("verify", "eager", "applied"): 1, ("decode", "eager", "applied"): 1}
    assert found["too few"]["passes"] == {(p, "eager", "outside_window"): 1 for p in ("verify", "decode")}
    assert found["decode only"]["passes"] == {("decode", "eager", "applied"): 1}
    assert found["off"]["passes"] == found["all of one's own"]["passes"] == {}
    assert served["outcome"]["result"] == "applied"
    assert served["outcome"]["moe_layers"] == MOE_LAYERS
    assert served["outcome"]["layers"] == {"applied": MOE_LAYERS, "outside_window": MOE_LAYERS}
    assert served["outcome"]["layers_never_asked"] == 0


def test_upstream_calls_where_this_model_does_not_go(served: Any) -> None:
    calls = served["calls"]
    assert calls["bypassed"] == ["in_kernel_router", "triton_kernels", "precomputed"]
    assert calls["hash routing"]
    assert calls["replay"] == ["load", "told", "replay"]  # a graph reads what it is told just before
    assert "--enable-torch-compile contradict" in calls["refused"]
