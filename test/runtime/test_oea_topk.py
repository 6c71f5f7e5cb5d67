"""oea-topk in upstream's layers: which follow the rule, in which passes, and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe import topk as upstream
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_patches.runtime import oea_topk
from sglang_patches.runtime.oea_topk import eligible, reference
from sglang_patches.runtime.oea_topk.counting import Counts
from sglang_patches.runtime.oea_topk.reference import Router
from sglang_patches.runtime.oea_topk.settings import BadSetting, Rule


@pytest.fixture
def with_rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the rule of this process, with counts of its own."""
    counts = Counts()
    monkeypatch.setattr(oea_topk, "counts", counts)
    monkeypatch.setattr(oea_topk._outcome, "_recorded", {})
    monkeypatch.setattr(oea_topk._outcome, "_suppliers", {})
    monkeypatch.setattr(eligible, "why_not_process", lambda: "")

    def use(rule: Rule | None) -> Counts:
        monkeypatch.setattr(oea_topk.settings, "rule", lambda: rule)
        return counts

    return use


def layer(number: int = 3, **changes: Any) -> Any:
    bias = torch.linspace(-0.3, 0.3, 16)
    named = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "correction_bias": bias}
    config = upstream.TopKConfig(**{"top_k": 4, "layer_id": number, **named, **changes})
    made = SimpleNamespace(topk_config=config, layer_id=number, is_draft=False)
    oea_topk.register(made)
    return made


def select(
    config: Any, tokens: int, mode: ForwardMode = ForwardMode.DECODE, real: int | None = None, **more: Any
) -> Any:
    """What upstream's patched `select_experts` is told in a pass of `tokens` rows, and the logits."""
    generator = torch.Generator().manual_seed(tokens)
    batch = ForwardBatch(
        forward_mode=mode, batch_size=tokens, input_ids=torch.zeros(tokens), req_pool_indices=torch.zeros(tokens),
        seq_lens=torch.ones(tokens), out_cache_loc=torch.zeros(tokens), seq_lens_sum=tokens, **more,
    )  # fmt: skip
    logits = torch.randn(tokens, 16, generator=generator)
    with forward_context(ForwardContext(attn_backend=None), forward_batch=batch):  # type: ignore[arg-type]
        count = None if real is None else torch.tensor(real)
        return oea_topk.choose(config, logits, config.correction_bias, count, config.top_k, 0), logits


def test_a_layer_follows_the_rule(with_rule: Any) -> None:
    rule = Rule(k0=2)
    counts = with_rule(rule)
    config = layer(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True).topk_config
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        (weights, ids), logits = select(config, 6, mode)
        expected = reference.choose(logits, config.correction_bias, None, rule, Router(4, scale=2.5))
        assert torch.equal(weights, expected[0])
        assert torch.equal(ids, expected[1])
    assert oea_topk._outcome.outcomes()["oea-topk"] == {
        "result": "applied",
        "detail": "experts of a batch's tokens are chosen together from k0=2 of each on: "
        "answers differ from upstream's",
        **rule.figures(),
        **counts.figures(),
    }
    assert counts.figures() == {
        "moe_layers": 1,
        "layers": {"applied": 1},
        "layers_never_asked": 0,
        "passes": {"decode": {"eager": {"applied": 1}}, "verify": {"eager": {"applied": 1}}},
    }


def test_upstreams_count_of_real_rows_is_taken(with_rule: Any) -> None:
    rule = Rule(k0=1)
    with_rule(rule)
    config = layer().topk_config
    (_, ids), logits = select(config, 6, real=3)
    assert torch.equal(ids, reference.choose(logits, config.correction_bias, torch.tensor(3), rule, Router(4))[1])
    (_, alone), _ = select(config, 6)
    assert not torch.equal(ids[:3], alone[:3])


