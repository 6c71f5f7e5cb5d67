"""profile: files round-trip, and the choice follows its rules in order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_patches.nccl import profile
from sglang_patches.nccl.profile import Crossover, Profile, ProfileError
from sglang_patches.nccl.topology import Topology

HOSTS = Path(__file__).with_name("topologies")
VERSION = "2.30.7"


def host(name: str) -> Topology:
    return Topology.from_json((HOSTS / f"{name}.json").read_text())


PCIE = host("eight-on-two-sockets")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {profile.FOLDER: str(tmp_path)}


def tuned(topology: Topology = PCIE, version: str = VERSION, **changed: object) -> Profile:
    values: dict[str, object] = {
        "name": "tuned-here",
        "environment": {"NCCL_MIN_NCHANNELS": "8", "NCCL_PROTO": "LL128"},
        "graphs_only": True,
        "fingerprint": topology.fingerprint(),
        "nccl_version": version,
        "crossovers": {profile.PCIE_IPC: Crossover(rows=8, size_bytes=8 * 7168 * 2)},
        "provenance": {"when": "today", "samples": [1.5, 2.5]},
    }
    return Profile(**(values | changed))  # type: ignore[arg-type]


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = profile.save(tuned(), tmp_path / "new" / "folder")
    assert path.name == f"{PCIE.fingerprint()}-nccl{VERSION}.json"
    assert profile.load(path) == tuned(source=str(path))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_folder_is_named_by_the_environment() -> None:
    assert profile.folder({profile.FOLDER: "/some/where"}) == Path("/some/where")
    assert profile.folder({}) == Path.home() / ".config/sglang-patches/profiles"


def test_a_profile_of_nothing_known_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="fingerprint None"):
        profile.save(tuned(fingerprint=None), tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "not format 1"),
        ({"environment": {"LD_PRELOAD": "x"}}, "LD_PRELOAD"),
        ({"environment": None}, "not a profile"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = profile.save(tuned(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ProfileError, match=told) as error:
        profile.load(path)
    assert str(path) in str(error.value)
    path.write_text("{")
    with pytest.raises(ProfileError, match="not a profile"):
        profile.load(path)


def test_graph_mixing_measured_process_wide_is_applied_to_one_communicator(tmp_path: Path) -> None:
    measured = tuned(graphs_only=False, environment={"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_PROTO": "LL"})
    read = profile.load(profile.save(measured, tmp_path))
    assert read.graphs_only
    assert read.environment == {"NCCL_PROTO": "LL"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvlink-host", "every pair of the 8 GPUs has NVLink"),
        ("no-gpu", "NVML lists no GPU"),
        ("nvml-missing", "NVML Shared Library Not Found"),
    ],
)
@pytest.mark.parametrize("selection", ["auto", "story"])
def test_nothing_is_set_where_it_is_not_needed(
    name: str, why: str, selection: str, environ: dict[str, str], tmp_path: Path
) -> None:
    if "nvlink" in name:
        profile.save(tuned(host(name)), tmp_path)
    chosen = profile.choose(host(name), VERSION, environ | {profile.SELECTION: selection})
    assert chosen.empty
    assert why in chosen.why


def test_one_gpu_of_a_pcie_host_needs_nothing(environ: dict[str, str]) -> None:
    assert profile.choose(PCIE.subset([3]), VERSION, environ).empty


@pytest.mark.parametrize(
    ("gpus", "name", "environment"),
    [(2, "two-gpus", {"NCCL_MIN_NCHANNELS": "16"}), (3, "default", {}), (8, "default", {})],
)
def test_the_built_in_where_nothing_was_tuned_sets_only_what_was_measured_on_as_many_gpus(
    gpus: int, name: str, environment: dict[str, str], environ: dict[str, str]
) -> None:
    chosen = profile.choose(PCIE.subset(range(gpus)), VERSION, environ)
    assert (chosen.name, chosen.source) == (name, "built-in")
    assert chosen.environment == environment
    assert chosen.graphs_only
    assert "no tuned profile" in chosen.why
    assert chosen.provenance["nccl_version"] == "2.30.7"  # 2.28 has no communicator for graphs alone


def test_where_nvml_does_not_tell_of_nvlink_only_a_measured_or_named_profile_is_taken(
    environ: dict[str, str], tmp_path: Path
) -> None:
    untold = replace(PCIE, links=tuple(replace(link, nvlink=None) for link in PCIE.links))
    chosen = profile.choose(untold, VERSION, environ)
    assert chosen.empty
    assert "NVML does not tell whether the 8 GPUs have NVLink" in chosen.why
    assert profile.choose(untold, VERSION, environ | {profile.SELECTION: "default"}).graphs_only
    profile.save(tuned(untold), tmp_path)
    assert profile.choose(untold, VERSION, environ).name == "tuned-here"


@pytest.fixture(params=["no home", "a home of someone else"])
def homeless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user whose home is not known, or whose HOME is a folder that it may not look into."""
    if request.param == "no home":
        error: OSError | RuntimeError = RuntimeError("Could not determine home directory.")
    else:
        error = PermissionError(13, "Permission denied", "/root/.config")

    def refused(*_: object) -> Path:
        raise error

    # The user who runs the tests may look into everything, so the refusal is put where it arises.
    for name in ("expanduser",) if request.param == "no home" else ("is_file", "exists", "iterdir"):
        monkeypatch.setattr(Path, name, refused)
    return str(error)


