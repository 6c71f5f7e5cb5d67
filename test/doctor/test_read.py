"""Reading a machine: NVML and /sys played back, the real process that loads torch, and this very machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_patches.cli import app
from sglang_patches.doctor import models, probe, read, sharing
from sglang_patches.doctor.host import Host, Library, Model, Serving
from sglang_patches.errors import PatchError
from sglang_patches.nccl import topology

from .conftest import HOSTS, NAMES, recorded, write

TINY = Path(__file__).parents[1] / "models" / "tiny-kimi"
DRAFT = TINY.with_name("tiny-kimi-eagle3")


class Nvml:
    """The functions of pynvml that are asked, over a recorded host; handles are positions."""

    class NVMLError(Exception):
        pass

    def __init__(self, host: Host, silent: tuple[str, ...] = ()) -> None:
        self.host, self.silent = host, silent

    def __getattr__(self, name: str) -> Any:
        if name in self.silent or not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            return self.answer(name.removeprefix("nvml").removeprefix("DeviceGet"), *arguments)

        return answer

    def answer(self, name: str, *arguments: Any) -> Any:
        gpus, slots = self.host.gpus, self.host.topology.gpus
        here = arguments[0] if arguments and isinstance(arguments[0], int) else 0
        match name:
            case "HandleByPciBusId":
                return [slot.bus for slot in slots].index(arguments[0].decode())
            case "CudaComputeCapability":
                return divmod(gpus[here].sm or 0, 10)
            case "MemoryInfo":
                kept = {"total": gpus[here].memory, "free": gpus[here].memory_free}
                return type("Memory", (), kept)
            case "CurrPcieLinkGeneration":
                return gpus[here].generation
            case "CurrPcieLinkWidth":
                return gpus[here].width
            case "GpuMaxPcieLinkGeneration":
                return gpus[here].own_generation
            case "PerformanceState":
                return gpus[here].performance_state
            case "P2PStatus":
                return 1 if (*sorted(arguments[:2]),) in {(r.a, r.b) for r in self.host.refusals} else 0
            case "SystemGetCudaDriverVersion":
                return 13000
            case "SystemGetDriverVersion":
                return b"580.159.04"
        return None


@pytest.mark.parametrize("name", ["eight-pcie-iommu", "degraded-link"])
def test_nvml_becomes_the_recorded_host(name: str) -> None:
    host = recorded(name)
    driver, cuda, gpus, refusals = read._nvml(host.topology, Nvml(host))
    assert (driver, cuda) == ("580.159.04", "13.0")
    assert gpus == tuple(replace(gpu, own_width=None) for gpu in host.gpus)
    assert refusals == host.refusals


def test_a_pair_that_may_be_read_but_not_written_has_a_reason() -> None:
    class ReadOnly(Nvml):
        def answer(self, name: str, *arguments: Any) -> Any:
            return 4 * arguments[2] if name == "P2PStatus" else super().answer(name, *arguments)

    host = recorded("eight-pcie")
    first, *others = host.topology.links
    shown = replace(host.topology, links=(replace(first, write=False), *others))
    (refusal,) = read._nvml(shown, ReadOnly(host))[3]
    assert (refusal.a, refusal.b, refusal.reason) == (first.a, first.b, "disabled by a driver option")


def test_what_nvml_does_not_tell_is_none() -> None:
    host = recorded("eight-pcie")
    nvml = Nvml(host, silent=("nvmlDeviceGetMemoryInfo", "nvmlSystemGetDriverVersion"))
    driver, _, gpus, _ = read._nvml(host.topology, nvml)
    assert driver is None
    assert gpus[0].memory_free is None
    assert gpus[0].sm == 120


def test_what_libraries_print_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    """One that says goodbye when the process ends, from C, behind what Python printed."""
    package = tmp_path / "sgl_kernel"
    goodbye = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
at_exit = getattr(libc, "__cxa_atexit")
at_exit(ctypes.cast(libc.puts, ctypes.c_void_p), ctypes.c_void_p(libc.strdup(b"goodbye")), None)
"""
    write(package, {"__init__.py": goodbye})
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    found = read.probe({**os.environ, "PYTHONPATH": path, "SGLANG_PATCHES": "none"})
    assert found["kernels"]["file"] == str(package / "__init__.py")


