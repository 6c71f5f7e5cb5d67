"""The shipped series carried to a real release, fetched from the package index, against docs/lanes.md.

One column, whose wheels are 73 MB; `make lanes` regenerates all of them (200 MB and a minute).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches import series
from sglang_patches.port import app, lane, matrix, wheels
from sglang_patches.port.carry import Carrier, Ported

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/lanes.md"
RELEASE, NEIGHBOUR = "0.5.23", "0.5.22"


@pytest.fixture(scope="module")
def source() -> Iterator[series.Series]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SGLANG_PATCHES_DIR", raising=False)
        yield series.load(RELEASE)


@pytest.fixture(scope="module")
def column(source: series.Series) -> tuple[Carrier, list[Ported]]:
    return app.carry(source, [NEIGHBOUR], print)[NEIGHBOUR]


def test_the_committed_matrix_is_what_the_command_makes(column: tuple[Carrier, list[Ported]]) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    head = next(row for row in rows if row[0] == "patch" and NEIGHBOUR in row)
    at = head.index(NEIGHBOUR)
    committed = {row[0]: row[at] for row in rows if len(row) == len(head)}
    made = matrix.markdown(RELEASE, {NEIGHBOUR: column[1]}).splitlines()
    regenerated = {line.split(" | ")[0][2:]: line.split(" | ")[1][:-2] for line in made if line.startswith("| ")}
    expected = {name: committed[name] for name in committed if name in regenerated and name != "patch"}
    assert {name: cell for name, cell in regenerated.items() if name != "patch"} == expected, "run: make lanes"
    assert set(regenerated) >= {entry.patch.name for entry in column[1]}


def test_the_committed_reasons_are_what_the_command_finds(column: tuple[Carrier, list[Ported]]) -> None:
    made = matrix.markdown(RELEASE, {NEIGHBOUR: column[1]})
    text = DOCUMENT.read_text(encoding="utf-8")
    reasons = [line.removesuffix(f" ({NEIGHBOUR})") for line in made.splitlines() if line.startswith("  - ")]
    assert reasons
    for reason in reasons:
        assert reason in text, "run: make lanes"


def test_to_its_own_release_every_file_stays_as_it_is(source: series.Series) -> None:
    _, ported = app.carry(source, [RELEASE], print)[RELEASE]
    for entry in ported:
        assert (entry.outcome, entry.missing, entry.notes) == ("clean", (), ())
        assert entry.data == entry.patch.file.read_bytes(), entry.patch.name


def test_the_lane_of_the_neighbour_passes_its_checks(
    source: series.Series, column: tuple[Carrier, list[Ported]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written beside a copy of the real lane, verified as `sglang-patches verify` does, and read back."""
    monkeypatch.setenv("SGLANG_PATCHES_DIR", str(tmp_path))
    beside = series.Series(source.release, tmp_path / RELEASE, source.patches)
    carrier, ported = column
    folder = lane.write(beside, carrier.new, ported)
    assert folder == tmp_path / NEIGHBOUR
    written = series.load(NEIGHBOUR, tmp_path)
    assert {patch.name for patch in written.patches} == {p.patch.name for p in ported} - set(lane.left_out(ported))
    assert len(written.patches) >= len(source.patches) // 2


def test_the_newest_release_on_the_index_is_listed() -> None:
    assert RELEASE in wheels.available()
