"""The journal: nothing measured is lost, and what is continued is the same run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench import journal as journals
from sglang_patches.bench import workload
from sglang_patches.bench.journal import Journal, Setup, abba, run_turns
from sglang_patches.bench.model import Arm, Sample, Turn
from sglang_patches.errors import PatchError

Make = Callable[..., Setup]
A, B = Arm(name="a", spec="default"), Arm(name="b", spec="none", patches="none")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Turns are made up; the list has the indexes of those that were measured."""
    indexes: list[int] = []

    def one(setup: Setup, arm: Arm, index: int, block: int, say: Any) -> tuple[Turn, list[Sample]]:
        indexes.append(index)
        samples = [
            Sample(
                turn=index, arm=arm.name, prompt=prompt, prompt_tokens=4, output_tokens=8, sent=0, latency=1, ttft=0.5,
                itl=[0.5], output_sha256="x",
            )
            for prompt in range(len(setup.prompts.ids))
        ]  # fmt: skip
        figures = {"tokens_per_s": 100.0 + index}
        turn = Turn(
            index=index, block=block, arm=arm.name, ready_s=1, figures=figures, output_sha256="x", document=None
        )
        return turn, samples

    monkeypatch.setattr(journals, "one_turn", one)
    return indexes


def run(setup: Setup, turns: int, **settings: Any) -> list[Turn]:
    return run_turns(setup, "ab", [A, B], abba(["a", "b"], 4)[:turns], settings, quiet=True)


def test_order_is_abba() -> None:
    assert abba(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert abba(["x", "y", "z"], 2)[3:] == [(1, "z"), (1, "y"), (1, "x")]


def test_a_rerun_measures_only_what_is_missing(setup: Make, measured: list[int]) -> None:
    first = run(setup(), 3)
    again = run(setup(), 5)
    assert measured == [0, 1, 2, 3, 4]
    assert again[:3] == first
    with Journal(setup(), "ab", {}, quiet=True) as journal:
        assert len(journal.turns) == 5
        assert [sample.prompt for sample in journal.samples(4)] == [0, 1]
        assert {arm.name for arm in journal.arms} == {"a", "b"}


def test_a_search_that_decides_as_it_goes_arrives_where_it_was(setup: Make, measured: list[int]) -> None:
    def search(steps: int) -> list[str]:
        with Journal(setup(), "bisect", {}, quiet=True) as journal:
            chosen = A
            names = []
            for step in range(steps):
                names.append(journal.turn(chosen, step).arm)
                chosen = B if journal.turns[step].figures["tokens_per_s"] % 2 == 0 else A
        return names

    assert search(4)[:2] == search(6)[:2] == ["a", "b"]
    assert measured == [0, 1, 2, 3, 4, 5]


def test_what_a_killed_run_left_half_is_dropped(setup: Make, measured: list[int]) -> None:
    run(setup(), 2)
    folder = setup().folder
    whole = (folder / "samples.jsonl").read_text()
    # Killed after the samples of turn 2, in the middle of writing the turn.
    stray = json.dumps({**json.loads(whole.splitlines()[0]), "turn": 2})
    (folder / "samples.jsonl").write_text(whole + stray + "\n" + stray[:20])
    with (folder / "turns.jsonl").open("a") as file:
        file.write('{"index": 2, "blo')
    turns = run(setup(), 3)
    assert measured == [0, 1, 2]
    assert [turn.index for turn in turns] == [0, 1, 2]
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["turn"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert len((folder / "turns.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server_args": ("--x",)}, "server_args"),
        ({"model": "owner/other"}, "model"),
        ({"tp": 2}, "tp "),
        ({"output_tokens": 9}, "workload.output_tokens"),
        ({"environ": {"NCCL_PROTO": "LL"}}, "environment.NCCL_PROTO"),
    ],
)
def test_another_run_is_not_continued(setup: Make, changed: dict[str, Any], said: str) -> None:
    run(setup(environ={}), 2)
    with pytest.raises(PatchError) as error:
        run(setup(**{"environ": {}, **changed}), 2)
    assert said in str(error.value)
    assert "in the folder" in str(error.value)


