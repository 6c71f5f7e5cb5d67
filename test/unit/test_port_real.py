"""The shipped series carried to real releases, fetched from the package index (200 MB), against docs/lanes.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches import series
from sglang_patches.port import app, lane, matrix, wheels
from sglang_patches.port.carry import Carrier, Ported

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/lanes.md"
OLDEST, NEIGHBOUR, RELEASE = "0.5.17", "0.5.22", "0.5.23"


@pytest.fixture(scope="module")
def source() -> Iterator[series.Series]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SGLANG_PATCHES_DIR", raising=False)
        yield series.load(RELEASE)


@pytest.fixture(scope="module")
def columns(source: series.Series) -> dict[str, tuple[Carrier, list[Ported]]]:
    """By release, those that the committed matrix has."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    head = next(line for line in lines[lines.index(matrix.BEGIN) :] if line.startswith("| patch |"))
    releases = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert (releases[0], releases[-1]) == (OLDEST, RELEASE)
    return app.carry(source, releases, print)


@pytest.fixture
def column(columns: dict[str, tuple[Carrier, list[Ported]]]) -> tuple[Carrier, list[Ported]]:
    return columns[NEIGHBOUR]


def test_the_committed_matrix_is_what_the_command_makes(columns: dict[str, tuple[Carrier, list[Ported]]]) -> None:
    """Every cell, and every reason below it."""
    _, _, behind = DOCUMENT.read_text(encoding="utf-8").partition(matrix.BEGIN)
    committed, end, _ = behind.partition(matrix.END)
    made = matrix.markdown(RELEASE, {release: ported for release, (_, ported) in columns.items()})
    assert (matrix.BEGIN + committed + end).splitlines() == made.splitlines(), "run: make lanes"


def test_to_its_own_release_every_file_stays_as_it_is(columns: dict[str, tuple[Carrier, list[Ported]]]) -> None:
    _, ported = columns[RELEASE]
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
