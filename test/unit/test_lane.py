"""The lane adapters, one a lane whose upstream differs, in the shape of the newest; and the files that pin a lane."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import lane_table
import pytest
from packaging.requirements import Requirement

from sglang_patches import lane, series, verify
from sglang_patches.lane import newest
from sglang_patches.port import needs, wheels

REPO = Path(__file__).resolve().parents[2]
LANES = series.releases(REPO / "patches")
# The installed one is verified and imported by other tests.
OTHERS = [name for name in LANES if name != lane_table.release()]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def attributes(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize("release", LANES)
def test_an_adapter_overrides_what_the_newest_has_and_adds_nothing(release: str) -> None:
    adapter = type(lane.of(release))
    assert issubclass(adapter, newest.Lane)
    assert attributes(adapter) <= attributes(newest.Lane)
    assert (adapter is newest.Lane) == (release == LANES[-1])


def test_an_adapter_belongs_to_a_lane() -> None:
    modules = [file.stem for file in (REPO / "python/sglang_patches/lane").glob("v*.py")]
    assert modules
    assert {name.removeprefix("v").replace("_", ".") for name in modules} < set(LANES)


def test_a_release_without_an_adapter_has_the_newest_ones() -> None:
    assert type(lane.of("99.0.0")) is type(lane.of("")) is newest.Lane


def test_the_installed_release_picks_the_adapter_once() -> None:
    assert lane.here() is lane.here()
    assert type(lane.here()) is type(lane.of(lane_table.release()))


def test_on_0_5_17_a_scheduler_tells_its_data_parallel_rank_once() -> None:
    adapter = lane.of("0.5.17")
    assert adapter.dp_rank(SimpleNamespace(ps=SimpleNamespace(dp_rank=2))) == 2
    assert adapter.dp_rank(None) == 2
    assert lane.of("0.5.17").dp_rank(SimpleNamespace(ps=SimpleNamespace(dp_rank=None))) == 0


def test_no_other_module_asks_for_the_version() -> None:
    """Differences between releases are the adapters'."""
    asked = re.compile(
        r"sglang\.version|sglang\.__version__|import __version__|installed\.release\s*[<>=]|version\(.sglang.\)"
    )
    for file in (REPO / "python/sglang_patches/runtime").rglob("*.py"):
        assert not asked.search(file.read_text()), file


@pytest.mark.parametrize("release", LANES)
def test_a_lane_has_a_constraint_file_that_pins_its_upstream(release: str) -> None:
    lines = (REPO / f"lanes/{release}.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {requirement.name for requirement in pinned} >= {"sglang", "torch"}
    assert next(str(one.specifier) for one in pinned if one.name == "sglang") == f"=={release}"


def test_the_requirement_admits_the_lanes_and_no_other_release() -> None:
    specifiers = [Requirement(line).specifier for line in PROJECT["dependencies"] if line.startswith("sglang")]
    assert len(specifiers) == 1
    assert set(specifiers[0].filter(wheels.available())) == set(LANES)


@pytest.mark.parametrize("release", OTHERS)
def test_the_series_of_every_other_lane_verifies_on_its_wheel(release: str) -> None:
    """Pre-images, each patch alone, in pairs and all together, compiled, and applied by other tools."""
    there = series.load(release, REPO / "patches")
    results = list(verify.run(wheels.fetch(release, print), there))
    assert len(results) > 3 * len(there.patches)
    assert [result for result in results if result.problem] == []


@pytest.mark.parametrize("release", OTHERS)
def test_every_other_lane_has_what_our_code_imports(release: str) -> None:
    wheel = wheels.fetch(release, print)
    there = series.load(release, REPO / "patches")
    assert {patch.name: said for patch in there.patches if (said := needs.missing(patch, wheel))} == {}
    assert needs.adapter_missing(wheel) == []


def test_the_newest_adapter_does_not_fit_an_older_lane() -> None:
    """So the check above can fail."""
    wheel = wheels.fetch(LANES[0], print)
    assert "sglang.srt.distributed.device_communicators.pcie_ipc_ar" in needs.adapter_missing(wheel, newest.__name__)


@pytest.mark.parametrize("release", LANES)
def test_the_table_names_tests_that_there_are(release: str) -> None:
    for named, why in lane_table.NOT_HERE.get(release, {}).items():
        file, _, test = named.partition("::")
        test, _, case = test.removesuffix("]").partition("[")
        text = (REPO / "test" / file).read_text()
        assert f"def {test}" in text, named
        assert not case or f'"{case}"' in text, named
        assert why


@pytest.mark.parametrize("release", LANES)
def test_the_constraints_of_a_lane_resolve(release: str) -> None:
    tool = shutil.which("uv") or Path(sys.executable).with_name("uv")
    command = [tool, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", sys.executable]
    command += ["--constraint", f"lanes/{release}.txt", "pyproject.toml"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pinned = (REPO / f"lanes/{release}.txt").read_text().splitlines()
    assert {line for line in pinned if line and not line.startswith("#")} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(("extra", "release"), [("cu12", "0.5.9"), ("cu13", LANES[-1])])
def test_an_extra_takes_the_stack_of_its_cuda(extra: str, release: str) -> None:
    asked = {Requirement(line).name: line for line in PROJECT["optional-dependencies"][extra]}
    nccl = f"nvidia-nccl-{extra}"
    assert set(asked) == {"sglang", "torch", nccl}
    assert set(asked.values()) <= set((REPO / f"lanes/{release}.txt").read_text().splitlines())
    assert release == max((lane for lane in LANES if nccl in (REPO / f"lanes/{lane}.txt").read_text()), key=LANES.index)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("0.5.8", "no lane for sglang 0.5.8\n  lanes      " + " ".join(LANES)),
        ("", "no lane is named"),
        ("../x", "port --to ../x"),
    ],
)
def test_an_unknown_lane_is_refused_with_the_lanes_and_the_port_command(wanted: str, told: str) -> None:
    done = subprocess.run(["make", "test-lane", f"LANE={wanted}"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr
    assert "sglang-patches port --to" in done.stderr
    assert done.stdout == ""
