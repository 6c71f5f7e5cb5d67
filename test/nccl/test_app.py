"""What `nccl tune` installs, and the errors of its commands, in process: the measurement itself is stood in for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from sglang_patches.errors import PatchError
from sglang_patches.nccl import app, tune
from sglang_patches.nccl.settings import Settings
from sglang_patches.nccl.topology import Topology

TOPOLOGIES = Path(__file__).parent / "topologies"
TWO_GPUS = Topology.from_json((TOPOLOGIES / "two-gpus.json").read_text())
NVLINK = Topology.from_json((TOPOLOGIES / "nvlink-host.json").read_text())


def runs(plan: tune.Plan, settings: Settings, **_: object) -> tune.Measured:
    """Three rounds in which every candidate but the baseline takes half the time."""
    random = np.random.default_rng(1)
    found = tune.Measured(plan, made="2026-01-31T00:00:00+00:00")
    for index in range(3):
        for number, candidate in enumerate(plan.candidates):
            center = 20.0 if candidate.name.startswith("as-it-comes") else 10.0
            samples = {rows: [list(center * random.lognormal(0, 0.01, 5))] * 2 for rows in plan.job.rows}
            versions = {"nccl": "2.30.7"}
            found.runs.append(tune.Run(candidate.name, index, number, "measured", "", 1.0, samples, versions))
    return found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server looks for profiles, on a host of two GPUs that nobody has tuned."""
    for name in app.profiles.TUNING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SGLANG_PATCHES_PROFILES", str(tmp_path / "installed"))
    monkeypatch.delenv("SGLANG_PATCHES_NCCL_PROFILE", raising=False)
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setattr(app, "host", lambda backend, tp: TWO_GPUS)
    monkeypatch.setattr(tune, "measure", runs)
    return tmp_path / "installed"


def command(out: Path) -> Result:
    arguments = ["tune", "--tp", "2", "--rows", "1,8", "--only", "min-channels-16", "--out", str(out)]
    return CliRunner().invoke(app.app, arguments, catch_exceptions=False)


def test_a_profile_is_installed_where_the_server_looks_for_it(installed: Path, tmp_path: Path) -> None:
    done = command(tmp_path / "out")
    assert done.exit_code == 0, done.output
    (file,) = installed.iterdir()
    assert f"{file}: the same, where the server looks for it" in done.output
    assert app.profiles.load(file).environment == {"NCCL_MIN_NCHANNELS": "16"}


def test_a_profile_measured_under_settings_of_the_callers_own_is_not_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")  # tunes nothing, so it is no hindrance
    done = command(tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert not installed.exists()
    (said,) = (line for line in done.output.splitlines() if line.startswith("not installed"))
    assert said.startswith("not installed, as a server would take no profile here")
    assert "NCCL_PROTO=LL" in said
    assert "NCCL_DEBUG" not in said
    assert "remedy     take them away and tune again" in done.output
    assert "copy it" not in done.output
    assert len(list((tmp_path / "out").glob("*-nccl2.30.7.json"))) == 1


def test_a_setting_in_a_file_of_nccls_counts_too(installed: Path, tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_BUFFSIZE=1048576\n")
    done = command(tmp_path / "out")
    assert not installed.exists()
    assert "NCCL_BUFFSIZE=1048576" in done.output
    assert str(tmp_path / ".nccl.conf") in done.output


def test_with_full_nvlink_nothing_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "host", lambda backend, tp: NVLINK.subset(range(2)))
    done = command(tmp_path / "out")
    assert not installed.exists()
    assert "no profile here: every pair of the 2 GPUs has NVLink" in done.output
    assert "remedy" not in done.output


def test_what_the_caller_has_selected_and_an_old_broken_profile_are_no_hindrance(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PATCHES_NCCL_PROFILE", "none")
    command(tmp_path / "out")
    (file,) = installed.iterdir()
    file.write_text("{")
    done = command(tmp_path / "out")
    assert (done.exit_code, "not installed," in done.output) == (0, False)
    assert app.profiles.load(file).environment == {"NCCL_MIN_NCHANNELS": "16"}


def test_what_only_upstream_or_no_profile_sets_is_no_hindrance(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    command(tmp_path / "out")
    assert len(list(installed.iterdir())) == 1


def test_an_nccl_that_does_not_load_in_time_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(app, "_LOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(app, "host", lambda backend, tp: TWO_GPUS)
    begun = time.monotonic()
    with pytest.raises(PatchError, match=r"did not load in 0 s\n  remedy"):
        app._nccl_version("nccl")
    done = CliRunner().invoke(app.app, ["check", "--tp", "2"])
    assert (done.exit_code, "did not load" in done.output) == (2, True)
    assert time.monotonic() - begun < 30
