"""Result folders: what is written is read back, is whole at any moment, and what is wrong is named."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from unit.documents import library, patch
from unit.documents import made as document

from bench.results_made import NASTY, ab, comparison, sample
from sglang_patches import cli
from sglang_patches.bench import folder, words
from sglang_patches.bench.findings import tables
from sglang_patches.bench.tables import number
from sglang_patches.document import diff, schema
from sglang_patches.document.schema import Gpu, Model
from sglang_patches.errors import PatchError

SCHEMA = Path(__file__).parents[2] / "docs/result.schema.json"


def test_the_published_schema_is_the_one_of_the_code() -> None:
    remedy = "write it anew as docs/results.md says"
    assert json.loads(SCHEMA.read_text()) == json.loads(folder.json_schema()), remedy


def test_what_is_written_fits_the_schema_and_is_read_back(tmp_path: Path) -> None:
    written, published = ab(), json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    place = tmp_path / "some/one-against-two"
    folder.write(place, written, [sample(), sample("b"), sample("b")])
    jsonschema.validate(json.loads((place / "result.json").read_text()), published)
    assert folder.load(place) == written
    assert folder.load(place / "result.json") == written
    assert list(folder.samples(place)) == [sample(), sample("b"), sample("b")]
    assert folder.count_samples(place).by_arm == {"a": 1, "b": 2}
    assert sorted(file.name for file in place.iterdir()) == ["README.md", "result.json", "samples.jsonl"]
    assert (place / "result.json").stat().st_mode & 0o777 == 0o644


def test_a_library_is_told_once_and_read_back_where_it_was(tmp_path: Path) -> None:
    many = [library(f"lib{number}.so") for number in range(300)]
    written = ab()
    for turn in written.turns:
        turn.document = document(libraries=many)
    place = tmp_path / "one-against-two"
    folder.write(place, written)
    assert folder.load(place) == written
    text = (place / "result.json").read_text()
    assert text.count("/lib/lib7.so") == 1
    assert len(text) < 120_000
    # What version 1 wrote is still read, and a place that is none is named.
    data = json.loads(text)
    old = {**written.model_dump(mode="json"), "schema_version": 1}
    assert folder.parse(old, "x") == written
    data["libraries"] = data["libraries"][:9]
    with pytest.raises(PatchError, match=r"processes\.0\.libraries\.9"):
        folder.parse(data, "x")


def test_committed_results_are_read() -> None:
    places = [file.parent for file in (SCHEMA.parents[1] / "benchmark/results").glob("*/result.json")]
    read = [result for result in map(folder.load, places) if result.document]
    assert read
    assert all(len(result.document.processes[0].libraries) > 10 for result in read if result.document)


def test_the_time_of_a_result_is_that_of_its_last_turn(tmp_path: Path) -> None:
    early, late, when = "2026-01-02T03:04:05+00:00", "2026-01-03T00:00:00+00:00", "2026-01-04T00:00:00+00:00"
    one, other = ab().turns[:2]
    turns = [one.model_copy(update={"ended": late}), other.model_copy(update={"ended": early})]
    assert folder.measured(turns, tmp_path) == late
    assert folder.measured([turns[0], other], tmp_path) == late
    assert folder.measured([other], tmp_path) > "2026-06"  # now
    folder.write(tmp_path, ab(when=when))
    assert folder.measured([other], tmp_path) == when
    assert folder.measured(turns, tmp_path) == late


def test_diff_of_results_is_about_their_servers(tmp_path: Path) -> None:
    one, other = ab(), ab()
    for turn in other.turns:
        turn.document = document(id="ba9876543210", patches=[patch("one", on=False), patch("two", on=False)])
    folder.write(tmp_path / "a", one)
    folder.write(tmp_path / "b", other)
    a, b = (schema.read(tmp_path / name / "result.json") for name in "ab")
    assert a.server_args is not None
    assert [library.name for process in a.processes for library in process.libraries] == ["libnccl.so.2"]
    assert "`one` was on in A and off in B" in [str(difference) for difference in diff.diff(a, b)]


def test_diff_of_results_is_about_every_arm(tmp_path: Path) -> None:
    """Not about the first alone: two results whose arms b differ are not the same."""
    one, other = ab(), ab()
    for turn in other.turns:
        if turn.arm == "b":
            turn.document = document(id="ba9876543210", patches=[patch("one", on=False), patch("two", on=False)])
    folder.write(tmp_path / "x", one)
    folder.write(tmp_path / "y", other)
    files = [str(tmp_path / name / "result.json") for name in "xy"]
    done = CliRunner().invoke(cli.app, ["diff", *files])
    assert done.exit_code == 1
    assert done.output.startswith("arm a: nothing that matters differs\narm b: ")
    assert "  * `one` was on in A and off in B" in done.output
    told = json.loads(CliRunner().invoke(cli.app, ["diff", "--json", *files]).output)["arms"]
    assert [(entry["arm"], bool(entry["differences"])) for entry in told] == [("a", False), ("b", True)]
    # A result goes by its folder, as everywhere else.
    assert CliRunner().invoke(cli.app, ["diff", str(tmp_path / "x"), files[1]]).output == done.output
    (tmp_path / "none").mkdir()
    nothing = CliRunner().invoke(cli.app, ["diff", str(tmp_path / "none"), files[1]])
    assert nothing.exit_code == 2
    assert str(tmp_path / "none/result.json") in nothing.output
    # Of other arms those that both have; what is left out is named.
    for turn in other.turns:
        turn.arm = {"a": "c"}.get(turn.arm, turn.arm)
    folder.write(tmp_path / "y", other)
    done = CliRunner().invoke(cli.app, ["diff", *files])
    assert (done.exit_code, done.output.startswith("arm b: ")) == (1, True)
    assert "not compared: a, c (no arm of both, or its servers told no code state)\n" in done.output
    # So also where an arm's servers told nothing, as those of none do.
    for turn in one.turns:
        turn.document = None if turn.arm == "b" else turn.document
    folder.write(tmp_path / "x", one)
    told = json.loads(CliRunner().invoke(cli.app, ["diff", "--json", files[0], files[0]]).output)
    assert ([entry["arm"] for entry in told["arms"]], told["not_compared"]) == (["a"], ["b"])
    # No arm of both: the first document of each.
    assert CliRunner().invoke(cli.app, ["diff", *files]).output != ""


def test_the_name_is_the_folder_s(tmp_path: Path) -> None:
    folder.write(tmp_path / "other", ab())
    assert folder.load(tmp_path / "other").name == "other"


def test_samples_of_a_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(sample().model_dump_json() + "\n")
    folder.write(tmp_path, ab())
    assert list(folder.samples(tmp_path)) == [sample()]


def test_what_is_not_finite_is_strict_json_and_read_back(tmp_path: Path) -> None:
    written = ab(analysis={"tokens_per_s": comparison(high=math.inf, ratio=math.nan), "list": [1, -math.inf]})
    written.turns[0].figures |= {"verify_ms": math.inf, "ttft_ms_p50": math.nan}
    folder.write(tmp_path, written)
    text = (tmp_path / "result.json").read_text()
    assert not {"Infinity", "NaN"} & set(text.replace('"', " ").replace(",", " ").split())
    read = folder.load(tmp_path)
    assert read.analysis["tokens_per_s"]["high"] is None
    assert read.turns[0].figures == {"tokens_per_s": 90.0}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(tmp_path, ab(headline="first"), [sample()])
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as failed:
        folder.write(tmp_path, ab(headline="second"), [])
    assert failed.value.filename == str(tmp_path / "samples.jsonl")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_no_reader_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of each replacement both the old and the new file are whole."""
    folder.write(tmp_path, ab(headline="first"))
    seen = []
    true = os.replace

    def watched(new: str, old: Path) -> None:
        if Path(old).name == "result.json":
            seen.append(
                (folder.parse(json.loads(Path(new).read_text()), "new").headline, folder.load(tmp_path).headline)
            )
        true(new, old)

    monkeypatch.setattr(os, "replace", watched)
    folder.write(tmp_path, ab(headline="second"))
    assert seen == [("second", "first")]
    assert folder.load(tmp_path).headline == "second"


