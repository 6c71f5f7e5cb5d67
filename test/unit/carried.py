"""A patch on a small upstream, carried to what a test makes of that upstream."""

from __future__ import annotations

from pathlib import Path

from sglang_patches import hunks
from sglang_patches.port import report
from sglang_patches.port.carry import Carrier, Ported
from sglang_patches.series import Patch, parse_patch

from .upstreams import NEW, OLD, PATH, TEXT, behind, make_patch, make_wheel

IMPORT = "from sglang_patches.runtime import a_patch\n"
HOOK = "        a_patch.started(self, port)\n"
BODY = "        self.port = port\n"
START = "    def start(self, port):\n"
HOOKED = behind(behind(TEXT, "from sglang.srt import other\n", IMPORT), BODY, HOOK)


class Ports:
    """Carries a patch from `TEXT` to what a test makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.turn = 0

    def __call__(
        self,
        new: str | None,
        edited: str = HOOKED,
        header: str = "",
        more: dict[str, str] | None = None,
    ) -> Ported:
        old_files = {PATH: TEXT, "sglang/srt/other.py": "X = 1\n"}
        new_files = {**old_files, **({} if new is None else {PATH: new}), **(more or {})}
        if new is None:
            del new_files[PATH]
        self.patch = make_patch({PATH: edited}, old_files, header=header)
        self.turn += 1
        folder = self.folder / str(self.turn)  # a wheel that is open is not written anew
        self.carrier = Carrier(make_wheel(folder, OLD, old_files), make_wheel(folder, NEW, new_files))
        self.new_files = new_files
        return self.carrier.carry(self.patch)

    def result(self, ported: Ported) -> str:
        """The new release's file with the carried patch."""
        patch = self.written(ported)
        (path,) = patch.insertions
        return hunks.apply(self.new_files[path].encode(), patch.insertions[path], path).decode()

    def written(self, ported: Ported) -> Patch:
        assert ported.data is not None
        return parse_patch(ported.data, self.patch.file)

    def text(self, ported: Ported) -> str:
        return report.text(self.carrier, [ported])
