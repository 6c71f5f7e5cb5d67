"""What `nccl check` makes of NCCL's log and of what the processes saw."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.nccl import debug_log
from sglang_patches.nccl import profile as profiles
from sglang_patches.nccl.bindings import Nccl, NcclError, _config_fields, names_variable
from sglang_patches.nccl.check import Result, Row, judge
from sglang_patches.nccl.group import Outcome
from sglang_patches.nccl.settings import Settings, with_profile, without_profile
from sglang_patches.nccl.topology import Topology

PREFIX = "host:101:101 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("NCCL_MIN_NCHANNELS set by environment to 16.", {"NCCL_MIN_NCHANNELS": "16"}),
        ("NCCL_PROTO set by environment to LL", {"NCCL_PROTO": "LL"}),
        ("NCCL_ALGO set by environment to allreduce:tree", {"NCCL_ALGO": "allreduce:tree"}),
        ("NCCL_P2P_LEVEL set by environment to SYS", {"NCCL_P2P_LEVEL": "SYS"}),
        ("NCCL_SOCKET_IFNAME set to eth0", {"NCCL_SOCKET_IFNAME": "eth0"}),
        ("NCCL_TOPO_FILE set by environment to /etc/topo.xml", {"NCCL_TOPO_FILE": "/etc/topo.xml"}),
        ("Comm config minCTAs reset to NCCL_MIN_CTAS=4", {"NCCL_MIN_CTAS": "4"}),
        ("Comm config graphUsageMode reset to 0 by NCCL_GRAPH_MIXING_SUPPORT=0", {"NCCL_GRAPH_MIXING_SUPPORT": "0"}),
        ("Channel 00/16 : 0 1", {}),
        ("", {}),
    ],
)
def test_every_form_in_which_nccl_tells_a_setting(line: str, taken: dict[str, str]) -> None:
    assert debug_log.read([PREFIX + line]).taken == taken


def test_a_log_tells_refusals_choices_channels_and_version() -> None:
    told = debug_log.read(
        PREFIX + line
        for line in (
            "NCCL version 2.30.7+cuda13.3",
            "Invalid value many for NCCL_NTHREADS, using default -2.",
            "NCCL_GRAPH_MIXING_SUPPORT 7 is not valid, leaving it set at 2",
            "16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer",
            "Comm config graphUsageMode set to 1",
            "AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
            "AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
            "AllReduce: 917504 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}",
        )
    )
    assert told.version == "2.30.7+cuda13.3"
    assert told.refused == {
        "NCCL_NTHREADS": "invalid value many, used its default -2",
        "NCCL_GRAPH_MIXING_SUPPORT": "value 7 is not valid, left it at 2",
    }
    assert told.choices == [debug_log.Choice(14336, "RING", "LL", 2), debug_log.Choice(917504, "RING", "SIMPLE", 16)]
    assert (told.channels, told.graph_modes) == ([16], [1])
    assert told.taken == {}


@pytest.mark.parametrize(
    ("wanted", "told", "same"),
    [
        ("16", "16", True), ("0x10", "16", True), ("020", "16", True), ("-1", "-1", True), (" 16 ", "16", True),
        ("16M", "16", False), ("16", "17", False), ("ring", "Ring", True), ("LL", "LL128", False),
        ("5", "PHB", True), ("SYS", "PHB", False), ("0", "0", True),
    ],
)  # fmt: skip
def test_values_are_compared_as_nccl_reads_them(wanted: str, told: str, same: bool) -> None:
    assert debug_log.same_value(wanted, told) is same


def judged(
    mine: dict[str, str], told: list[dict[str, str]], tmp_path: Path, *, refused: dict[str, str] | None = None,
    seen: dict[int, dict[str, str | None]] | None = None, after: dict[str, str] | None = None,
) -> Result:  # fmt: skip
    """Judge two ranks that saw `mine` but for `seen` (by rank), with a library that knows all but NCCL_MISSPELT."""
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0".join(name.encode() for name in mine if name != "NCCL_MISSPELT") + b"\0")
    ranks: list[dict[str, Any]] = []
    for rank in range(2):
        values = {**mine, **(seen or {}).get(rank, {})}
        view = {name: value for name, value in values.items() if value is not None}
        ranks.append({
            "python_environment": view,
            "c_environment": view,
            "c_environment_after": {**view, **(after or {})},
            "versions": {"nccl": "2.30.7", "nccl_file": str(library)},
            "sizes": {},
        })  # fmt: skip
    logs = [debug_log.Told(taken=dict(taken)) for taken in told]
    logs[1].refused.update(refused or {})
    settings = Settings(dict(mine), dict.fromkeys(mine, "you"))
    return judge(settings, Outcome("measured", "", 1.0, ranks), logs, own={})


def only(result: Result) -> Row:
    (row,) = result.rows
    return row


def test_all_taken_is_no_problem(tmp_path: Path) -> None:
    mine = {"NCCL_PROTO": "LL", "NCCL_BUFFSIZE": "0x1000000"}
    told = {"NCCL_PROTO": "LL", "NCCL_BUFFSIZE": "16777216"}
    result = judged(mine, [told, told], tmp_path)
    assert result.problems == []
    assert [(row.name, row.verdict, row.told) for row in result.rows] == [
        ("NCCL_BUFFSIZE", "taken", "16777216"),
        ("NCCL_PROTO", "taken", "LL"),
    ]
    assert json.loads(json.dumps(result.document()))["ok"] is True


@pytest.mark.parametrize(
    ("mine", "options", "verdict", "why"),
    [
        ({"NCCL_BUFFSIZE": "16M"}, {"told": {"NCCL_BUFFSIZE": "16"}}, "not taken", "16M, and NCCL on rank 0 took 16"),
        ({"NCCL_NTHREADS": "x"}, {"refused": {"NCCL_NTHREADS": "bad"}}, "not taken", "NCCL on rank 1: bad"),
        ({"NCCL_MIN_NCHANNELS": "8"}, {}, "not taken", "logs this variable when it takes it, and did not"),
        ({"NCCL_MISSPELT": "8"}, {}, "not taken", "has no such variable: misspelt, or of another release"),
        ({"NCCL_IB_TIMEOUT": "8"}, {}, "not told", "not needed for this all-reduce"),
        ({"NCCL_DEBUG_TIMESTAMP_FORMAT": "%s"}, {}, "not told", "NCCL does not log it"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, {}, "not told", "torch reads it, not NCCL"),
        ({"NCCL_P2P_DISABLE": "0"}, {}, "not told", "only where it is 1"),
        ({"NCCL_VERSION": "2.28.3-1"}, {}, "not told", "NVIDIA's container images"),
        ({"NCCL_PROTO": "LL"}, {"seen": {1: {"NCCL_PROTO": "Simple"}}}, "not taken", "rank 1, os.environ: Simple"),
        ({"NCCL_PROTO": "LL"}, {"seen": {0: {"NCCL_PROTO": None}}}, "not taken", "rank 0, os.environ: unset"),
    ],
)  # fmt: skip
def test_each_way_not_to_be_taken(
    tmp_path: Path, mine: dict[str, str], options: dict[str, Any], verdict: str, why: str
) -> None:
    told = options.pop("told", {})
    result = judged(mine, [told, told], tmp_path, **options)
    assert only(result).verdict == verdict
    assert why in only(result).why
    assert bool(result.problems) == (verdict == "not taken")


def test_a_level_that_another_variable_overrules_was_not_taken(tmp_path: Path) -> None:
    mine = {"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}
    told = {"NCCL_P2P_DISABLE": "1"}
    assert judged(mine, [told, told], tmp_path).problems == ["NCCL_P2P_LEVEL: NCCL_P2P_DISABLE=1 overrules it"]


def test_a_variable_that_only_a_configuration_file_set_is_shown(tmp_path: Path) -> None:
    told = {"NCCL_NTHREADS": "64"}
    result = judged({}, [told, told], tmp_path, after={"NCCL_NTHREADS": "64"})
    row = only(result)
    assert (row.wanted, row.by, row.told) == (None, "nobody", "64")
    assert "getenv once NCCL had started: 64" in row.seen
    assert "configuration file" in row.why


def recorded(name: str) -> debug_log.Told:
    """Rank 0's log of `nccl check` on two H200s, NCCL 2.30.7, lines on settings and choices kept."""
    return debug_log.read((Path(__file__).with_name("logs") / name).read_text().splitlines())