def test_other_settings_arms_or_code_are_told(setup: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run(setup(), 2, threshold=0.05)
    with pytest.raises(PatchError, match=r"settings\.threshold +0\.05 in the folder, 0\.1 now"):
        run(setup(), 2, threshold=0.1)
    other = Arm(name="a", spec="all", patches="all")
    with pytest.raises(PatchError, match="arm a is 'default' in the folder, 'all' now"):
        run_turns(setup(), "ab", [other, B], abba(["a", "b"], 1), {"threshold": 0.05}, quiet=True)
    monkeypatch.setattr(journals.provenance, "patch_set", lambda *_: {"id": "changed"})
    with pytest.raises(PatchError, match=r'code .* in the folder, "changed" now'):
        run(setup(), 2, threshold=0.05)


def test_turns_that_are_there_cannot_be_left_out(setup: Make) -> None:
    run(setup(), 4)
    with pytest.raises(PatchError, match=r"holds 4 turns, and this run has 2(.|\n)*--rounds 2"):
        run(setup(), 2)


def test_turns_of_other_figures_are_another_run(setup: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run(setup(), 2)
    monkeypatch.setattr(journals, "VERSION", 99)
    with pytest.raises(PatchError, match=r"figures +2 in the folder, 99 now"):
        run(setup(), 2)


def test_variables_that_change_nothing_do_not_matter(setup: Make, measured: list[int]) -> None:
    run(setup(environ={"SGLANG_PATCHES_CACHE": "/a", "HOME": "/h"}), 1)
    run(setup(environ={"SGLANG_PATCHES_CACHE": "/b"}), 1)
    assert measured == [0]


def test_another_order_of_turns_is_told(setup: Make) -> None:
    run(setup(), 1)
    with pytest.raises(PatchError, match="turn 0 is of arm a, block 0"), Journal(setup(), "ab", {}, quiet=True) as it:
        it.turn(B, 0)


def test_a_full_disk_loses_nothing_that_was_kept(
    setup: Make, monkeypatch: pytest.MonkeyPatch, measured: list[int]
) -> None:
    run(setup(), 2)
    folder = setup().folder
    before = {name: (folder / name).read_bytes() for name in ("turns.jsonl", "samples.jsonl")}

    real = os.fsync
    for file in before:

        def full(descriptor: int, file: str = file) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(PatchError, match=r"No space left on device: turn 2 is not kept\n  kept       2 turns"):
            run(setup(), 3)
        assert {name: (folder / name).read_bytes() for name in before} == before
    monkeypatch.setattr(os, "fsync", real)
    run(setup(), 3)
    assert measured == [0, 1, 2, 2, 2]


def test_two_runs_do_not_share_a_folder(setup: Make) -> None:
    with Journal(setup(), "ab", {}, quiet=True), pytest.raises(PatchError, match="another run measures into it now"):
        Journal(setup(), "ab", {})


def test_a_folder_that_is_no_run(setup: Make) -> None:
    setup().folder.mkdir()
    (setup().folder / "samples.jsonl").touch()
    with pytest.raises(PatchError, match="cannot be continued"):
        run(setup(), 1)


def test_a_changed_line_is_told(setup: Make) -> None:
    run(setup(), 2)
    file = setup().folder / "turns.jsonl"
    file.write_text(file.read_text().replace('"index":0', '"index":"x"'))
    with pytest.raises(PatchError, match=r"turns\.jsonl, line 1: not a Turn"):
        run(setup(), 2)


def test_turns_without_their_samples_are_not_continued(setup: Make, measured: list[int]) -> None:
    run(setup(), 2)
    file = setup().folder / "samples.jsonl"
    whole = file.read_text()
    for left, said in (
        ("", "has 0 requests of turn 0, and 2"),
        (whole.splitlines(True)[0], "has 1 requests of turn 0"),
    ):
        file.write_text(left)
        with pytest.raises(PatchError, match=said):
            run(setup(), 3)
        assert file.read_text() == left
    file.write_text(whole)
    run(setup(), 3)
    assert measured == [0, 1, 2]


@pytest.mark.parametrize("damaged", ["", '{"x', "{}", "[]", '{"arms": 1}', '{"arms": {"a": 1}}', "\udce4"])
def test_a_damaged_description_of_the_run_is_told(setup: Make, measured: list[int], damaged: str) -> None:
    run(setup(), 1)
    file = setup().folder / "run.json"
    file.write_text(damaged, errors="surrogateescape")
    with pytest.raises(PatchError, match=r"run\.json: does not say what run began here"):
        run(setup(), 1)
    assert measured == [0]


def test_secrets_do_not_get_into_the_folder(setup: Make) -> None:
    run(setup(server_args=("--api-key", "hunter2"), environ={"SGLANG_API_KEY": "hunter2"}), 1)
    assert b"hunter2" not in b"".join(file.read_bytes() for file in Path(setup().folder).glob("*.json*"))


def test_prompts_are_part_of_the_run(setup: Make) -> None:
    run(setup(), 1)
    other = workload.draw(4, 2, 4096, seed=2)
    with pytest.raises(PatchError, match="prompts_sha256"):
        run(setup(prompts=other, workload=other.workload(8, 1, 1)), 1)