def test_who_has_no_readable_home_gets_the_built_in(homeless: str, caplog: pytest.LogCaptureFixture) -> None:
    assert profile.choose(PCIE, VERSION, {}).name == "default"
    assert homeless in caplog.text
    assert profile.FOLDER in caplog.text


def test_who_has_no_readable_home_and_names_a_profile_is_told(homeless: str) -> None:
    assert profile.choose(PCIE, VERSION, {profile.SELECTION: "default"}).graphs_only
    with pytest.raises(ProfileError, match=r"'mine': no built-in, and saved profiles cannot be looked for") as told:
        profile.choose(PCIE, VERSION, {profile.SELECTION: "mine"})
    assert homeless in str(told.value)
    assert profile.FOLDER in str(told.value)


def test_a_tuned_profile_is_for_its_gpus_and_its_nccl_only(environ: dict[str, str], tmp_path: Path) -> None:
    path = profile.save(tuned(), tmp_path)
    chosen = profile.choose(PCIE, VERSION, environ)
    assert (chosen.name, chosen.source) == ("tuned-here", str(path))
    assert chosen.crossovers[profile.PCIE_IPC].rows == 8
    assert profile.choose(PCIE.subset([7, 6, 5, 4, 3, 2, 1, 0]), VERSION, environ).name == "tuned-here"
    assert profile.choose(PCIE.subset([0, 1, 2, 3]), VERSION, environ).name == "default"
    assert profile.choose(PCIE, "2.30.8", environ).name == "default"


@pytest.mark.parametrize("variable", ["NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_GRAPH_MIXING_SUPPORT"])
def test_the_operators_own_tuning_wins(variable: str, environ: dict[str, str], tmp_path: Path) -> None:
    profile.save(tuned(), tmp_path)
    chosen = profile.choose(PCIE, VERSION, environ | {variable: "1"})
    assert chosen.empty
    assert f"tuned already, by the operator or upstream: {variable}=1" in chosen.why
    assert chosen.kept == {variable: "1"}