def test_experts_are_counted_where_asked_for_and_told(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oea_topk, "experts", oea_topk.Experts())
    with_rule(Rule(k0=1))
    config = layer().topk_config
    select(config, 6)
    assert "experts" not in oea_topk._outcome.outcomes()["oea-topk"]
    with_rule(Rule(k0=1, count=True))
    for tokens, mode in ((6, ForwardMode.DECODE), (8, ForwardMode.TARGET_VERIFY), (8, ForwardMode.TARGET_VERIFY)):
        (_, ids), logits = select(config, tokens, mode)
    select(config, 65)
    told = oea_topk._outcome.outcomes()["oea-topk"]["experts"]
    loaded = len(set(ids.flatten().tolist()))
    upstreams = (logits.sigmoid() + config.correction_bias).topk(4).indices
    assert told["verify"] == {"loaded": 2 * loaded, "upstream": 2 * len(set(upstreams.flatten().tolist())), "layers": 2}
    assert told["verify"]["loaded"] < told["verify"]["upstream"]
    assert told["decode"]["layers"] == 1


def test_places_of_counts_are_not_made_while_a_graph_is_captured() -> None:
    experts, cpu = oea_topk.Experts(), torch.device("cpu")
    assert experts.place(cpu, "verify", capturing=True) is None
    place = experts.place(cpu, "verify", capturing=False)
    assert place is experts.place(cpu, "verify", capturing=True)
    assert place is not None
    place += torch.tensor([30, 40, 9])  # forwards before captures
    experts.begin()
    assert experts.figures() == {}
    place += torch.tensor([3, 4, 1])
    experts.begin()
    assert experts.figures() == {"verify": {"loaded": 3, "upstream": 4, "layers": 1}}
    assert place.tolist() == [33, 44, 10], "a copy that is under way must not see them go back"


@pytest.mark.parametrize("graphs", [True, False])
def test_experts_of_start_ups_forwards_are_never_exported(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """With graphs they end with the first replay; a server that exports before one, with the first step."""
    now = [0.0]
    experts = oea_topk.Experts(clock=lambda: now[0])
    exported: list[Any] = []
    monkeypatch.setattr(experts._experts, "export", lambda counts, labels: exported.append(dict(counts)))
    monkeypatch.setattr(experts._layers, "export", lambda counts, labels: exported.append(dict(counts)))
    place = experts.place(torch.device("cpu"), "verify", capturing=False)
    assert place is not None
    place += torch.tensor([30, 40, 9])
    if graphs:
        experts.begin()
    experts.export({})
    assert exported == []
    place += torch.tensor([50, 70, 20])  # more than start-up's
    now[0] += 2
    if not graphs:
        experts.begin()  # a replay after steps without a graph is no new beginning
    experts.export({})
    assert exported == [{("verify", "loaded"): 50, ("verify", "upstream"): 70}, {("verify",): 20}]


UNTOUCHED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_expert_group": 4, "topk_group": 2}, {}, "expert_groups"),
    ({"custom_routing_function": upstream.fused_topk_torch_native, "use_grouped_topk": False}, {}, "custom_routing"),
    ({"use_grouped_topk": False, "scoring_func": "sqrtsoftplus", "torch_native": True}, {}, "scoring"),
    ({}, {"tokens": 65}, "outside_window"),
    ({}, {"tokens": 1}, "outside_window"),
    ({}, {"tokens": 4, "attn_tp_sequence_sharded": True}, "sequence_sharded"),
    ({}, {"tokens": 4, "tbo_split_seq_index": 2}, "two_batch_overlap"),
    ({}, {"tokens": 4, "tbo_parent_token_range": (0, 4)}, "two_batch_overlap"),
]


@pytest.mark.parametrize(("changes", "batch", "reason"), UNTOUCHED)
def test_what_the_rule_has_no_place_in_is_upstreams_and_told(
    with_rule: Any, changes: dict[str, Any], batch: dict[str, Any], reason: str
) -> None:
    counts = with_rule(Rule(k0=2))
    assert select(layer(**changes).topk_config, **{"tokens": 4, **batch})[0] is None
    assert counts.figures()["layers"] == {reason: 1}
    assert counts.figures()["passes"] == {"decode": {"eager": {reason: 1}}}
    told = oea_topk._outcome.outcomes()["oea-topk"]
    assert told.get("result") == (None if reason == "outside_window" else "failed")
    assert reason == "outside_window" or reason in told["detail"]


