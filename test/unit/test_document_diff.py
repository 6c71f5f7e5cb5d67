"""What `sglang-patches diff` says of two documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.document.diff import diff, summary
from sglang_patches.document.schema import Document, File, Gpu, Model

from .documents import library, made, patch


def model(
    path: str = "m",
    config: str | None = "c",
    index: str | None = "i",
    revision: str | None = None,
    sample: str | None = None,
) -> Model:
    return Model(
        path=path, revision=revision, config_sha256=config, index_sha256=index, weights_sample_sha256=sample
    )  # fmt: skip


def test_weights_of_the_same_names_and_sizes_are_told_apart_by_their_sample() -> None:
    def told(one: str | None, other: str | None, path: str = "m") -> list[tuple[str, bool]]:
        a, b = (
            made(models={"draft": model(path=where, sample=sample)}) for where, sample in (("m", one), (path, other))
        )
        return [(str(entry), entry.matters) for entry in diff(a, b)]

    said = "the weights of the draft model are other numbers (s in A, t in B)"
    assert told("s", "t") == [(said, True)]
    assert told("s", "t", path="n") == [(said, True), ("the path of the draft model was m in A and n in B", False)]
    assert told("s", "s") == told(None, "t") == told("s", None) == []


def test_the_first_sentence_names_the_patch() -> None:
    a = made(id="a", patches=[patch("one"), patch("oea-topk")], environment={"NCCL_PROTO": "LL"})
    b = made(id="b", patches=[patch("one"), patch("oea-topk", on=False)], environment={})
    found = diff(a, b)
    assert summary(a, b, found).startswith("same arguments, but `oea-topk` was on in A and off in B, and 1 more")
    assert [str(entry) for entry in found] == [
        "`oea-topk` was on in A and off in B",
        "NCCL_PROTO was LL in A and unset in B",
    ]


# What was changed against `made()`, and what is said of it.
CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"patches": [patch("one", sha256="22"), patch("two", on=False)]}, "code", "different code (11 in A, 22 in B)"),
    ({"patches": [patch("one")], "libraries": []}, "library", ""),
    ({"patches": [patch("one"), patch("two", on=True)]}, "patch", "`two` was off in A and on in B"),
    ({"patches": [patch("one", on=False, reason="no GPU"), patch("two", on=False)]}, "patch", "off (no GPU) in B"),
    ({"id": "other"}, "code", "patch set 0123456789ab in A, other in B"),
    ({"release": "0.5.24"}, "release", "sglang was 0.5.23 in A and 0.5.24 in B"),
    ({"files": [File(path="sglang/a.py", sha256="5" * 64, by="edit")]}, "file", "edited (555555555555) in B"),
    ({"files": [File(path="sglang/a.py", sha256=None, by="edit")]}, "file", "gone in B"),
    ({"server_args": {"tp_size": 8, "port": 30000}}, "argument", "--tp-size was 1 in A and 8 in B"),
    ({"server_args": {"tp_size": True, "port": 30000}}, "argument", "--tp-size was 1 in A and true in B"),
    ({"server_args": {"port": 30000}}, "argument", "--tp-size was 1 in A and absent in B"),
    ({"environment": {}}, "variable", "NCCL_PROTO was LL in A and unset in B"),
    ({"models": {"target": model(config="d")}}, "model", "config.json of the target model was c in A and d in B"),
    ({"models": {"target": model(index="j")}}, "model", "weights of the target model was i in A and j in B"),
    ({"models": {}}, "model", "the target model was m in A and none in B"),
    ({"versions": {"torch": "2.15"}}, "version", "torch was 2.14.1 in A and 2.15 in B"),
    ({"nccl": "2.31.0"}, "version", "NCCL was 2.30.7 in A and 2.31.0 in B"),
    ({"libraries": [library(sha256="bb")]}, "library", "other content (aa in A, bb in B)"),
    ({"libraries": [library(size=6)]}, "library", "of 5 bytes in A and of 6 bytes in B"),
    ({"gpus": []}, "hardware", 'the GPUs was ["H200"] in A and [] in B'),
    ({"gpus": [Gpu(name="H200", uuid="GPU-1", power_limit=500)]}, "hardware", "power limit (W) was [700.0] in A"),
    ({"topology_fingerprint": "ee"}, "hardware", "the topology"),
    ({"driver": "590"}, "hardware", "the NVIDIA driver was 580 in A and 590 in B"),
    ({"cpus": 4}, "hardware", "the number of CPUs was 8 in A and 4 in B"),
    ({"kernel": "6.2"}, "hardware", "the kernel was 6.1 in A and 6.2 in B"),
]


@pytest.mark.parametrize(("change", "topic", "said"), CHANGES)
def test_each_thing_that_matters_is_told_once(change: dict[str, Any], topic: str, said: str) -> None:
    found = [entry for entry in diff(made(), made(**change)) if entry.matters]
    assert [entry.topic for entry in found] == [topic]
    assert said in str(found[0])


@pytest.mark.parametrize(
    "change",
    [
        {"server_args": {"tp_size": 1, "port": 1}},
        {"environment": {"NCCL_PROTO": "LL", "SGLANG_PATCHES": "all", "SGLANG_API_KEY": "***", "SGLANG_RUN_ID": "1"}},
        {"models": {"target": model(path="elsewhere/m", revision="main")}},
        {"gpus": [Gpu(name="H200", uuid="GPU-2", power_limit=700)]},
        {"container": "docker"},
        {"libraries": [library(), library("libtorchaudio.so")]},
    ],
)
def test_what_does_not_matter_is_told_apart(change: dict[str, Any]) -> None:
    a, b = made(), made(**change)
    found = diff(a, b)
    assert found
    assert not any(entry.matters for entry in found)
    assert summary(a, b, found).startswith("nothing that matters differs (")


def test_a_model_that_is_not_there_to_hash_is_known_by_its_name() -> None:
    a, b = (made(models={"target": model(path=path, config=None, index=None)}) for path in ("m", "n"))
    assert [str(entry) for entry in diff(a, b) if entry.matters] == [
        "the path of the target model was m in A and n in B"
    ]


def test_a_library_that_is_not_hashed_yet_is_no_difference() -> None:
    assert diff(made(), made(libraries=[library(sha256=None)])) == []


def test_time_host_and_command_are_not_compared() -> None:
    assert diff(made(), made(time="2026-01-01T00:00:00+00:00", host="h", command=["x"])) == []


def test_patched_files_are_compared_only_where_the_patches_are_the_same() -> None:
    files = [[File(path="sglang/a.py", sha256=sha, by="patch")] for sha in ("1", "2")]
    same = diff(made(files=files[0]), made(files=files[1]))
    assert [entry.topic for entry in same] == ["file"]
    other = diff(made(files=files[0]), made(id="x", files=files[1], patches=[patch("one", sha256="22")]))
    assert [entry.topic for entry in other if entry.matters] == ["code"]
    assert diff(made(files=files[0]), made()) == []


def test_the_most_telling_comes_first() -> None:
    b = made(
        id="x", patches=[patch("one", on=False)], release="0.5.24", server_args={}, environment={}, versions={},
        files=[File(path="sglang/a.py", sha256="1", by="edit")], models={}, libraries=[], kernel="7", container="x",
    )  # fmt: skip
    topics = list(dict.fromkeys(entry.topic for entry in diff(made(), b) if entry.matters))
    assert topics == ["patch", "release", "file", "argument", "variable", "model", "library", "hardware"]


shas = st.sampled_from(["11", "22"])
texts = st.sampled_from(["x", "y", "***", ""])
documents = st.builds(
    made,
    id=texts,
    release=st.sampled_from(["0.5.23", "0.5.24"]),
    patches=st.lists(st.builds(patch, st.sampled_from("abc"), st.booleans(), shas), unique_by=lambda p: p.name),
    files=st.lists(
        st.builds(File, path=texts, sha256=shas | st.none(), by=st.sampled_from(["patch", "edit"])),
        unique_by=lambda f: f.path,
    ),
    libraries=st.lists(
        st.builds(library, st.sampled_from(["libnccl.so", "libx.so"]), st.integers(1, 2), shas | st.none()),
        unique_by=lambda entry: entry.name,
    ),
    server_args=st.none() | st.dictionaries(texts, st.none() | st.booleans() | st.integers(0, 1) | texts),
    environment=st.dictionaries(texts, texts),
    models=st.dictionaries(st.sampled_from(["target", "draft"]), st.builds(model, texts, shas | st.none())),
    versions=st.dictionaries(texts, st.none() | texts),
    nccl=st.none() | texts,
    gpus=st.lists(st.builds(Gpu, name=texts, uuid=texts, power_limit=st.none() | st.just(1.0)), max_size=2),
    kernel=texts,
)


@given(documents)
def test_a_document_does_not_differ_from_itself(a: Document) -> None:
    assert diff(a, a.model_copy(deep=True)) == []
    assert summary(a, a, []) == "nothing that matters differs"


@given(documents, documents)
def test_swapping_the_documents_swaps_the_sides_and_nothing_else(a: Document, b: Document) -> None:
    there = [replace(entry, a=entry.b, b=entry.a, joined="") for entry in diff(a, b)]
    assert there == [replace(entry, joined="") for entry in diff(b, a)]


@given(documents, documents)
def test_documents_in_the_same_state_are_all_that_has_no_difference(a: Document, b: Document) -> None:
    if not diff(a, b):
        assert a.code.release == b.code.release
        assert a.environment == b.environment
        assert a.server_args == b.server_args
        assert [p.name for p in a.code.patches if p.on] == [p.name for p in b.code.patches if p.on]