def test_a_recorded_log_of_the_default_profile_with_peer_access_off() -> None:
    told = recorded("default-profile.log")
    assert told.version == "2.30.7+cuda13.3"
    assert told.taken == {
        "NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MIN_NCHANNELS": "16",
    }  # fmt: skip
    assert told.graph_modes == [1]
    assert told.channels == [16, 16]
    assert told.choices == [debug_log.Choice(14336, "RING", "LL", 1), debug_log.Choice(917504, "RING", "SIMPLE", 14)]
    assert told.refused == {}


def test_a_recorded_log_shows_the_buffer_size_that_nccl_read_from_16m(tmp_path: Path) -> None:
    told = recorded("story-16m.log").taken
    mine = {
        "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS", "NCCL_MAX_NCHANNELS": "16",
        "NCCL_NTHREADS": "512", "NCCL_BUFFSIZE": "16M", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    }  # fmt: skip
    result = judged(mine, [told, told], tmp_path)
    assert result.problems == ["NCCL_BUFFSIZE: set to 16M, and NCCL on rank 0 took 16"]
    assert {row.verdict for row in result.rows if row.name != "NCCL_BUFFSIZE"} == {"taken"}


def test_a_communicator_for_graphs_alone_must_be_told_by_every_rank(tmp_path: Path) -> None:
    settings = Settings({}, {}, profiles.DEFAULT)
    ranks = judged({}, [{}, {}], tmp_path).outcome.ranks
    logs = [debug_log.Told(graph_modes=[1]), debug_log.Told(graph_modes=[2])]
    result = judge(settings, Outcome("measured", "", 1.0, ranks), logs, own={})
    (problem,) = result.problems
    assert problem.endswith("NCCL on rank 1 did not log graphUsageMode 1")