def test_a_bias_of_each_token_is_upstreams(with_rule: Any) -> None:
    counts = with_rule(Rule(k0=2))
    config = layer().topk_config
    config.correction_bias = torch.zeros(4, 16)
    assert select(config, 4)[0] is None
    assert counts.figures()["layers"] == {"token_bias": 1}


def test_other_phases_drafts_and_passes_without_a_batch_are_upstreams(with_rule: Any) -> None:
    counts = with_rule(Rule(k0=1, phases=("verify",)))
    config = layer().topk_config
    draft = upstream.TopKConfig(4, True, 1, 1, correction_bias=config.correction_bias)
    oea_topk.register(SimpleNamespace(topk_config=draft, layer_id=3, is_draft=True))
    assert select(config, 4, ForwardMode.EXTEND)[0] is None
    assert select(config, 4, ForwardMode.DECODE)[0] is None
    assert select(draft, 4, ForwardMode.TARGET_VERIFY)[0] is None
    logits = torch.randn(4, 16)
    assert oea_topk.choose(config, logits, config.correction_bias, None, 4, 0) is None
    assert counts.figures()["layers"] == {}


def test_k0_of_top_k_is_upstreams_own_code(with_rule: Any) -> None:
    with_rule(Rule(k0=4))
    assert select(layer().topk_config, 8)[0] is None
    assert oea_topk._outcome.outcomes()["oea-topk"]["result"] == "not needed"


def test_more_experts_than_the_model_has_for_a_token(with_rule: Any) -> None:
    with_rule(Rule(k0=5))
    with pytest.raises(BadSetting, match=r"OEA_K0=5 is more than the 4 experts a token .* wanted 1 to 4"):
        layer()
    with_rule(Rule(k0=2, k_max=5))
    with pytest.raises(BadSetting, match="OEA_K_MAX=5"):
        layer()


def test_experts_chosen_inside_a_kernel_are_told(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = with_rule(Rule(k0=2))
    routed = layer(5).topk_config
    layer(6)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, input_ids=torch.zeros(4))
    monkeypatch.setattr(eligible, "current_batch", lambda: batch)
    oea_topk.bypassed(routed, "in_kernel_router")
    assert counts.figures()["layers"] == {"in_kernel_router": 1}
    assert counts.figures()["layers_never_asked"] == 1
    assert oea_topk._outcome.outcomes()["oea-topk"]["result"] == "failed"


def test_hash_routing_is_told(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class HashTopK(torch.nn.Module):
        layer_id, is_draft = 0, False

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    counts = with_rule(Rule(k0=2))
    routed = HashTopK()
    oea_topk.register(routed)
    monkeypatch.setattr(
        eligible, "current_batch", lambda: SimpleNamespace(forward_mode=ForwardMode.DECODE, input_ids=torch.zeros(4))
    )
    routed(torch.zeros(1))
    assert counts.figures()["layers"] == {"hash_routing": 1}


def test_a_graph_is_told_how_many_rows_are_real(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture itself needs a GPU; here its place is taken by what is written for it."""
    rule = Rule(k0=2)
    counts = with_rule(rule)
    place = torch.zeros(4, dtype=torch.int32)
    idle = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False), raw_num_token=3)
    oea_topk.before_replay(idle)  # nothing was captured with the rule, as where k0 is the model's top-k
    assert counts.figures()["passes"] == {}
    monkeypatch.setitem(oea_topk._real, torch.device("cpu"), place)
    monkeypatch.setattr(oea_topk, "_capturing", lambda: True)
    select(layer().topk_config, 8, ForwardMode.TARGET_VERIFY)
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=False), capture_forward_mode=ForwardMode.TARGET_VERIFY,
        bs=2, captured_req_width=4, raw_num_token=4,
    )  # fmt: skip
    oea_topk.before_replay(runner)
    assert place.tolist() == [4] * 4
    runner.raw_num_token = 1
    oea_topk.before_replay(runner)
    runner.bs = 16
    oea_topk.before_replay(runner)
    passes = counts.figures()["passes"]
    assert passes == {"verify": {"graph": {"applied": 1, "outside_window": 1, "not_in_graph": 1}}}
    runner.model_runner.is_draft_worker, runner.raw_num_token = True, 7
    oea_topk.before_replay(runner)
    assert place[0] == 1


def test_a_graph_is_told_though_the_layer_that_stands_for_a_pass_never_chose(
    with_rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's experts may come from code that this patch knows nothing of; the others' rows count all the
    same: a count that stays 0 would switch the rule off in a graph that is told to follow it."""
    counts = with_rule(Rule(k0=2))
    place = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setitem(oea_topk._real, torch.device("cpu"), place)
    monkeypatch.setattr(oea_topk, "_capturing", lambda: True)
    layer(1)
    select(layer(2).topk_config, 8, ForwardMode.TARGET_VERIFY)
    assert counts.figures()["layers"] == {"applied": 1}
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=False), capture_forward_mode=ForwardMode.TARGET_VERIFY,
        bs=2, captured_req_width=4, raw_num_token=4,
    )  # fmt: skip
    oea_topk.before_replay(runner)
    assert place.tolist() == [4] * 4