def test_a_gpu_whose_state_nvml_does_not_tell_is_no_other_complaint(tmp_path: Path) -> None:
    assert read._own_links((), recorded("eight-pcie").topology, tmp_path) == ()


@pytest.mark.parametrize("said", ["", "\n", "CUDA error\nmore"])
def test_cuda_that_does_not_start(said: str) -> None:
    class Cuda:
        @staticmethod
        def init() -> None:
            raise RuntimeError(said)

    told = probe._start_cuda(type("Torch", (), {"cuda": Cuda}))
    assert told == (said.strip().partition("\n")[0] or repr(RuntimeError(said)))


def test_a_source_that_fails_is_told_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(environ: object) -> dict[str, Any]:
        raise PatchError("`import torch, sgl_kernel` ended with status -11: Segmentation fault")

    monkeypatch.setattr(read, "probe", broken)
    host = read.read(
        Serving(), environ={"NCCL_ALGO": "Ring", "NCCL_X": "https://me:secret@host", "HOME": "/x"}, root=tmp_path
    )
    assert {"torch and sgl_kernel", "memory", "/dev/shm"} <= set(host.unread)
    assert (host.kernels, host.nccl, host.memory_available, host.nodes) == (None, None, None, ())
    assert set(host.environment) == {"NCCL_ALGO", "NCCL_X"}
    assert "secret" not in host.to_json()


def test_architectures_as_cuobjdump_lists_them() -> None:
    """On the wheel of sglang-kernel that is installed, against NVIDIA's own tool, which triton brings."""
    from importlib.metadata import files

    wheel = next(
        file.locate() for file in files("sglang-kernel") or [] if str(file).endswith("sm100/common_ops.abi3.so")
    )
    triton = [file.locate() for file in files("triton") or [] if file.name == "cuobjdump"]
    if not triton or not os.access(str(triton[0]), os.X_OK):
        pytest.skip("triton brings no cuobjdump")
    told = subprocess.run([str(triton[0]), "--list-elf", str(wheel)], capture_output=True, text=True, check=True).stdout
    wanted = {int("".join(filter(str.isdigit, name))) for name in told.split(".") if name.startswith("sm_")}
    assert wanted
    assert set(probe.archs(Path(str(wheel)))[0]) == wanted


def test_no_architectures_in_a_file_without(tmp_path: Path) -> None:
    file = tmp_path / "x.so"
    file.write_bytes(b"\x50\xed\x55\xba" + b"\0" * 3 + b"\x50\xed\x55\xba")
    assert probe.archs(file) == ([], [])


def test_needs_of_the_bundled_pair() -> None:
    """The bytes of its tensors; 12 layers of a latent of 72 and a rotary key of 32; 1 layer of keys and values."""
    target, draft = models.read(str(TINY)), models.read(str(DRAFT))
    for model, folder in ((target, TINY), (draft, DRAFT)):
        with (folder / "model.safetensors").open("rb") as file:
            header = struct.unpack("<Q", file.read(8))[0]
        assert model.split + model.whole == (folder / "model.safetensors").stat().st_size - 8 - header
    assert (target.kv_split, target.kv_whole) == (0, 12 * (72 + 32) * 2)
    assert (draft.kv_whole, draft.kv_heads) == (0, _config(DRAFT, "num_key_value_heads"))
    assert draft.kv_split == 2 * 2 * _config(DRAFT, "num_key_value_heads") * _config(DRAFT, "head_dim")
    assert (target.layers, target.context_length, models.read(str(TINY), 100).context_length) == (12, 4096, 100)
    experts = 11 * 8 * 3 * 256 * 112 * 2  # layers x experts x matrices x hidden x intermediate x bytes: all divided
    assert target.split > experts


def _config(folder: Path, key: str) -> int:
    return int(json.loads((folder / "config.json").read_text())[key])


def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    assert models.serving(str(TINY), str(tmp_path), 1, 30000).draft_refused == ()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    assert "vocab_size" in models.serving(str(TINY), str(tmp_path), 1, 30000).draft_refused[0]


