"""Measures on one GPU, in a process of its own: ``python -m sglang_patches.tune.moe.worker PLAN FILE LABEL``.

Stages, each taking what is left of the seconds of the plan: compile and *screen* everything at three token counts, then
the best with TMA and other group sizes; *final*: at each token count the best of its neighbours in interleaved rounds,
checked against float32; *layer*: the winners inside the whole layer, beside upstream's choice.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_patches import upstream
from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import builds, choose, journal, layer, space, tables, timing
from sglang_patches.tune.moe.geometry import GEMMS, Gemm, Geometry, from_document
from sglang_patches.tune.moe.journal import Known, Record
from sglang_patches.tune.moe.kernel import Experts
from sglang_patches.tune.moe.space import Config
from sglang_patches.tune.moe.tables import Row

#: Exit code: a kernel left the GPU's context unusable; start again, and what ran last counts as failed.
RESTART = 3
# Ends of the stages, as shares of the time; final and layer always have their least rounds.
_COMPILED, _SCREENED, _TWINS_COMPILED, _TWINS, _FINAL = 0.42, 0.60, 0.70, 0.75, 0.90
_LEAST_ROUNDS, _ROUNDS, _LAYER_ROUNDS = 3, 7, 9
_REPLAYS = 3
_TWINNED, _FINALISTS = 8, 6
_MEMORY = 0.6  # of what is free, for weights


@dataclass(frozen=True)
class Plan:
    """What is measured; `seconds` may differ when a run goes on."""

    geometry: Geometry
    tokens: tuple[int, ...]
    layers: int
    seed: int
    seconds: float
    candidates: int = 0  # at most so many of each screen, by chance; 0: all

    def record(self) -> Record:
        """What must be the same for samples to belong together."""
        return {
            "record": "plan", "format": journal.FORMAT, "geometry": self.geometry.document(),
            "tokens": list(self.tokens), "seed": self.seed, "candidates": self.candidates,
        }  # fmt: skip


def read_plan(text: str) -> Plan:
    """From the command line."""
    told = json.loads(text)
    return Plan(
        from_document(told["geometry"]), tuple(told["tokens"]), told["layers"], told["seed"], told["seconds"],
        told["candidates"],
    )  # fmt: skip


def place(cuda: bool) -> dict[str, str]:
    """Where this process measures, by the names in `journal.PLACE`."""
    import triton

    installed = upstream.locate()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "triton": triton.__version__,
        "sglang": installed.release if installed else "none",
    }


class Worker:
    """The stages, and what they share."""

    def __init__(self, plan: Plan, file: Path, label: str) -> None:
        self.plan, self.file, self.label = plan, file, label
        self.begun = time.monotonic()
        self._told = 0.0
        geometry = plan.geometry
        self.cuda = torch.cuda.is_available()
        self.place = place(self.cuda)
        journal.check_place(file.parent, self.place)
        # Interpreted on a CPU, to try the flow, a call takes a hundred milliseconds and says nothing.
        self.replays, self.rounds, self.layer_rounds = (_REPLAYS, _ROUNDS, _LAYER_ROUNDS) if self.cuda else (1, 2, 2)
        device = torch.device("cuda" if self.cuda else "cpu")
        self.pool = builds.Pool(geometry, builds.processes() if self.cuda else 0)
        layer.publish()
        self.device = timing.device()
        self.experts = Experts(geometry, device, self._layers(), plan.seed)
        records = journal.read(file)
        if not journal.check_plan(file, records, plan.record()):
            journal.append(file, plan.record())
        self.known = Known(records)
        self._facts()
        gc.freeze()  # a capture collects garbage, among millions of objects of imports

    def _layers(self) -> int:
        """As many as asked for, of those that memory holds."""
        if not self.cuda:
            return self.plan.layers
        one = sum(self.plan.geometry.experts * self.plan.geometry.expert_bytes(gemm) for gemm in GEMMS)
        fit = int(torch.cuda.mem_get_info()[0] * _MEMORY / one)
        if fit < 1:
            free = torch.cuda.mem_get_info()[0]
            raise SystemExit(
                f"sglang-patches: experts of one layer take {one / 1e9:.1f} GB and this GPU has {free / 1e9:.1f} free\n"
                "  remedy     stop what runs on it, or tune a rank of a larger --tp"
            )
        return min(self.plan.layers, fit)

    def _facts(self) -> None:
        with layer.tables_from(None):
            own = layer.own_keys(self.experts)
            kept = tables.beyond(self.plan.tokens[-1], self.plan.geometry.experts, own)
            takes = {at: layer.looked_up(self.experts, at) for at in (*self.plan.tokens, *kept)}
        self.upstream = {at: takes[at] for at in self.plan.tokens}
        facts: Record = {
            "record": "facts",
            **self.place,
            "multiprocessors": self.device.multiprocessors,
            "bandwidth": self.device.bandwidth,
            "layers": self.experts.layers,
            "torch": torch.__version__,
            "names": layer.file_names(self.experts),
            "upstream_table": bool(own),
            "upstream": {str(at): {gemm: str(row[gemm]) for gemm in GEMMS} for at, row in self.upstream.items()},
            "beyond": {str(at): {gemm: str(takes[at][gemm]) for gemm in GEMMS} for at in kept},
        }
        journal.append(self.file, facts)
        self.known.add(facts)

    def until(self, share: float) -> float:
        """When a stage ends, on the clock of `time.monotonic`."""
        return self.begun + self.plan.seconds * share

    def say(self, what: str, done: int, total: int, at_once: bool = False) -> None:
        """A line of progress, every two seconds."""
        now = time.monotonic()
        if at_once or now - self._told > 2 or done == total:
            self._told = now
            left = max(self.plan.seconds - (now - self.begun), 0)
            print(f"{self.label}{what}: {done}/{total}, at most {left:.0f} s left", file=sys.stderr, flush=True)

    def append(self, record: Record) -> None:
        """Keep a record, on disk and here."""
        record = journal.timed(record)
        journal.append(self.file, record)
        self.known.add(record)

    def fail(self, gemm: Gemm, tokens: int, config: Config, why: str) -> None:
        """Take a configuration out."""
        self.append({"record": "failed", "gemm": gemm, "tokens": tokens, "config": str(config), "why": why})

    def bad(self, gemm: Gemm, config: Config) -> str:
        """Why a configuration is out; empty where it is not."""
        return self.known.bad(gemm, config, choose.TOLERANCE[self.plan.geometry.dtype])

    def build(self, items: list[builds.Item], share: float, what: str) -> set[builds.Item]:
        """Compile; returns what is ready."""
        ready = set()
        for item, why in self.pool.build(items, self.until(share), lambda *n: self.say(f"compile {what}", *n)).items():
            gemm, config, tokens = item
            if not why:
                ready.add(item)
            elif not self.bad(gemm, config):
                self.fail(gemm, tokens, config, why)
        return ready

    def replay(self, gemm: Gemm, config: Config, tokens: int) -> timing.Replay:
        """The graph of one configuration: all draws of the batch size, each on the next layer's weights."""
        geometry = self.plan.geometry
        a_call = geometry.active(tokens) * geometry.expert_bytes(gemm)
        works = self.experts.works(tokens, config.block_m, timing.calls_for(a_call, self.device.l2))
        out = self.experts.output(gemm, tokens)
        return timing.capture(
            [partial(self.experts.call, gemm, config, work, out, at) for at, work in enumerate(works)]
        )

    def try_(self, gemm: Gemm, config: Config, tokens: int) -> timing.Replay | None:
        """`replay`, or None where it cannot run, which is kept."""
        try:
            return self.replay(gemm, config, tokens)
        except Exception as error:  # of the compiler, the launcher or the kernel
            self.fail(gemm, tokens, config, builds.said(error))
            if self.cuda and not _usable():
                raise SystemExit(RESTART) from None
            return None

    def screen(self, items: Iterable[builds.Item], share: float, what: str) -> None:
        """Time each item once, in random order: if time ends it, what is left out is so by chance."""
        todo = [i for i in items if (i[0], i[2], str(i[1])) not in self.known.screened and not self.bad(i[0], i[1])]
        todo.sort()  # what is compiled comes as a set
        random.Random(self.plan.seed).shuffle(todo)
        for done, (gemm, config, tokens) in enumerate(todo):
            if time.monotonic() > self.until(share):
                self.say(f"{what}: out of time", done, len(todo), at_once=True)
                return
            named = {"gemm": gemm, "tokens": tokens, "config": str(config)}
            journal.append(self.file, {"record": "begin", **named})
            if (replay := self.try_(gemm, config, tokens)) is not None:
                self.append({"record": "screen", **named, "us": replay.us(self.replays)})
            self.say(what, done + 1, len(todo))

    def candidates(self, gemm: Gemm, tokens: int) -> list[Config]:
        """What to screen, upstream's own choice first."""
        found = space.candidates(self.plan.geometry, gemm, tokens, self.device)
        if self.plan.candidates:
            count = min(self.plan.candidates, len(found))
            found = sorted(random.Random(self.plan.seed).sample(found, count))
        return list(dict.fromkeys([self.upstream[tokens][gemm], *found]))

    def good(self, gemm: Gemm, tokens: int, count: int) -> list[Config]:
        """The best of a screen that are not out."""
        screened = self.known.of(gemm, tokens)
        return choose.best({config: us for config, us in screened.items() if not self.bad(gemm, config)}, count)

    def finalists(self, tokens: int) -> dict[Gemm, list[Config]]:
        """Of both products: the best of the neighbouring screens, in the block sizes of this count, and upstream's."""
        at = choose.near(tokens, choose.anchors(self.plan.tokens))
        rows = space.block_ms(self.plan.geometry, tokens)
        found: dict[Gemm, list[Config]] = {}
        for gemm in GEMMS:
            near = [config for anchor in at for config in self.good(gemm, anchor, _FINALISTS)]
            mine = [config for config in near if config.block_m in rows]
            own = self.upstream[tokens][gemm]
            found[gemm] = [c for c in dict.fromkeys([own, *mine]) if not self.bad(gemm, c)]
        return found

    def check(self, gemm: Gemm, config: Config, tokens: int) -> None:
        """Compare with float32, once."""
        if (gemm, tokens, str(config)) in self.known.errors:
            return
        try:
            error = self.experts.error(gemm, config, tokens)
        except Exception as failure:  # as in `try_`
            self.fail(gemm, tokens, config, builds.said(failure))
            if self.cuda and not _usable():
                raise SystemExit(RESTART) from None
            return
        self.append({"record": "check", "gemm": gemm, "tokens": tokens, "config": str(config), "error": error})

    def final(self, tokens: int, until: float) -> None:
        """Rounds of one token count, all finalists in turn, in another order each round."""
        done = len(self.known.final.get(tokens, []))
        if done >= self.rounds:
            return
        for gemm, configs in self.finalists(tokens).items():
            for config in configs:
                self.check(gemm, config, tokens)
        replays = {
            (gemm, config): replay
            for gemm, configs in self.finalists(tokens).items()
            for config in configs
            if (replay := self.try_(gemm, config, tokens)) is not None
        }
        for number in range(done, self.rounds):
            if number >= _LEAST_ROUNDS and time.monotonic() > until:
                return
            us: dict[str, dict[str, list[float]]] = {gemm: {} for gemm in GEMMS}
            order = list(replays)
            random.Random(self.plan.seed + number).shuffle(order)
            for gemm, config in order:
                us[gemm][str(config)] = replays[gemm, config].us(self.replays)
            self.append({"record": "final", "tokens": tokens, "round": number, "us": us})

    def pairs(self) -> dict[int, Row]:
        """What wins by now, at the token counts that have a whole round."""
        found: dict[int, Row] = {}
        for tokens in self.plan.tokens:
            rounds = self.known.final.get(tokens, [])
            times = {gemm: choose.by_round(rounds, gemm) for gemm in GEMMS}
            if (chosen := choose.pair(times, self.upstream[tokens])) is not None:
                found[tokens] = {"gate_up": chosen.gate_up, "down": chosen.down}
        return found

    def layers(self) -> None:
        """Rounds of the whole layer, at each token count whose pair is another than upstream's."""
        pairs = self.pairs()
        changed = [tokens for tokens, pair in pairs.items() if pair != self.upstream[tokens]]
        whole = layer.Layer(self.experts, self.device.l2)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            tables.write(root, self.place["triton"], layer.file_names(self.experts), tables.assemble(pairs, {}))
            for count, tokens in enumerate(changed):
                pair = {gemm: str(pairs[tokens][gemm]) for gemm in GEMMS}
                done = [record for record in self.known.layer.get(tokens, []) if record["pair"] == pair]
                if len(done) >= self.layer_rounds:
                    continue
                theirs, wanted = whole.capture(tokens, None)
                ours, got = whole.capture(tokens, root)
                differs = ((got - wanted).abs().max() / wanted.abs().max()).item()
                arms = {"upstream": theirs, "tuned": ours}
                for number in range(len(done), self.layer_rounds):
                    if number >= _LEAST_ROUNDS and time.monotonic() > self.until(1):
                        break
                    turn = list(arms) if number % 2 else list(reversed(arms))
                    us = {arm: arms[arm].us(self.replays) for arm in turn}
                    told = {"tokens": tokens, "round": number, "pair": pair, "differs": differs, "us": us}
                    self.append({"record": "layer", **told})
                self.say("whole layer", count + 1, len(changed))

    def run(self) -> None:
        """All stages."""
        at = choose.anchors(self.plan.tokens)
        first = [(gemm, config, tokens) for gemm in GEMMS for tokens in at for config in self.candidates(gemm, tokens)]
        self.screen(self.build(first, _COMPILED, "screen"), _SCREENED, "screen")
        second = [
            (gemm, config, tokens)
            for gemm in GEMMS
            for tokens in at
            for config in space.twins(self.plan.geometry, gemm, self.good(gemm, tokens, _TWINNED), self.device)
        ]
        self.screen(self.build(second, _TWINS_COMPILED, "TMA and groups"), _TWINS, "TMA and groups")
        third = [
            (gemm, config, tokens)
            for tokens in self.plan.tokens
            for gemm, configs in self.finalists(tokens).items()
            for config in configs
        ]
        self.build(third, _FINAL, "finalists")
        self.pool.close()
        for count, tokens in enumerate(self.plan.tokens):
            left = self.until(_FINAL) - time.monotonic()
            self.final(tokens, time.monotonic() + left / (len(self.plan.tokens) - count))
            self.say("final", count + 1, len(self.plan.tokens))
        self.layers()
        self.append({"record": "done", "seconds": round(time.monotonic() - self.begun, 1)})


def _usable() -> bool:
    """Whether the GPU still answers this process."""
    try:
        torch.cuda.synchronize()
    except Exception:  # an illegal access: whatever is asked now fails with it
        return False
    return True


def main(arguments: list[str]) -> None:
    """Command line of the process."""
    plan, file, label = arguments
    # Of each lookup upstream warns that there is no table, which is why this runs.
    logging.getLogger("sglang").setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    worker: Any = None
    torch.set_grad_enabled(False)  # as a server runs; upstream goes another way with gradients on
    try:
        worker = Worker(read_plan(plan), Path(file), label)
        worker.run()
    except KeyboardInterrupt:
        if worker is not None:
            worker.append({"record": "interrupted"})
        raise SystemExit(130) from None
    except PatchError as error:
        raise SystemExit(f"sglang-patches: {error}") from None
    finally:
        if worker is not None:
            worker.pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