@pytest.mark.parametrize("named", [True, False])
def test_the_operators_tuning_in_nccls_own_files_wins_too(named: bool, environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / ("some.conf" if named else ".nccl.conf")
    own = {"NCCL_CONF_FILE": str(file)} if named else {"HOME": str(tmp_path)}
    file.write_text("#NCCL_PROTO=LL\nNCCL_DEBUG=WARN\n")
    assert profile.choose(PCIE, VERSION, environ | own).name == "default"
    file.write_text("NCCL_MIN_NCHANNELS=4\n")
    chosen = profile.choose(PCIE, VERSION, environ | own)
    assert chosen.empty
    assert f"NCCL_MIN_NCHANNELS=4 (in {file})" in chosen.why


def test_variables_that_are_no_tuning_change_nothing(environ: dict[str, str]) -> None:
    chosen = profile.choose(PCIE, VERSION, environ | {"NCCL_DEBUG": "INFO", "NCCL_CUMEM_ENABLE": "0"})
    assert chosen.name == "default"


def test_a_named_profile_fills_in_what_is_not_set(environ: dict[str, str]) -> None:
    chosen = profile.choose(PCIE, VERSION, environ | {profile.SELECTION: "story", "NCCL_PROTO": "Simple"})
    assert chosen.name == "story"
    assert "NCCL_PROTO" not in chosen.environment
    assert chosen.environment["NCCL_ALGO"] == "Ring"
    assert chosen.kept == {"NCCL_PROTO": "Simple"}
    assert len(profile.BUILT_IN["story"].environment) == 6


def test_profiles_are_named_built_in_or_saved_and_others_refused(environ: dict[str, str], tmp_path: Path) -> None:
    profile.save(tuned(PCIE.subset([0, 1])), tmp_path)
    assert profile.choose(PCIE, VERSION, environ | {profile.SELECTION: "tuned-here"}).name == "tuned-here"
    assert profile.choose(PCIE, VERSION, environ | {profile.SELECTION: "none"}).empty
    with pytest.raises(ProfileError, match=r"'tunde': no such profile\n.*auto, default, .*tuned-here"):
        profile.choose(PCIE, VERSION, environ | {profile.SELECTION: "tunde"})
    with pytest.raises(ProfileError, match="no such profile"):
        profile.choose(host("no-gpu"), VERSION, environ | {profile.SELECTION: "tunde"})


def test_graph_mixing_process_wide_only_by_name(environ: dict[str, str]) -> None:
    selected = environ | {profile.SELECTION: "graph-mixing-off"}
    named = profile.choose(PCIE, "2.28.9", selected)
    assert named.environment == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
    assert not named.graphs_only
    assert all(
        "NCCL_GRAPH_MIXING_SUPPORT" not in profile.BUILT_IN[name].environment
        for name in ("default", "two-gpus", "story")
    )
    # From 2.29 on it means that no graph uses any communicator.
    for version in ("2.29.2", VERSION):
        with pytest.raises(ProfileError, match=rf"NCCL {version} takes every communicator.*\n.*\n.*=default"):
            profile.choose(PCIE, version, selected)


@pytest.mark.parametrize("value", ["0", "00", "0x0", "no"])
@pytest.mark.parametrize("in_file", [True, False])
def test_without_stream_order_no_communicator_is_made_for_graphs_alone(
    value: str, in_file: bool, environ: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text(f"NCCL_GRAPH_STREAM_ORDERING={value}\n" if in_file else "")
    own = {"NCCL_CONF_FILE": str(file)} | ({} if in_file else {"NCCL_GRAPH_STREAM_ORDERING": value})
    for selection in ("auto", "default"):
        chosen = profile.choose(PCIE, VERSION, environ | own | {profile.SELECTION: selection})
        assert (chosen.name, chosen.graphs_only) == ("default", False)
        assert f"NCCL_GRAPH_STREAM_ORDERING={value} (in {file if in_file else 'the environment'})" in chosen.why
        assert chosen.kept == ({} if in_file else {"NCCL_GRAPH_STREAM_ORDERING": value})


@pytest.mark.parametrize("value", ["1", "", "010", "0x10"])
def test_stream_order_that_is_on_changes_nothing(value: str, environ: dict[str, str]) -> None:
    assert profile.choose(PCIE, VERSION, environ | {"NCCL_GRAPH_STREAM_ORDERING": value}).graphs_only


def test_graph_mixing_in_nccls_own_files_keeps_a_named_profile_from_graphs_only(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_GRAPH_MIXING_SUPPORT=1\n")
    chosen = profile.choose(PCIE, VERSION, environ | {"HOME": str(tmp_path), profile.SELECTION: "default"})
    assert not chosen.graphs_only


@pytest.mark.parametrize(
    ("version", "possible", "why"),
    [
        ("2.28.9", False, "cannot set graph mixing"),
        ("2.29.0", True, ""),
        ("2.30.7", True, ""),
        ("2.31.0", False, "nobody has measured"),
        (None, False, "cannot set graph mixing"),
    ],
)
def test_an_nccl_that_cannot_set_one_communicator_leaves_graph_mixing_alone(
    version: str | None, possible: bool, why: str, environ: dict[str, str]
) -> None:
    chosen = profile.choose(PCIE.subset([0, 1]), version, environ)
    assert chosen.graphs_only == possible
    assert chosen.environment == {"NCCL_MIN_NCHANNELS": "16"}
    assert why in chosen.why


@pytest.mark.parametrize(("code", "text"), [(23007, "2.30.7"), (22809, "2.28.9"), (2708, "2.7.8")])
def test_versions_are_written_as_people_do(code: int, text: str) -> None:
    assert profile.version_text(code) == text