def good() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(folder.dumps(ab()))
    return data


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", ["not JSON", "git checkout"]),
        ("", ["not JSON", "0 characters"]),
        ("[]", ["no result of", "verify-step"]),
        ('{"kind": "sglang-patches.provenance"}', ["no result of", "sglang-patches.provenance"]),
        ('{"kind": ["ab"]}', ["no result of"]),
        (json.dumps({**good(), "schema_version": 3}), ["schema version 3", "newer"]),
        (json.dumps({**good(), "schema_version": None}), ["schema version None", "measure again"]),
        (json.dumps({**good(), "schema_version": True}), ["schema version True"]),
        (json.dumps({**good(), "when": 5}), ["when", "seen       5", "result.schema.json"]),
        (json.dumps({**good(), "more": 1}), ["more", "1 places"]),
        ('{"kind": "ab", "schema_version": 2}', ["name", "Field required"]),
        (b"\xff\xfe", ["cannot be read", "utf-8"]),
    ],
)
def test_what_is_no_result_is_refused_with_what_was_expected(tmp_path: Path, content: Any, told: list[str]) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PatchError) as error:
        folder.load(tmp_path)
    for said in (*told, str(file), "remedy"):
        assert said in str(error.value)


def test_a_folder_without_a_result_is_named_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="no such folder"):
        folder.load(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PatchError, match=r"notes\.txt"):
        folder.load(tmp_path)
    (tmp_path / "turns.jsonl").touch()
    with pytest.raises(PatchError, match="the same command continues it"):
        folder.load(tmp_path)


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_any_json_is_read_or_refused(data: Any) -> None:
    with pytest.raises(PatchError):
        folder.parse(data, "x")


