"""Makes a folder of patches: the real series, and after it patches that are planted to be found.

python test/e2e/plants/lane.py FOLDER      # then SGLANG_PATCHES_DIR=FOLDER PYTHONPATH=test/bench/plants ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_patches import hunks, series, upstream

FILE = "sglang/srt/speculative/eagle_worker_v2.py"
# Patch -> its decorator in `bench_plants`; in this order in the series, after the real ones.
PLANTS = {
    "plant-slow": "slow_alone",
    "plant-left": "slow_left",
    "plant-right": "slow_right",
}


def make(folder: Path, plants: dict[str, str] | None = None) -> None:
    """Write the lane of the installed release to `folder`; all plants are off by default."""
    installed = upstream.locate()
    assert installed is not None
    real = series.load(installed.release)
    lane = folder / installed.release
    lane.mkdir(parents=True)
    for patch in real.patches:
        (lane / patch.file.name).symlink_to(patch.file.resolve())
    data = installed.read(FILE)
    assert data is not None
    lines = data.decode().split("\n")
    imports = next(at for at, line in enumerate(lines) if line.startswith("from sglang."))
    verify = next(at for at, line in enumerate(lines) if line.startswith("    def verify("))
    chosen = PLANTS if plants is None else plants
    for name, decorator in chosen.items():
        added = (
            hunks.Insertion(imports, (b"import bench_plants",)),
            hunks.Insertion(verify, (f"    @bench_plants.{decorator}".encode(),)),
        )
        header = (
            f"Description: Planted: {decorator}\nWhy: ours\nForwarded: no\nRemove-When: never\nDefault: off\n"
            f"Last-Update: 2026-11-30\nPre-Image: {upstream.digest(data)} {FILE}\n\n"
        )
        (lane / f"{name}.patch").write_bytes(header.encode() + hunks.render(FILE, added))
    names = [patch.name for patch in real.patches] + list(chosen)
    (lane / "series").write_text("".join(f"{name}.patch\n" for name in names))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
