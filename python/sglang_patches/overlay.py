"""Upstream file + enabled patches -> patched file, and the import specs that lead to it."""

from __future__ import annotations

import logging
import os
import threading
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import current_process
from types import CodeType, ModuleType
from typing import Any, NoReturn

from sglang_patches import cache, hunks, import_path, upstream
from sglang_patches.errors import PatchError, ProcessStop
from sglang_patches.selection import cuda_driver_loads, is_none, select
from sglang_patches.series import Patch, load
from sglang_patches.upstream import Upstream, digest

logger = logging.getLogger("sglang_patches")


class Overlay:
    """The selected patches on one installed upstream.

    Attributes:
        on: the patches that are on, in series order.
        by_path: upstream path to the enabled patches that touch it, in series order.
        by_module: module name to upstream path.
    """

    def __init__(self, installed: Upstream, on: tuple[Patch, ...]) -> None:
        self.upstream = installed
        self.on = on
        self.by_path: dict[str, list[Patch]] = {}
        for patch in on:
            for path in patch.touches:
                self.by_path.setdefault(path, []).append(patch)
        self.by_module = {module_name(path): path for path in self.by_path}
        self.provides = {name: package for patch in on for name, package in patch.provides.items()}
        self._announced = False

    @classmethod
    def from_environment(cls) -> Overlay | None:
        """The overlay that `SGLANG_PATCHES` asks for, with every pre-image checked; None where SGLang is missing.

        Raises:
            PatchError: the selection, the series or the installed upstream does not allow it.
        """
        if is_none(os.environ.get("SGLANG_PATCHES", "")):
            return None
        installed = upstream.locate()
        if installed is None:
            return None
        overlay = cls(installed, select(load(installed.release)))
        for path in overlay.by_path:
            overlay.check(path, installed.read(path), installed.path(path))
        return overlay

    @cached_property
    def patch_set(self) -> dict[str, Any]:
        """See `provenance.patch_set`; as of when this process first asked, whatever is on disk later."""
        from sglang_patches import provenance

        return provenance.patch_set(self.upstream.release, self.on)

    def check(self, path: str, data: bytes | None, file: str) -> bytes:
        """Return an upstream file's bytes if they are what every enabled patch was made against; else raise."""
        for patch in self.by_path[path]:
            expected = patch.pre_images[path]
            found = digest(data) if data is not None else "(no such file)"
            if found != expected:
                release = self.upstream.release
                raise PatchError(
                    f"{path} is not the file that patch {patch.name} was made against, so nothing was patched\n"
                    f"  file       {file}\n"
                    f"  expected   {expected}  (pinned: sglang {patch.file.parent.name})\n"
                    f"  found      {found}  (installed: sglang {release})\n"
                    f"  remedy     restore upstream: pip install --force-reinstall --no-deps sglang=={release}; "
                    f"or run without patches: SGLANG_PATCHES=none; `sglang-patches status` shows every patch"
                )
        assert data is not None  # at least one patch touches the file, and its pre-image is a file
        return data

    def patched(self, path: str, data: bytes) -> bytes:
        """The patched content of one upstream file, whose bytes are `data`."""
        return hunks.apply(data, hunks.combine(patch.insertions[path] for patch in self.by_path[path]), path)

    def store(self, path: str, data: bytes | None, file: str) -> str:
        """The patched copy in the cache of one upstream file, whose bytes are `data`; written where it is not there.

        Raises:
            PatchError: the file is not what the patches were made against, or no folder takes the copy.
        """
        checked = self.check(path, data, file)
        return cache.store(self._key(path), path, self.patched(path, checked), self.upstream.path(path), checked)

    def missing(self, folder: str) -> list[str]:
        """Upstream paths whose patched copies are not in a cache folder, or not as they have to be.

        Raises:
            PatchError: an installed file is not what the patches were made against.
        """
        lacking = []
        for path in self.by_path:
            original = self.upstream.path(path)
            data = self.check(path, self.upstream.read(path), original)
            if not cache.holds(folder, self._key(path), path, self.patched(path, data), original, data):
                lacking.append(path)
        return lacking

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Spec of a patched or provided module; None for every other, which the next finder then loads."""
        package = self.provides.get(fullname)
        if package is not None:
            return None if cuda_driver_loads() else self._provided(fullname, package)
        relative = self.by_module.get(fullname)
        if relative is None:
            return None
        found = upstream.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        try:
            with open(found.origin, "rb") as file:
                copy = self.store(relative, file.read(), found.origin)
        except PatchError as error:
            return refusal(fullname, error)
        return spec_from_file_location(
            fullname,
            copy,
            loader=PatchedLoader(fullname, copy, self),
            submodule_search_locations=found.submodule_search_locations,
        )

    def announce(self) -> None:
        """Log the patch-set id, once a process."""
        if self._announced:
            return
        self._announced = True
        state = self.patch_set
        names = ", ".join(patch.name for patch in self.on)
        # Patched modules are imported before an application sets up logging: say it on stderr then, not nowhere.
        handler = logging.StreamHandler() if not logger.hasHandlers() else None
        if handler:
            handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
            logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            logger.info("patch set %s on sglang %s, pid %d: %s", state["id"], state["release"], os.getpid(), names)
            # Once a server: spawned workers have the same path. They know their name first, and their parent too late.
            if current_process().name == "MainProcess":
                for folder, reason in import_path.of_this_process().items():
                    logger.warning(
                        "modules are looked for in %s first, and %s: another user can replace any of this server's; "
                        "start it with PYTHONSAFEPATH=1 and without that folder on PYTHONPATH, or by "
                        "`sglang-patches launch`",
                        folder,
                        reason,
                    )
        finally:
            logger.setLevel(level)
            if handler:
                logger.removeHandler(handler)

    def _key(self, path: str) -> str:
        parts = [f"{patch.pre_images[path]} {patch.name} {patch.insertions[path]}" for patch in self.by_path[path]]
        return digest("\n".join(parts).encode())[:16]

    def _provided(self, fullname: str, package: str) -> ModuleSpec:
        found = upstream.find_spec(package)
        if found is None or found.origin is None:
            return refusal(
                fullname,
                PatchError(
                    f"a patch provides {fullname} as {package}, which is not installed\n"
                    f"  remedy     reinstall sglang-patches, or switch the patch off: `sglang-patches list`"
                ),
            )
        spec = spec_from_file_location(
            fullname, found.origin, submodule_search_locations=found.submodule_search_locations
        )
        assert spec is not None
        return spec


class PatchedLoader(SourceFileLoader):
    """Loads a patched copy as the plain file it is, and logs the patch set with the first one."""

    def __init__(self, fullname: str, path: str, overlay: Overlay) -> None:
        super().__init__(fullname, path)
        self.overlay = overlay

    def exec_module(self, module: ModuleType) -> None:
        self.overlay.announce()
        super().exec_module(module)


class RefusingLoader:
    """Loader of a module that must not run: executing it ends the process with the reason."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def create_module(self, spec: ModuleSpec) -> None:
        """Default module creation."""

    def exec_module(self, module: ModuleType) -> NoReturn:
        self._stop()

    def get_code(self, fullname: str) -> CodeType:
        self._stop()

    def is_package(self, fullname: str) -> bool:
        return False

    def _stop(self) -> NoReturn:
        message = f"sglang-patches: {self.error}"
        if threading.current_thread() is not threading.main_thread():
            logger.critical("%s", message)  # a SystemExit ends other threads without a word
        raise ProcessStop(message) from self.error


def refusal(fullname: str, error: Exception) -> ModuleSpec:
    """A spec whose execution stops the process with `error`."""
    return ModuleSpec(fullname, RefusingLoader(error))  # type: ignore[arg-type]  # duck-typed, as importlib takes it


def module_name(path: str) -> str:
    """Module of an upstream path: `sglang/srt/utils/__init__.py` is `sglang.srt.utils`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
