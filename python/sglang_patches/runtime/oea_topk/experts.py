"""How many different experts layers load under the rule, and would load without it (``SGLANG_PATCHES_OEA_COUNT=on``).

Only the device knows, so it counts there, in the layer's own launch, captured graphs included, and is read when
somebody asks: nothing waits in a forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_patches.runtime import _metrics
from sglang_patches.runtime.oea_topk.settings import PHASES

# Places of a phase's counts.
LOADED, UPSTREAM, LAYERS = range(3)
# Between two readings for metrics; each is a copy of a few bytes.
_EVERY_S = 1.0


class Experts:
    """The counts of one process: of each phase, int64 on the device that chooses.

    Each is added up over layers and passes in which the rule held: different experts of the batch's real tokens, those
    that upstream's top-k would have had, and how many layers that were.

    They only grow. What start-up's forwards came to before `begin` is kept beside them and taken off, not set to zero:
    a copy of them may be under way, on another stream.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[torch.device, torch.Tensor] = {}
        self._places: dict[tuple[torch.device, str], torch.Tensor] = {}
        # What was there at `begin`, and an event behind its copy; no event on a CPU.
        self._before: dict[torch.device, tuple[torch.Tensor, Any]] = {}
        self._copies: dict[torch.device, tuple[torch.Tensor, Any]] = {}
        self._known: dict[torch.device, list[list[int]]] = {}
        self._next = 0.0
        self._begun = False
        self._experts = _metrics.Exported(_metrics.OEA_EXPERTS)
        self._layers = _metrics.Exported(_metrics.OEA_LAYERS)

    def place(self, device: torch.device, phase: str, capturing: bool) -> torch.Tensor | None:
        """Where a layer counts, int64 ``[3]``; None where there is none yet and it would belong to a graph."""
        place = self._places.get((device, phase))
        if place is None and not capturing:
            counts = self._counts[device] = torch.zeros(len(PHASES), 3, dtype=torch.int64, device=device)
            self._places |= {(device, name): counts[at] for at, name in enumerate(PHASES)}
            place = self._places[device, phase]
        return place

    def begin(self) -> None:
        """The first captured graph is about to run, or the first step was served: what was counted until now were
        start-up's forwards. Waits for nothing."""
        if self._begun:
            return
        self._begun = True
        for device, counts in self._counts.items():
            before, done = counts.clone(), None
            if device.type != "cpu":
                done = torch.cuda.Event()
                done.record()
            self._before[device] = before, done

    def figures(self) -> dict[str, dict[str, int]]:
        """By phase, as they are now. Waits for what is queued on the current stream, so it is for ``/server_info``."""
        for _, done in self._before.values():
            if done is not None:
                done.synchronize()
        return dict(_named([self._since(device).tolist() for device in self._counts]))

    def export(self, labels: Any) -> None:
        """Bring the metrics up to date, a second behind: waits for nothing. The first call only begins.

        Args:
            labels: upstream's own, from its metrics collector.
        """
        self.begin()
        if not self._counts or self._clock() < self._next:
            return
        self._next = self._clock() + _EVERY_S
        self._read()
        for phase, told in _named(list(self._known.values())):
            self._experts.export([((phase, name), told[name]) for name in ("loaded", "upstream")], labels)
            self._layers.export([((phase,), told["layers"])], labels)

    def _since(self, device: torch.device) -> torch.Tensor:
        """The counts since `begin`."""
        counts = self._counts[device]
        return counts - self._before[device][0] if device in self._before else counts

    def _read(self) -> None:
        """What the last copy brought, and the next copy."""
        for device, counts in self._counts.items():
            if device.type == "cpu":
                self._known[device] = self._since(device).tolist()
                continue
            if device in self._before and not self._before[device][1].query():
                continue  # it is on the stream of forwards, this is on another
            if device not in self._copies:
                self._copies[device] = (
                    torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True),
                    torch.cuda.Event(),
                )
            else:
                if not self._copies[device][1].query():
                    continue
                self._known[device] = self._copies[device][0].tolist()
            copy, done = self._copies[device]
            copy.copy_(self._since(device), non_blocking=True)
            done.record()


def _named(devices: list[list[list[int]]]) -> Iterator[tuple[str, dict[str, int]]]:
    """Phases that were counted, of all devices together."""
    for at, phase in enumerate(PHASES):
        sums = [sum(counts[at][place] for counts in devices) for place in range(3)]
        if sums[LAYERS]:
            yield phase, {"loaded": sums[LOADED], "upstream": sums[UPSTREAM], "layers": sums[LAYERS]}