def test_a_line_that_a_crash_cut_is_no_error_and_a_bad_one_is(tmp_path: Path) -> None:
    good_line = sample().model_dump_json() + "\n"
    (tmp_path / "samples.jsonl").write_text(good_line + good_line[:40])
    assert len(list(folder.samples(tmp_path))) == 1
    count = folder.count_samples(tmp_path)
    assert (count.total, count.unreadable, count.failed) == (1, 1, 0)
    (tmp_path / "samples.jsonl").write_text(good_line + "{}\n" + sample(error="refused").model_dump_json() + "\n")
    with pytest.raises(PatchError, match="line 2 is no sample: turn"):
        list(folder.samples(tmp_path))
    assert folder.count_samples(tmp_path).failed == 1


def test_a_result_names_no_gpu_by_its_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [f"GPU-{i}f3e1c2a-0b1d-4e5f-8a9b-0c1d2e3f4a5b" for i in range(2)]
    of = document(gpus=[Gpu(name="H200", uuid=uuid) for uuid in uuids], environment={"CUDA_VISIBLE_DEVICES": uuids[1]})
    folder.write(tmp_path, ab(document=of), [sample()])
    assert "f3e1c2a" not in "".join(file.read_text() for file in tmp_path.iterdir())
    told = folder.load(tmp_path).document
    assert told is not None
    first, second = (gpu.uuid for gpu in told.machine.gpus)
    assert told.environment["CUDA_VISIBLE_DEVICES"] == second != first
    monkeypatch.setenv("SGLANG_PATCHES_GPU_UUIDS", "keep")
    folder.write(tmp_path, ab(document=of), [sample()])
    kept = folder.load(tmp_path).document
    assert kept is not None
    assert [gpu.uuid for gpu in kept.machine.gpus] == uuids


def test_the_readme_says_what_was_found_and_how(tmp_path: Path) -> None:
    (tmp_path / "plot.png").touch()
    folder.write(tmp_path, ab(allowed=["outputs"]), [sample()])
    text = (tmp_path / "README.md").read_text()
    assert "**b is SLOWER than a: 0.9 of the tokens/s (0.88 to 0.92)**" in text
    assert shlex.join(ab().command) in text
    assert "| tokens/s | SLOWER | 0.9000 | 0.8800 to 0.9200 | 93.47 | 83.47 | 3 % | 4 |" in text
    assert "| AMBIGUOUS | 1.000 | 0 to ∞ |" in text
    assert "sglang 0.5.23, patch set 0123456789ab\n- on: one\n- off: two\n" in text
    assert "A is a, B is b: same arguments, but \\`two\\` was off in A and on in B." in text
    assert "1x H200, driver 580, power limit 700 W, EPYC, 8 CPUs, 64 GiB, kernel 6.1" in text
    assert "`--allow outputs`" in text
    assert "![plot](plot.png)" in text
    assert "ABBA" in text


