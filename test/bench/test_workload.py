"""Prompts: exact lengths, the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_patches.bench import workload
from sglang_patches.errors import PatchError

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "test/models/tiny-kimi"


def choose(model: str = str(MODEL), **changed: object) -> workload.Prompts:
    given = {"file": None, "prompts": 0, "prompt_tokens": 0, "vocabulary": 0, "seed": 0}
    return workload.choose(model, **{**given, **changed})  # type: ignore[arg-type]


def test_the_committed_file_is_what_the_tokenizer_makes_of_the_texts() -> None:
    texts = [json.loads(line)["text"] for line in (REPO / "test/models/prompts.jsonl").read_text().splitlines()]
    made = workload.tokenized(MODEL / "tokenizer.json", texts, 64)
    assert made == workload.read(workload.FILES / "tiny-kimi.json")
    assert {len(prompt) for prompt in made.ids} == {64}
    assert len(set(made.ids)) == len(made.ids) >= 20


def test_drawn_prompts_are_exact_repeatable_and_free_of_special_tokens() -> None:
    made = workload.draw(1000, 3, 163840, seed=7)
    assert [len(prompt) for prompt in made.ids] == [1000] * 3
    assert min(map(min, made.ids)) >= 2560
    assert max(map(max, made.ids)) < 163840 - 2560
    assert made == workload.draw(1000, 3, 163840, seed=7)
    assert made.sha256() != workload.draw(1000, 3, 163840, seed=8).sha256()
    # Pinned: results made elsewhere are of the same prompts.
    assert workload.draw(4, 1, 4096, seed=1).ids == ((597, 3426, 3094, 1076),)


def test_the_vocabulary_comes_from_the_model() -> None:
    assert choose(prompt_tokens=8).vocabulary == 4096
    assert choose("owner/model", prompt_tokens=8, vocabulary=1000).vocabulary == 1000
    with pytest.raises(PatchError, match="--vocabulary"):
        choose("owner/model", prompt_tokens=8)


def test_texts_of_one_tokenizer_are_not_sent_to_another_model() -> None:
    with pytest.raises(PatchError, match="--prompt-tokens"):
        choose("owner/model")


def test_how_many() -> None:
    assert len(choose(prompts=2).ids) == 2
    assert len(choose(prompts=40, prompt_tokens=2).ids) == 40
    with pytest.raises(PatchError, match="1 to 23"):
        choose(prompts=24)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        '{"name": "x", "vocabulary": 10}',
        '{"name": "x", "vocabulary": 10, "prompts": []}',
        '{"name": "x", "vocabulary": 10, "prompts": [[]]}',
        '{"name": "x", "vocabulary": 10, "prompts": [[1], [1, 2]]}',
        '{"name": "x", "vocabulary": 10, "prompts": [[10]]}',
        '{"name": "x", "vocabulary": 10, "prompts": [["a"]]}',
    ],
)
def test_a_file_that_is_no_workload(tmp_path: Path, text: str) -> None:
    file = tmp_path / "w.json"
    file.write_text(text)
    with pytest.raises(PatchError, match=r"w\.json"):
        workload.read(file)
