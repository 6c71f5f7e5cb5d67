"""Dockerfile, scripts, compose files and the Kubernetes manifest, as their own tools see them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sglang_patches import launch, series

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))


def tool(name: str, *arguments: str | Path) -> None:
    """Run a tool of this environment, which must find nothing to say."""
    done = subprocess.run([Path(sys.prefix) / "bin" / name, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"


def test_hadolint() -> None:
    tool("hadolint", "--failure-threshold", "style", DOCKER / "Dockerfile")


def test_shellcheck() -> None:
    scripts = [*DOCKER.glob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]
    assert len(scripts) > 8
    tool("shellcheck", *scripts)


def test_every_step_of_the_dockerfile_is_a_script() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    steps = [command for line in re.findall(r"^RUN (.*)$", text, re.MULTILINE) for command in line.split(" && ")]
    called = [
        re.fullmatch(r'(?:--mount=\S+ )?(?:[A-Z_]+="\$\{[A-Z_]+\}" )?\S*docker/(\w+\.sh)(?: \w+)*', step)
        for step in steps
    ]
    assert [match and match[1] for match in called] == [
        "system.sh", "user.sh", "system.sh", "install.sh", "project.sh", "bake.sh", "labels.sh",
    ]  # fmt: skip
    for script in DOCKER.glob("*.sh"):
        assert script.stat().st_mode & 0o111, script


def test_the_image_has_the_newest_lane() -> None:
    lane = series.releases(ROOT / "patches")[-1]
    assert re.findall(r"^ARG LANE=(.+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE) == [lane]
    (cuda,) = re.findall(r"^ARG CUDA=(\d+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert f"\nsglang=={lane} ;" in (DOCKER / f"lock/{lane}-cu{cuda}.txt").read_text()
    assert f"nvidia-nccl-cu{cuda}==" in (ROOT / f"lanes/{lane}.txt").read_text()


def test_no_digest_is_written_anywhere() -> None:
    """One that nobody looked up would be worse than none; the release fills it in."""
    for file in (DOCKER / "Dockerfile", *COMPOSE, DOCKER / "kubernetes.yaml", DOCKER / "build.sh"):
        assert not re.search(r"sha256:[0-9a-f]{8}", file.read_text()), file


def test_the_key_is_in_no_commit_and_no_image() -> None:
    """Where docs/image.md writes it, and compose looks for it."""
    for file in (".gitignore", ".dockerignore"):
        assert "docker/api_key" in [line.lstrip("/") for line in (ROOT / file).read_text().splitlines()], file


def test_what_is_copied_is_not_ignored() -> None:
    """.dockerignore lists what goes in, so a new folder that the wheel needs has to be added there."""
    kept = {
        line.removeprefix("!").split("/")[0]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    project = (ROOT / "pyproject.toml").read_text()
    wheel = project[project.index("[tool.hatch.build.targets.wheel]") : project.index("[tool.ruff]")]
    needed = {path.split("/")[0] for path in re.findall(r'"([\w./-]+)"', wheel) if (ROOT / path).exists()}
    assert needed | {"docker", "pyproject.toml", "README.md", "hatch_build.py"} <= kept
    assert {"python", "patches", "recipes", "sgl-kernel"} <= needed


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_schema(file: Path) -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)


def service(name: str) -> dict[str, Any]:
    (only,) = yaml.safe_load((DOCKER / name).read_text())["services"].values()
    return only


def served(arguments: list[str]) -> launch.Wanted:
    """What the container serves with this command, variables at their defaults."""
    words = [re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", word) for word in arguments]
    return launch.combine(launch.load(words[0]), words[1:], {"SGLANG_API_KEY": "k"})


def deployment() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()))
    (only,) = (document for document in documents if document["kind"] == "Deployment")
    return only


def container() -> dict[str, Any]:
    (only,) = deployment()["spec"]["template"]["spec"]["containers"]
    return only


def test_what_is_served() -> None:
    for arguments in (service("compose.yaml")["command"], container()["args"]):
        wanted = served(arguments)
        assert (wanted.tp, wanted.model, wanted.draft) == (8, "/models/Kimi-K2.5", "/models/kimi-k2.5-eagle3")
        assert wanted.keys
        assert wanted.extra[-2:] == ("--host", "0.0.0.0")
    wanted = served(service("compose.two-hosts.yaml")["command"])
    assert wanted.tp == 16
    named = dict(zip(wanted.extra[::2], wanted.extra[1::2], strict=True))
    assert named["--nnodes"] == "2"
    assert named["--host"] == "127.0.0.1"
    assert {"--node-rank", "--dist-init-addr"} <= named.keys()


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_hardening(file: Path) -> None:
    made = service(file.name)
    assert made["read_only"] is True
    assert made["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in made["security_opt"]
    assert made["secrets"] == ["api_key"]
    assert not [name for name in made["environment"] if name.endswith("API_KEY")], "keys come from a file"
    for port in made.get("ports", []):
        assert port.startswith("127.0.0.1:"), port
    assert made.get("ports") or made["network_mode"] == "host"
    (device,) = made["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 8, ["gpu"])


def test_kubernetes() -> None:
    for document in yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    made = container()
    assert made["securityContext"]["readOnlyRootFilesystem"] is True
    assert made["resources"]["limits"]["nvidia.com/gpu"] == "8"
    mounted = {mount["mountPath"] for mount in made["volumeMounts"]}
    assert {"/tmp", "/cache", "/dev/shm", "/models"} <= mounted


def test_the_key_is_readable_for_the_servers_group_and_not_for_others() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"] == 10001


def test_kubernetes_on_storage_without_fsgroup() -> None:
    """The patch, merged as `kubectl patch` does, is a whole deployment; its container can do that and no more."""
    made, change = deployment(), yaml.safe_load((DOCKER / "kubernetes.own-cache.yaml").read_text())
    pod, added = made["spec"]["template"]["spec"], change["spec"]["template"]["spec"]
    assert added.keys() == {"initContainers"}
    pod |= added
    kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)
    (only,) = added["initContainers"]
    assert only["image"] == container()["image"]
    assert only["securityContext"] == {
        "runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False, "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
    }  # fmt: skip
    (mount,) = only["volumeMounts"]
    assert mount in container()["volumeMounts"]
    assert only["args"] == [mount["mountPath"], str(pod["securityContext"]["runAsUser"])]
    (file,) = only["command"]
    assert re.search(rf"^COPY .*docker/{Path(file).name}.* /opt/sglang-patches/docker/$",
                     (DOCKER / "Dockerfile").read_text(), re.MULTILINE)  # fmt: skip


def test_user_and_folders_are_the_same_everywhere() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert "user.sh 10001" in dockerfile
    assert "USER 10001:10001" in dockerfile
    assert "runAsUser: 10001" in (DOCKER / "kubernetes.yaml").read_text()
    for file in COMPOSE:
        mounted = {entry.split(":")[-2 if entry.endswith(":ro") else -1] for entry in service(file.name)["volumes"]}
        assert mounted == {"/models", "/cache"}
