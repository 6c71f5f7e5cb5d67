"""A host without what says which machine and whose it is: for files and output that leave the machine."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Any

from sglang_patches.doctor.host import Host
from sglang_patches.document.secrets import MASK

# As CUDA_VISIBLE_DEVICES may have them, cut short or for a part of a GPU.
_UUID = re.compile(r"\b(MIG-GPU|MIG|GPU)-[0-9a-f][0-9a-f/-]*(?!\w)", re.IGNORECASE)
_SHARED_HOMES = ("/", "/root")
# The other fields are one of a few words, numbers, or names of GPUs and patches.
_TOLD = {
    "environment", "unread", "import_path", "container", "cuda_problem", "patch_problem", "nccl", "kernels", "serving",
}  # fmt: skip


def unnamed(host: Host, machine: str | None = None, home: str | None = None) -> Host:
    """`host` without UUIDs of GPUs and the machine's name (both ``***``), with ``~`` for the user's home folder.

    Args:
        machine, home: in place of this machine's name and this user's home folder.
    """
    machine = socket.gethostname() if machine is None else machine
    home = os.path.expanduser("~") if home is None else home
    names = sorted({machine, machine.partition(".")[0]} - {"", "localhost"}, key=len, reverse=True)
    # Not within a longer word: a machine may be called `a100`.
    name = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])") if names else None
    folder = re.compile(rf"{re.escape(home.rstrip('/'))}(?![^/:,\s'\"])") if home not in _SHARED_HOMES else None

    def places(text: str) -> str:
        text = _UUID.sub(rf"\1-{MASK}", text)
        return folder.sub("~", text) if folder else text

    def told(value: Any) -> Any:
        if isinstance(value, str):
            text = places(value)
            return name.sub(MASK, text) if name else text
        if isinstance(value, list):
            return [told(entry) for entry in value]
        if isinstance(value, dict):  # keys are variables, packages and folders
            return {places(key): told(entry) for key, entry in value.items()}
        return value

    data = json.loads(host.to_json())
    for field in _TOLD & data.keys():
        data[field] = told(data[field])
    if "absent" in data.get("topology", {}):
        data["topology"]["absent"] = told(data["topology"]["absent"])
    return Host.from_json(json.dumps(data))