def test_a_failed_all_reduce_is_a_problem() -> None:
    result = judge(Settings({}, {}), Outcome("timed out", "after 60 s", 60.0, [{}, {}]), [], own={})
    assert result.problems == ["the all-reduce timed out: after 60 s"]


def test_settings_tell_who_set_what() -> None:
    found = without_profile({"NCCL_PROTO": "LL", "NCCL_NVLS_ENABLE": "1", "HOME": "/root"})
    assert found.by == {"NCCL_PROTO": "you", "NCCL_NVLS_ENABLE": "you", "NCCL_CUMEM_ENABLE": "upstream"}
    assert found.environment["NCCL_NVLS_ENABLE"] == "1"
    assert found.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    file = Path(__file__).with_name("topologies") / "eight-on-two-sockets.json"
    two = Topology.from_json(file.read_text()).subset([0, 1])
    chosen = with_profile(two, "2.30.7", {"HOME": "/root"})
    assert chosen.by["NCCL_MIN_NCHANNELS"] == "profile two-gpus"
    assert chosen.environment["NCCL_MIN_NCHANNELS"] == "16"


def nccl() -> Nccl:
    import torch  # noqa: F401 (loads the library)

    return Nccl()


def test_the_loaded_nccl_is_the_one_that_upstream_installs() -> None:
    library = nccl()
    from importlib.metadata import version

    assert library.version() == version("nvidia-nccl-cu13")
    assert library.has_graphs_only()
    with pytest.raises(NcclError, match=r"ncclGetVersion returned 4 \(invalid argument"):
        library.call("ncclGetVersion", None)


def test_a_misspelt_variable_is_not_in_the_library() -> None:
    file = nccl().file
    assert names_variable(file, "NCCL_MIN_NCHANNELS")
    assert names_variable(file, "NCCL_GRAPH_MIXING_SUPPORT")
    assert not names_variable(file, "NCCL_MIN_NCHANELS")


def test_the_configuration_has_the_layout_of_nccls_own_header() -> None:
    spec = find_spec("nvidia.nccl")
    assert spec is not None
    assert spec.submodule_search_locations
    header = (Path(next(iter(spec.submodule_search_locations))) / "include" / "nccl.h").read_text()
    body = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", header, re.DOTALL)
    assert body
    fields = re.findall(r"^\s*(?:const )?(size_t|unsigned int|int|char) \*?(\w+);", body[1], re.MULTILINE)
    names = [name for _, name in fields]
    assert names[:3] == ["size", "magic", "version"]
    ours = [name for name, _ in _config_fields()]
    assert names[3 : 3 + len(ours)] == ours
    pointers = {name for kind, name in fields if kind == "char"} & set(ours)
    assert pointers == {"netName", "commName"}