def test_kv_of_kimi_k25() -> None:
    """61 layers of 512 + 64 in bfloat16: 70,272 bytes a token on every rank."""
    config = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64}
    assert models.kv_bytes(config) == (0, 70_272, 0)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("vision_tower.encoder.blocks.0.mlp.fc0.weight", True),
        ("vision_tower.encoder.blocks.0.wqkv.weight", False),  # VisionAttention divides its heads
        ("vision_tower.encoder.blocks.0.wo.weight", False),
        ("language_model.model.layers.1.mlp.gate.weight", True),
        ("language_model.model.layers.1.mlp.gate_proj.weight", False),
        ("language_model.model.layers.1.self_attn.kv_a_proj_with_mqa.weight", True),
        ("language_model.model.layers.1.self_attn.kv_b_proj.weight", False),
    ],
)
def test_weights_that_every_rank_holds_whole(name: str, whole: bool) -> None:
    assert bool(models._WHOLE.search(name)) is whole


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    assert "there is no such folder" in (models.read(str(tmp_path / "no" / "such")).problem or "")
    unknown = models.read("no-owner-has/this-model", environ={})
    assert (unknown.here, unknown.problem) == (False, None)
    assert unknown.remedy.startswith("hf download no-owner-has/this-model")
    # Nor can a server get it then.
    offline = models.read("no-owner-has/this-model", environ={"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE=1 keeps from asking the hub" in (offline.problem or "")
    assert "no config.json" in (models.read(str(tmp_path)).problem or "")
    shutil.copy(TINY / "model.safetensors", tmp_path)
    no_heads = {"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 1}
    unusable: tuple[Any, ...] = ([], "x", no_heads, {"text_config": [1]})
    for config in unusable:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert "config.json" in (models.read(str(tmp_path)).problem or "")
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(TINY / "config.json", tmp_path)
    assert "safetensors" in (models.read(str(tmp_path)).problem or "")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    write(tmp_path, {"model.safetensors.index.json": json.dumps(index), "model-1.safetensors": b"\2\0\0\0\0\0\0\0{}"})
    assert "model-2.safetensors" in (models.read(str(tmp_path)).problem or "")


@pytest.mark.parametrize("name", NAMES)
def test_hosts_travel_as_json(name: str) -> None:
    host = recorded(name)
    assert Host.from_json(host.to_json()) == host
    assert host.to_json() == (HOSTS / f"{name}.json").read_text()


def test_a_file_that_is_no_host(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"gpu": []}')
    with pytest.raises(PatchError, match="no recorded host"):
        Host.read(tmp_path / "x.json")
    done = CliRunner().invoke(app, ["doctor", "--recorded", str(tmp_path / "x.json")])
    assert done.exit_code == 2


@pytest.mark.parametrize("option", ["--tp=4", "--model=x", "--context-length=9", "--mem-fraction-static=0.5"])
def test_a_recorded_host_says_what_was_to_be_served(option: str) -> None:
    """Another size would be ignored without a word."""
    done = CliRunner().invoke(app, ["doctor", "--recorded", str(HOSTS / "no-gpu.json"), option])
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output


def test_what_leaves_the_machine_does_not_say_which_it_is() -> None:
    uuid = "GPU-8f3e1c2a-0b1d-4e5f-8a9b-0c1d2e3f4a5b"
    host = replace(
        recorded("no-gpu"),
        topology=replace(recorded("no-gpu").topology, absent=f"CUDA_VISIBLE_DEVICES='{uuid},GPU-8f' shows none"),
        environment={"CUDA_VISIBLE_DEVICES": f"{uuid},MIG-GPU-8f3e1c2a/1/0,3", "NCCL_HOSTID": "a100.example.org"},
        unread={"ACS": "/home/alice/x: not on a100, see GPU-dependent notes"},
        import_path={"/home/alice/shared": "every user can write to /home/alice/shared"},
        container="registry/a100-image",
        nccl=(Library("/home/alice/.venv/libnccl.so.2", "2.30.7"),),
        serving=replace(recorded("no-gpu").serving, model=Model("/home/alice/m"), draft=Model("/home/alicent/m")),
    )
    told = sharing.unnamed(host, "a100.example.org", "/home/alice")
    assert told.topology.absent == "CUDA_VISIBLE_DEVICES='GPU-***,GPU-***' shows none"
    assert told.environment == {"CUDA_VISIBLE_DEVICES": "GPU-***,MIG-GPU-***,3", "NCCL_HOSTID": "***"}
    assert told.unread == {"ACS": "~/x: not on ***, see GPU-dependent notes"}
    assert told.import_path == {"~/shared": "every user can write to ~/shared"}
    assert told.container == "registry/a100-image"
    assert told.nccl == (Library("~/.venv/libnccl.so.2", "2.30.7"),)
    assert told.serving.model == Model("~/m")
    assert told.serving.draft == Model("/home/alicent/m")
    assert replace(told, **{name: getattr(host, name) for name in (
        "topology", "environment", "unread", "import_path", "nccl", "serving")}) == host  # fmt: skip
    # What names nothing is left as it is: a machine without a name, root's home.
    assert sharing.unnamed(recorded("eight-pcie"), "localhost", "/root") == recorded("eight-pcie")


def test_a_record_and_json_are_of_no_named_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "probe", lambda _: {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3e1c2a")
    monkeypatch.setenv("NCCL_HOSTID", f"on {socket.gethostname()}")
    file = tmp_path / "host.json"
    done = CliRunner().invoke(app, ["doctor", "--port", "29417", "--json", "--record", str(file)])
    shown = CliRunner().invoke(app, ["doctor", "--port", "29417", "--json"])
    for text in (file.read_text(), done.stdout, shown.stdout):
        assert "GPU-***" in text
        assert "8f3e1c2a" not in text
        assert socket.gethostname() not in text


def test_the_old_name_of_recorded() -> None:
    """It is told from the server's --host, which it looks like, by being a file's name."""
    done = CliRunner().invoke(app, ["doctor", "--host", str(HOSTS / "eight-pcie.json")])
    assert (done.exit_code, "8x NVIDIA" in done.output) == (0, True)
    done = CliRunner().invoke(app, ["doctor", "--host", "no-such.json"])
    assert (done.exit_code, "no-such.json" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["doctor", "--recorded", str(HOSTS / "no-gpu.json"), "--host", "0.0.0.0"])
    assert (done.exit_code, "--host with --recorded" in done.output) == (2, True)


def test_the_port_is_looked_at_where_the_server_will_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "probe", lambda _: {})

    def port_at(host: str) -> dict[str, str]:
        done = CliRunner().invoke(app, ["doctor", "--port", str(port), "--host", host, "--json"])
        (finding,) = [found for found in json.loads(done.stdout)["findings"] if found["check"] == "port"]
        return finding

    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_at("127.0.0.1")["level"] == "ok"
        found = port_at("0.0.0.0")
    assert found["level"] == "failure"
    assert f"port {port} is in use on 0.0.0.0 by pid {os.getpid()} (" in found["seen"]


def test_this_machine_with_the_bundled_pair(tmp_path: Path) -> None:
    """Nothing is a failure; what was recorded gives the same findings again."""
    if topology.read().gpus:
        pytest.skip("this machine has a GPU, whose findings are its own")
    file = tmp_path / "host.json"
    asked = ["doctor", "--model", str(TINY), "--draft", str(DRAFT), "--port", "29417", "--json"]
    done = CliRunner().invoke(app, [*asked, "--record", str(file)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["failures"] == 0
    assert {finding["check"] for finding in document["findings"]} >= {"driver", "NCCL", "memory", "port"}
    assert document["host"]["nccl"][0]["version"]
    again = CliRunner().invoke(app, ["doctor", "--recorded", str(file), "--json"])
    assert json.loads(again.stdout)["findings"] == document["findings"]


@pytest.mark.parametrize(("name", "code"), [("eight-pcie", 0), ("eight-pcie-iommu", 0), ("old-software", 1)])
def test_one_screen_and_exit_code(name: str, code: int) -> None:
    done = CliRunner().invoke(app, ["doctor", "--recorded", str(HOSTS / f"{name}.json")])
    assert done.exit_code == code
    lines = done.stdout.splitlines()
    assert len(lines) <= 70
    assert ("SYS!" in done.stdout) == (name == "eight-pcie-iommu")
    document = json.loads(
        CliRunner().invoke(app, ["doctor", "--recorded", str(HOSTS / f"{name}.json"), "--json"]).stdout
    )
    assert (document["level"] == "failure") == bool(code)
    assert len(document["matrix"]) == 8