def test_where_the_kernel_reads_how_many_rows_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oea_topk, "_real", {})
    monkeypatch.setattr(oea_topk, "_rows", {})
    for rows in (1, 5, 64):
        count = oea_topk._count(torch.zeros(rows, 8), None, capturing=False)
        assert (int(count[0]), count.dtype, count.data_ptr() % 16) == (rows, torch.int32, 0)
    place = oea_topk._count(torch.zeros(5, 8), None, capturing=True)
    assert place is oea_topk._count(torch.zeros(8, 8), None, capturing=True)  # what `before_replay` fills
    assert place.data_ptr() % 16 == 0
    upstreams = torch.tensor(3, dtype=torch.int32)
    assert oea_topk._count(torch.zeros(5, 8), upstreams, capturing=True) is upstreams


def test_nothing_is_allocated_for_a_graph_while_it_is_captured(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = with_rule(Rule(k0=2))
    monkeypatch.setattr(oea_topk, "_real", {})
    monkeypatch.setattr(oea_topk, "_capturing", lambda: True)
    assert select(layer().topk_config, 4)[0] is None
    assert counts.figures()["layers"] == {"no_warm_up": 1}


def test_a_model_that_is_compiled_traces_nothing_of_it(with_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream compiles prefill without graph breaks (``tc_piecewise_cuda_graph_backend.py``)."""
    counts = with_rule(Rule(k0=2))
    config = layer().topk_config

    def asked() -> Rule | None:
        raise AssertionError("the rule was asked for while Dynamo traces")

    monkeypatch.setattr(oea_topk.settings, "rule", asked)

    @torch.compile(fullgraph=True, backend="eager")
    def model(logits: torch.Tensor) -> torch.Tensor:
        oea_topk.bypassed(config, "precomputed")
        chosen = oea_topk.choose(config, logits, None, None, 4, 0)
        return logits + 1 if chosen is None else chosen[0]

    assert torch.equal(model(torch.zeros(4, 16)), torch.ones(4, 16))
    assert counts.figures()["layers"] == {}


def test_contradicting_arguments_are_refused(with_rule: Any) -> None:
    arguments = SimpleNamespace(enable_deterministic_inference=True, enable_torch_compile=False)
    with_rule(None)
    oea_topk.check_arguments(arguments)
    assert oea_topk._outcome.outcomes()["oea-topk"]["result"] == "not needed"
    with_rule(Rule(k0=2))
    with pytest.raises(BadSetting, match="--enable-deterministic-inference contradict"):
        oea_topk.check_arguments(arguments)
    # As upstream resolves --rl-on-policy-target: declared beside the record, which stays as it was given.
    declared = [("_handle_deterministic_inference", {"enable_deterministic_inference": True})]
    implied = SimpleNamespace(
        enable_deterministic_inference=False, enable_torch_compile=False, _resolved_overrides=declared
    )
    with pytest.raises(BadSetting, match="--rl-on-policy-target"):
        oea_topk.check_arguments(implied)
    implied._resolved_overrides = []
    oea_topk.check_arguments(implied)
