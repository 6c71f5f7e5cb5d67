"""One patch carried to another upstream release: an outcome for each hunk, one for the patch, and the new file."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from sglang_patches import editing, hunks
from sglang_patches.errors import PatchError
from sglang_patches.port import place, scopes, upstreamed
from sglang_patches.port.place import Found, Lost
from sglang_patches.port.scopes import Spot
from sglang_patches.port.wheels import Wheel
from sglang_patches.series import Patch
from sglang_patches.upstream import digest

Outcome = Literal["clean", "moved", "upstreamed", "conflict", "target gone"]
# The worst of its hunks is the patch's, except that what upstream has need not be carried at all.
RANK: tuple[Outcome, ...] = ("clean", "moved", "conflict", "target gone", "upstreamed")
CARRIED: tuple[Outcome, ...] = ("clean", "moved")


@dataclass(frozen=True)
class Hunk:
    """What became of one hunk.

    Attributes:
        path, new_path: the file in the old and in the new release; they differ where the file was renamed.
        hunk: as in the patch; its `after` is the old place.
        after: the new place; None where there is none.
        near: line of the new file to look at where there is no place; 0 for none.
        old_spot, new_spot: class and function, or what is decorated.
        detail: why, in words.
    """

    outcome: Outcome
    path: str
    new_path: str
    hunk: hunks.Insertion
    after: int | None
    old_spot: Spot | None = None
    new_spot: Spot | None = None
    detail: str = ""
    near: int = 0
    shown: upstreamed.Upstreamed | None = None


@dataclass(frozen=True)
class Ported:
    """What became of one patch; `data` is the new patch file, None where it was not carried."""

    patch: Patch
    outcome: Outcome
    hunks: tuple[Hunk, ...]
    data: bytes | None
    upstreamed: tuple[upstreamed.Upstreamed, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def failed(self) -> list[Hunk]:
        """The hunks that have no place."""
        return [hunk for hunk in self.hunks if hunk.after is None]


@dataclass
class Carrier:
    """Carries patches from `old` to `new`; `needs` names what a patch's own code lacks in a release."""

    old: Wheel
    new: Wheel
    needs: Callable[[Patch, Wheel], Iterable[str]] = lambda patch, release: ()
    _files: dict[tuple[str, str], bytes | None] = field(default_factory=dict, init=False)

    def carry(self, patch: Patch) -> Ported:
        """Carry one patch.

        Raises:
            PatchError: it was not made for the old release.
        """
        found: list[Hunk] = []
        for path, insertions in patch.insertions.items():
            data = self._read(self.old, path)
            if data is None or digest(data) != patch.pre_images[path]:
                raise PatchError(
                    f"{patch.name} was not made for sglang {self.old.release}\n"
                    f"  file       {path}\n"
                    f"  expected   {patch.pre_images[path]}  (its Pre-Image)\n"
                    f"  found      {digest(data) if data is not None else '(no such file)'}\n"
                    f"  remedy     name the release it was made for with --from; `sglang-patches verify` checks a lane"
                )
            found += self._file(path, data, insertions)
        files = {path: self._read(self.new, path) for path, _ in patch.adds}
        shown = [hunk.shown for hunk in found if hunk.shown]
        shown += upstreamed.declared(patch.adds, *(self._present(release, files) for release in (self.old, self.new)))
        outcome = max((hunk.outcome for hunk in found), key=RANK.index)
        outcome = "upstreamed" if shown else outcome
        data = None
        if outcome in CARRIED:
            data = self._assemble(patch, found)
        return Ported(
            patch=patch,
            outcome=outcome,
            hunks=tuple(found),
            data=data,
            upstreamed=tuple(shown),
            notes=tuple(dict.fromkeys(note for hunk in found if (note := self._changed_signature(hunk)))),
            missing=tuple(self.needs(patch, self.new)),
        )

    def _read(self, release: Wheel, path: str) -> bytes | None:
        key = release.release, path
        if key not in self._files:
            self._files[key] = release.read(path)
        return self._files[key]

    def _present(self, release: Wheel, paths: Iterable[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths:
            data = self._read(release, path)
            with contextlib.suppress(SyntaxError, ValueError):
                found |= {path: data} if data is not None and scopes.parse(data) else {}
        return found

    def _file(self, path: str, old: bytes, insertions: hunks.Insertions) -> list[Hunk]:
        """All hunks of one file, which compiles with them or is a conflict."""
        new_path, reason = path, ""
        new = self._read(self.new, path)
        if new is None:
            new_path, reason = self._renamed(path, old, insertions)
            new = self._read(self.new, new_path) if new_path else None
        if new is None:
            return [Hunk("target gone", path, path, hunk, None, detail=reason) for hunk in insertions]
        try:
            for data in (old, new):
                scopes.parse(data)
        except (SyntaxError, ValueError) as error:
            detail = f"this interpreter does not read {new_path}: {error}"
            return [Hunk("conflict", path, new_path, hunk, None, detail=detail) for hunk in insertions]
        results = [self._hunk(path, new_path, old, new, hunk) for hunk in insertions]
        results = [self._bound(result, old, new) for result in results]
        results = self._imported(results, new)
        try:
            text = hunks.apply(new, combined(results), new_path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's own
                compile(text, new_path, "exec", dont_inherit=True)
        except (PatchError, SyntaxError, ValueError) as error:
            detail = f"{new_path} does not compile with it: {error}"
            return [result if result.after is None else self._failed(result, detail) for result in results]
        return results

    def _hunk(self, path: str, new_path: str, old: bytes, new: bytes, hunk: hunks.Insertion) -> Hunk:
        spot = self._spot(old, hunk)
        found = place.find(old, new, hunk)
        shown = upstreamed.by_lines(old, new, hunk, spot, new_path)
        if isinstance(found, Lost):
            outcome: Outcome = "upstreamed" if shown else "target gone" if found.gone else "conflict"
            return Hunk(outcome, path, new_path, hunk, None, spot, None, found.reason, found.near, shown)
        same = found.how in ("unchanged", "merge") and found.spot == spot and path == new_path
        outcome = "upstreamed" if shown else "clean" if same else "moved"
        return Hunk(outcome, path, new_path, hunk, found.after, spot, found.spot, _how(found, spot), 0, shown)

    def _spot(self, old: bytes, hunk: hunks.Insertion) -> Spot:
        return place.spot_of(scopes.parse(old), hunks.split_lines(old), hunk)

    def _failed(self, result: Hunk, detail: str) -> Hunk:
        outcome = result.outcome if result.outcome == "upstreamed" else "conflict"
        return Hunk(
            outcome,
            result.path,
            result.new_path,
            result.hunk,
            None,
            result.old_spot,
            result.new_spot,
            detail,
            result.after or 0,
            result.shown,
        )

    def _bound(self, result: Hunk, old: bytes, new: bytes) -> Hunk:
        """The hunk, or a conflict where a name it reads was known at its old place and is not at the new one."""
        if old == new or result.old_spot is None or result.new_spot is None or result.after is None:
            return result
        here, there = scopes.parse(old), scopes.parse(new)
        read = scopes.read_by(scopes.statements(result.hunk.lines))
        known = there.bound(result.new_spot.scope, result.after)
        lost = (read & here.bound(result.old_spot.scope, result.hunk.after)) - known
        if not lost:
            return result
        names = ", ".join(sorted(lost))
        return self._failed(result, f"{names} has no value yet, or none any more, at the place in {result.new_spot}")

    def _imported(self, results: list[Hunk], new: bytes) -> list[Hunk]:
        """The hunks, and a conflict where one that runs as the module is imported is above its import now."""
        imports = [
            (result.after, scopes.bound_by(scopes.statements(result.hunk.lines)))
            for result in results
            if result.after is not None and place.is_import(result.hunk)
        ]
        checked = []
        for result in results:
            spot, after = result.new_spot, result.after
            if after is not None and spot is not None and scopes.parse(new).runs_at_import(spot.scope):
                read = scopes.read_by(scopes.statements(result.hunk.lines), bodies=False)
                late = sorted({name for line, names in imports if line > after for name in names & read})
                if late:
                    result = self._failed(result, f"it uses {', '.join(late)} above the import of it")
            checked.append(result)
        return checked

    def _renamed(self, path: str, old: bytes, insertions: hunks.Insertions) -> tuple[str, str]:
        """The one file of the new release that has every class and function the hunks are in, or '' and why not."""
        spots = [self._spot(old, hunk) for hunk in insertions]
        wanted = {name for spot in spots if (name := spot.decorates or spot.scope)}
        gone = f"sglang {self.new.release} has no {path}"
        if not wanted:
            return "", gone
        alike = [entry for entry in self._candidates(wanted) if wanted <= self._defined(entry)]
        fresh = [entry for entry in alike if self._read(self.old, entry) is None]
        if len(fresh) == 1:
            return fresh[0], ""
        hint = f"; {', '.join(sorted(wanted))}: now in {', '.join(alike[:3])}" if alike else ""
        return "", gone + hint

    def _candidates(self, wanted: set[str]) -> Iterator[str]:
        """Files of the new release whose text has every name: parsing all of them takes a quarter of a minute."""
        words = [name.rpartition(".")[2].encode() for name in wanted]
        for path in self._new_modules:
            data = self._read(self.new, path) or b""
            if all(b"def " + word in data or b"class " + word in data for word in words):
                yield path

    @cached_property
    def _new_modules(self) -> list[str]:
        return [path for path in self.new.modules() if path.startswith("sglang/srt/")]

    def _defined(self, path: str) -> set[str]:
        try:
            return {scope.name for scope in scopes.parse(self._read(self.new, path) or b"").scopes}
        except (SyntaxError, ValueError):
            return set()

    def _changed_signature(self, hunk: Hunk) -> str:
        """A remark where what the hunk is in, or decorates, takes other parameters now."""
        if hunk.after is None or hunk.old_spot is None or hunk.new_spot is None:
            return ""
        names = (hunk.old_spot.decorates or hunk.old_spot.scope, hunk.new_spot.decorates or hunk.new_spot.scope)
        old, new = self._read(self.old, hunk.path) or b"", self._read(self.new, hunk.new_path) or b""
        if old == new or not all(names):
            return ""
        before, after = (
            [scopes.signature(scope.node) for scope in scopes.parse(data).named(name)]
            for data, name in zip((old, new), names, strict=True)
        )
        if before == after:
            return ""
        return f"{names[1]} takes other parameters: ({' | '.join(before)}) -> ({' | '.join(after)})"

    def _assemble(self, patch: Patch, found: list[Hunk]) -> bytes:
        by_path: dict[str, list[Hunk]] = {}
        for hunk in found:
            by_path.setdefault(hunk.new_path, []).append(hunk)
        files = {path: (self._read(self.new, path) or b"", combined(group)) for path, group in by_path.items()}
        return editing.assemble(patch.header, files, patch.file)


def combined(results: Iterable[Hunk]) -> hunks.Insertions:
    """The carried hunks of one file at their new places; two that came together keep their order."""
    return hunks.combine((result.hunk._replace(after=result.after),) for result in results if result.after is not None)


def _how(found: Found, before: Spot) -> str:
    if found.spot != before:
        return f"{before} is {found.spot} now"
    return {"imports": "behind the imports", "scope": "beside the same lines"}.get(found.how, "")
