"""What keeps turns from being compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from unit.documents import library, made, patch

from sglang_patches.bench import ab, arms, checks, compare_upstream, factorial
from sglang_patches.bench.checks import NotComparable
from sglang_patches.bench.design import full
from sglang_patches.bench.model import Arm, Sample, Turn
from sglang_patches.bench.turns import PORT_TAKEN
from sglang_patches.series import Series

ON, OFF = "default", "-clean-stop"


def arm(name: str, spec: str, series: Series) -> Arm:
    return arms.parse(name, spec, series, gpu=lambda: False)


def turn(index: int, name: str, sha: str | None = "x", document: Any = None, **changed: Any) -> Turn:
    return Turn(
        index=index, block=index // 2, arm=name, ready_s=1, figures={}, output_sha256=sha, document=document, **changed
    )


def samples(index: int, shas: Sequence[str]) -> list[Sample]:
    return [
        Sample(
            turn=index, arm="a", prompt=prompt, prompt_tokens=1, output_tokens=1, sent=0, latency=1, ttft=1, itl=[],
            output_sha256=sha,
        )
        for prompt, sha in enumerate(shas)
    ]  # fmt: skip


def check(turns: list[Turn], pair: list[Arm], series: Series, *allow: str) -> list[str]:
    outputs = {0: ["p", "q", "r"], 1: ["p", "x", "y"]}
    return checks.check(turns, pair, series, lambda index: samples(index, outputs.get(index, ["p", "q", "r"])), allow)


def pair(series: Series, a: str = ON, b: str = OFF) -> list[Arm]:
    return [arm("a", a, series), arm("b", b, series)]


def documents(a: dict[str, Any], b: dict[str, Any], **shas: str) -> list[Turn]:
    return [turn(0, "a", document=made(**a)), turn(1, "b", document=made(**b))]


STOP: dict[str, Any] = {"patches": [patch("clean-stop"), patch("provenance")]}
NO_STOP: dict[str, Any] = {"patches": [patch("clean-stop", on=False), patch("provenance")]}


def test_the_selected_patch_may_differ_and_no_other(series: Series) -> None:
    assert check(documents(STOP, {**NO_STOP, "id": "ffffffffffff"}), pair(series), series) == []
    other = {"patches": [patch("clean-stop", on=False), patch("provenance", on=False)]}
    with pytest.raises(NotComparable, match=r"`provenance` was on in A and off in B(.|\n)*--allow provenance"):
        check(documents(STOP, other), pair(series), series)


def test_a_selected_patch_of_other_code_is_not_the_same_patch(series: Series) -> None:
    changed = {"patches": [patch("clean-stop", on=False), patch("provenance", sha256="22")]}
    with pytest.raises(NotComparable, match="with different code"):
        check(documents(STOP, changed), pair(series), series)


@pytest.mark.parametrize(
    ("b", "words"),
    [
        ({"environment": {"NCCL_PROTO": "Simple"}}, "NCCL_PROTO"),
        ({"server_args": {"tp_size": 2, "port": 1}}, "--tp-size"),
        ({"versions": {"torch": "2.15"}}, "torch"),
        ({"libraries": [library(sha256="bb")]}, "libnccl.so.2"),
        ({"driver": "590"}, "'the NVIDIA driver'"),
    ],
)
def test_anything_else_that_matters_is_refused_and_can_be_allowed(
    series: Series, b: dict[str, Any], words: str
) -> None:
    turns = documents(STOP, {**NO_STOP, **b})
    with pytest.raises(NotComparable) as error:
        check(turns, pair(series), series)
    assert f"--allow {words}" in str(error.value)
    allowed = check(turns, pair(series), series, words.strip("'"))
    assert len(allowed) == 1
    assert words.strip("'") in allowed[0]


def test_what_does_not_matter_is_no_obstacle(series: Series) -> None:
    assert check(documents(STOP, {**NO_STOP, "server_args": {"tp_size": 1, "port": 2}}), pair(series), series) == []


def test_selected_variables_and_arguments(series: Series) -> None:
    selected = pair(series, "env:NCCL_PROTO=LL", "env:NCCL_PROTO=Simple,arg:--tp-size 2")
    b = {"environment": {"NCCL_PROTO": "Simple"}, "server_args": {"tp_size": 2, "port": 1}}
    assert check(documents({}, b), selected, series) == []
    # The same option with the same value in both is not what was selected.
    same = pair(series, "arg:--tp-size=1", "arg:--tp-size=1,arg:--x=1")
    with pytest.raises(NotComparable, match="--tp-size"):
        check(documents({}, {"server_args": {"tp_size": 2, "port": 1}}), same, series)


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("arg:--tensor-parallel-size=2", "tp_size", 2),
        ("arg:--tp 2", "tp_size", 2),
        ("arg:--fp8-gemm-backend=triton", "fp8_gemm_runner_backend", "triton"),
        ("arg:--no-enable-fused-qk-norm-rope", "enable_fused_qk_norm_rope", False),
    ],
)
def test_a_selected_argument_goes_by_any_of_its_names(series: Series, word: str, field: str, value: object) -> None:
    turns = documents({"server_args": {field: None}}, {"server_args": {field: value}})
    assert check(turns, pair(series, "default", word), series) == []
    with pytest.raises(NotComparable):
        check(turns, pair(series, "default", "arg:--max-running-requests=4"), series)


def test_another_model_may_be_what_is_selected(series: Series) -> None:
    def model(sha: str) -> dict[str, Any]:
        return {"path": "/m", "revision": None, "config_sha256": sha, "index_sha256": sha}

    a = {"models": {"target": model("t"), "draft": model("one")}, "server_args": {"tp_size": 1}}
    b = {"models": {"target": model("t"), "draft": model("two")}, "server_args": {"tp_size": 1}}
    drafts = pair(series, "arg:--speculative-draft-model-path=/one", "arg:--speculative-draft-model=/two")
    assert check(documents(a, b), drafts, series) == []
    with pytest.raises(NotComparable, match="of the draft model"):
        check(documents(a, b), pair(series, "default", "arg:--model-path=/two"), series)
    none = {**b, "models": {"target": model("t")}}
    chosen = pair(series, "default", "arg:--speculative-algorithm=EAGLE3,arg:--speculative-draft-model-path=/two")
    assert check(documents(none, b), chosen, series) == []


def test_an_argument_that_follows_from_another_must_be_allowed(series: Series) -> None:
    selected = pair(series, "default", "arg:--speculative-num-steps=2")
    a = {"server_args": {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}}
    b = {"server_args": {"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}}
    with pytest.raises(NotComparable, match="--allow --speculative-num-draft-tokens"):
        check(documents(a, b), selected, series)
    for word in ("argument", "--speculative-num-draft-tokens"):
        assert "--speculative-num-draft-tokens was 4 in A and 3 in B" in check(
            documents(a, b), selected, series, word
        )[0]  # fmt: skip


def test_an_argument_that_a_selected_patch_brings(series: Series) -> None:
    a = {**STOP, "server_args": {"tp_size": 1, "of_the_patch": 5}}
    b = {**NO_STOP, "server_args": {"tp_size": 1}}
    assert check(documents(a, b), pair(series), series) == []
    with pytest.raises(NotComparable, match="--of-the-patch"):
        check(documents(a, {**STOP, "server_args": {"tp_size": 1}}), pair(series, ON, ON), series)


def test_variables_that_a_selected_patch_sets_are_selected_with_it(series: Series) -> None:
    on: dict[str, Any] = {
        "patches": [patch("pcie-nccl-allreduce")],
        "environment": {"NCCL_PROTO": "LL", "SGLANG_X": "1"},
    }
    off = {"patches": [patch("pcie-nccl-allreduce", on=False)], "environment": {"SGLANG_X": "1"}}
    toggled = pair(series, "default", "-pcie-nccl-allreduce")
    assert check(documents(on, off), toggled, series) == []
    # Not by another patch, no other variable, and not between turns of one arm.
    with pytest.raises(NotComparable, match="NCCL_PROTO"):
        check(documents({**on, "patches": []}, {**off, "patches": []}), pair(series), series)
    with pytest.raises(NotComparable, match="SGLANG_X"):
        check(documents(on, {**off, "environment": {}}), toggled, series)
    with pytest.raises(NotComparable, match="NCCL_PROTO"):
        check(
            [turn(0, "a", document=made(**on)), turn(1, "a", document=made(**{**on, "environment": {}}))],
            toggled,
            series,
        )


def test_an_arms_own_turns_must_agree(series: Series) -> None:
    turns = [*documents(STOP, NO_STOP), turn(2, "b", document=made(**NO_STOP, environment={"NCCL_PROTO": "Ring"}))]
    with pytest.raises(NotComparable, match=r"in two turns of arm b \(1 as A, 2 as B\): NCCL_PROTO"):
        check(turns, pair(series), series)


def test_other_tokens_name_the_first_prompt(series: Series) -> None:
    turns = [turn(0, "a", "x"), turn(1, "b", "y")]
    with pytest.raises(NotComparable) as error:
        check(turns, pair(series), series)
    text = str(error.value)
    assert "of 2 of 3 prompts, first of prompt 1, differ between turn 0 (arm a) and turn 1 (arm b)" in text
    assert "--allow outputs" in text
    assert check(turns, pair(series), series, "outputs")[0].startswith("outputs: greedy tokens of 2 of 3")


def test_a_patch_that_changes_answers_is_named(series: Series) -> None:
    turns = [turn(0, "a", "x"), turn(1, "b", "y")]
    with pytest.raises(NotComparable, match=r"patch oea-topk, on in b, changes answers: judge its quality too\n"):
        check(turns, pair(series, ON, "+oea-topk"), series)
    assert "oea-topk, on in a and b" in check(turns, pair(series, "+oea-topk", "all"), series, "outputs")[0]


def test_tokens_of_an_arms_own_turns_must_agree_too(series: Series) -> None:
    with pytest.raises(NotComparable, match=r"turn 0 \(arm a\) and turn 1 \(arm a\)"):
        check([turn(0, "a", "x"), turn(1, "a", "y")], pair(series), series)


def test_servers_that_tell_no_document_are_compared_by_their_arguments(series: Series) -> None:
    one = made(server_args={"tp_size": 1, "port": 1, "ours": 1})
    turns = [turn(0, "a", document=one), turn(1, "b", None, server_args={"tp_size": 1, "port": 2, "theirs": 1})]
    assert check(turns, pair(series, "default", "none"), series) == []
    assert len(checks.notes(turns)) == 2
    assert "arm b's servers tell no provenance document" in checks.notes(turns)[0]
    turns[1] = turn(1, "b", server_args={"tp_size": 2, "port": 2})
    with pytest.raises(NotComparable, match="--tp-size"):
        check(turns, pair(series, "default", "none"), series)


def test_many_obstacles_are_told_in_part(series: Series) -> None:
    a = {"server_args": {f"x{number}": 1 for number in range(20)}}
    b = {"server_args": {f"x{number}": 2 for number in range(20)}}
    with pytest.raises(NotComparable, match="and 12 more"):
        check(documents(a, b), pair(series, ON, ON), series)


def test_what_no_ratio_tells_is_said() -> None:
    turns = [turn(0, "a"), turn(1, "b")]
    turns[0].figures.update(tokens_per_s=1.0, graph_share=0.0)
    turns[1].figures.update(tokens_per_s=2.0, graph_share=0.9)
    assert checks.notes(turns)[2:] == ["graph_share is not compared: 0 in a, 0.9 in b (0: none, or not told)"]
    turns[0].figures.update(graph_share=0.1)
    assert checks.notes(turns)[2:] == []


def measured(accept: Mapping[str, Sequence[float]]) -> list[Turn]:
    """Turns, round by round, of arms whose accept length in each round is given; their speed scatters."""
    rounds = len(next(iter(accept.values())))
    served = [(at, arm, values[at]) for at in range(rounds) for arm, values in accept.items()]
    figures = [
        {"tokens_per_s": 90 + index % 7, "accept_length": value} for index, (_at, _arm, value) in enumerate(served)
    ]
    return [
        turn(index, arm).model_copy(update={"block": at, "figures": figures[index]})
        for index, (at, arm, _value) in enumerate(served)
    ]


def constant(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if "is equal in all rounds" in note]


def test_a_figure_that_no_round_changes_is_said_to_be_exact_for_these_prompts_only() -> None:
    assert constant(checks.notes(measured({"a": [3.0, 3.0], "b": [2.7, 2.7 * (1 + 1e-12)]}))) == [
        "accept_length is equal in all rounds of every arm, which ask the same prompts: between these its intervals "
        "have no width and its smallest detectable difference is 0 for these prompts only; others may differ"
    ]
    (said,) = constant(checks.notes(measured({"a": [3.0, 3.0], "b": [2.7, 2.7], "c": [2.7, 2.8]})))
    assert said.startswith("accept_length is equal in all rounds of arms a, b, which")
    # One arm that varies gives the ratio its width; one round gives no interval; what is not there is not compared.
    for accept in ({"a": [3.0, 3.0], "b": [2.7, 2.8]}, {"a": [3.0], "b": [2.7]}, {"a": [0.0, 0.0], "b": [0.0, 0.0]}):
        assert constant(checks.notes(measured(accept))) == []


def test_every_kind_that_compares_says_so(tmp_path: Path) -> None:
    def named(*names: str) -> list[Arm]:
        return [Arm(name=name, spec="") for name in names]

    pair = ab.conclude(measured({"a": [3.0] * 2, "b": [2.7] * 2}), named("a", "b"), None, tmp_path, margin=0.01, seed=0)
    assert pair.analysis["comparisons"]["accept_length"]["verdict"] == "SLOWER"
    names = (compare_upstream.PRISTINE, "none")
    beside = compare_upstream.conclude(
        measured({name: [3.0, 3.0] for name in names}), named(*names), None, tmp_path, margin=0.01, seed=0
    )
    runs = {name: [3.0 - at / 10] * 2 for at, name in enumerate(("00", "10", "01", "11"))}
    toggled = factorial.conclude(
        measured(runs),
        full(["x", "y"]),
        named(*runs),
        None,
        tmp_path,
        base="none",
        margin=0.01,
        confidence=0.95,
        seed=0,
    )
    for result in (pair, beside, toggled):
        assert len(constant(result.analysis["notes"])) == 1


@pytest.mark.parametrize("why", ["oops", "Cannot write to closing transport"])
def test_a_turn_that_needed_a_second_server_is_told(why: str) -> None:
    turns = [turn(0, "a", retried=PORT_TAKEN), turn(1, "b", retried=f"1 of 2 requests failed: {why}")]
    assert checks.notes(turns)[2:] == [
        f"turn 1 (arm b) was measured by a second server; of its first one, 1 of 2 requests failed: {why}"
    ]