def test_a_model_is_told_by_all_that_is_known_of_its_content() -> None:
    known: dict[str, Any] = {"path": "m", "revision": None, "index_sha256": "i"}
    for hashes, said in (
        ({"config_sha256": "c" * 64, "weights_sample_sha256": "d" * 64}, "config cccccccccccc, weights dddddddddddd"),
        ({"config_sha256": "c" * 64}, "config cccccccccccc"),
        ({"config_sha256": None}, "not known by content"),
    ):
        told = words.code(document(models={"draft": Model(**{**known, **hashes})}))
        assert f"draft model m ({said})" in told


def test_files_that_are_gone_are_not_told_as_edited_and_many_are_counted() -> None:
    gone = [{"path": f"sglang/x/{number:02}.py", "sha256": None, "by": "edit"} for number in range(10)]
    edited = {"path": "sglang/srt/server_args.py", "sha256": "e" * 64, "by": "edit"}
    ours = {"path": "sglang/__init__.py", "sha256": "f" * 64, "by": "patch"}
    process = {"name": "http", "patch_set_id": "0" * 12, "files": [*gone, edited, ours], "libraries": [], "nccl": None}
    told = words.code(document(processes=[process]))
    assert "edited by hand, against the wheel: sglang/srt/server_args.py" in told
    names = ", ".join(f"sglang/x/{number:02}.py" for number in range(8))
    assert f"gone, against the wheel: {names} and 2 more" in told
    assert not any("__init__" in one for one in told)


@pytest.mark.parametrize("kind", folder.KINDS)
def test_every_kind_has_words_and_a_bare_result_is_written(tmp_path: Path, kind: str) -> None:
    bare = ab(kind=kind, arms=[], turns=[], workload=None, analysis={}, document=None, command=[])
    folder.write(tmp_path, bare)
    assert "No analysis." in (tmp_path / "README.md").read_text()


def test_text_cannot_become_markup_in_the_readme(tmp_path: Path) -> None:
    nasty = ab(headline=NASTY, analysis={NASTY: comparison(), "note": NASTY}, command=["echo", "```\n# heading"])
    nasty.arms[1].spec = nasty.arms[1].patches = NASTY
    folder.write(tmp_path, nasty)
    text = (tmp_path / "README.md").read_text()
    outside = "".join(text.split("````")[::2])
    for line in outside.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 7)
    assert not [line for line in outside.splitlines() if "<script" in line.replace("\\<", "") and "`" not in line]
    assert "\n# heading" not in outside


def test_numbers_have_the_digits_that_tell() -> None:
    said = [number(x) for x in (3, 1024, 0.0, 0.98712, 94.1349, 1234.5, 12345.6, -2.5, 1e-9, 3e20)]
    assert said == ["3", "1,024", "0", "0.9871", "94.13", "1,234", "12,346", "-2.500", "1e-09", "3e+20"]
    assert [number(x) for x in (math.inf, -math.inf, math.nan)] == ["∞", "-∞", "not a number"]


def test_no_part_of_an_analysis_is_left_out() -> None:
    analysis = {
        "arms": {"none": {"tokens_per_s": comparison("SAME", 1.0)}, "all": {"tokens_per_s": comparison()}},
        "suspects": ["one", "two"],
        "nothing": [],
        "rows": [{"batch": 1, "phases": {"verify": 2.5, "draft": None}}, {"batch": 2, "kernels": [{"name": "k"}]}],
        "deep": {"er": {"still": {"x": "found"}}},
        "answer": 42,
        "sure": True,
    }
    told = " ".join(
        " ".join([table.title, *table.columns, *(cell.text for row in table.rows for cell in row)])
        for table in tables(ab(kind="compare-upstream", analysis=analysis))
    )
    for wanted in (
        "arms: none", "arms: all", "one, two", "nothing none", "phases verify", "2.500", "name k", "found", "42", "yes",
    ):  # fmt: skip
        assert wanted in told
