"""Load: 1,000 requests at concurrency 16 of every kind, each answer checked against the unspeculated one.

    python -m benchmark.endurance.run --out benchmark/results/NAME            # a CPU, 10 to 20 minutes

1. A server without speculation answers every question once, greedily: the references.
2. A server with EAGLE-3 gets the load: chat, completions and generate, streamed and not, of different lengths; stop
   strings, clients that hang up, bad inputs, slow readers (see plan.py for the shares).
3. Every answer must be the reference's text (up to the stop string; of a cancelled stream, the beginning of it), every
   bad input must get a 4xx; nothing may be lost and nothing may be a 5xx. Memory of the whole process tree is sampled;
   afterwards no request may be running, the KV pool must be as empty as before, no process may be gone or a zombie, and
   more than one token a verify pass must have been accepted.

Memory is flat if the 95% interval of its growth, after the first fifth of the requests, ends below 32 MiB per 1,000
requests, of RSS and of USS (memory.py).

The folder gets `references.jsonl`, `samples.jsonl` (a request a line, as it ends), `memory.jsonl`, the servers' logs
and `load.json`, which holds all of it with the code state. A run that is stopped (Ctrl-C, SIGTERM) writes the result of
what was done; one that is killed leaves the lines. The same command again takes the references that are there.

Exit code: 0 all is as it must be, 1 something is not, 2 it could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmark.endurance import memory, plan
from benchmark.endurance.client import GOOD, Client, load, references
from benchmark.endurance.servers import Tiny, provenance_of, write
from sglang_patches.errors import PatchError

#: Texts and lengths of the questions: few enough that all are asked unspeculated, more than the prefix cache repeats.
PROMPTS, LENGTHS = 24, (8, 32, 96)
WARM_UP = 0.2
IDLE_S = 60.0


def asked(
    url: str, model: str, questions: Sequence[plan.Question], known: Mapping[str, str], concurrency: int,
    said: Callable[[int], None] = lambda left: None,
) -> dict[str, str]:  # fmt: skip
    """The answers of a server to all questions; those `known` are not asked."""

    async def ask() -> dict[str, str]:
        client = Client(url, model, known)
        try:
            await references(client, questions, concurrency, said)
        finally:
            await client.close()
        return client.references

    return asyncio.run(ask())


def loaded(
    url: str, model: str, planned: Sequence[plan.Planned], answers: Mapping[str, str], concurrency: int,
    kept: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Send a plan to a server; `kept` is given each row (`Client.send`)."""

    async def send() -> None:
        client = Client(url, model, answers)
        try:
            await load(client, planned, concurrency, kept)
        finally:
            await client.close()

    asyncio.run(send())


def pool(url: str) -> dict[str, int]:
    """Requests and KV-cache tokens that a server holds now."""
    load = httpx.get(f"{url}/v1/loads", timeout=60).raise_for_status().json()["loads"][0]
    return {name: load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}


def emptied(url: str, seconds: float = IDLE_S) -> dict[str, Any]:
    """Wait until nothing runs, empty the prefix cache, and say what is still held; ``flushed`` tells whether it could.

    Upstream refuses to empty the cache while a request is under way, so a leaked one shows here, too.
    """
    deadline = time.monotonic() + seconds
    while (held := pool(url))["num_running_reqs"] + held["num_waiting_reqs"] and time.monotonic() < deadline:
        time.sleep(0.2)
    flushed = httpx.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=60).status_code == 200
    return {**pool(url), "flushed": flushed}


def accept_length(url: str) -> float | None:
    """Tokens a verify pass since the start of a server; None before the first pass, as where nothing is speculated."""
    told = httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json()["sglang_patches"]
    return told["accepted_tokens"] / told["verify_passes"] if told.get("verify_passes") else None


def told_of(planned: Sequence[plan.Planned], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of what came of the requests, and those that are not as they must be."""
    by_kind: dict[str, Counter[str]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], Counter())[row["outcome"]] += 1
    bad = [dict(row) for row in rows if row["outcome"] not in GOOD]
    seen = {row["index"] for row in rows}
    return {
        "requests": len(planned),
        "ended": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "kinds": [{"kind": kind, **counts} for kind, counts in sorted(by_kind.items())],
        "unanswered": [one.index for one in planned if one.index not in seen],
        "server_errors": sum(row.get("status", 0) >= 500 for row in rows),
        "failures": bad,
        "unstopped": [dict(row) for row in rows if row["kind"] == "stop" and not row.get("stop", "x")],
    }


def verdicts(told: Mapping[str, Any]) -> list[str]:
    """What is not as it must be, in sentences; empty if all is."""
    found = []
    for row in told["failures"]:
        what = f"request {row['index']} ({row['kind']}, {row['endpoint']}): {row['outcome']}"
        found.append(f"{what}: {row.get('error', '')[:160]}")
    found += [f"{len(told['unanswered'])} requests were not sent"] if told["unanswered"] else []
    before, after = told["pool_before"], told["pool_after"]
    found += [] if after["flushed"] else ["the prefix cache could not be emptied: a request is still held"]
    found += [f"{name} is {after.get(name)}, was {before[name]}" for name in before if after.get(name) != before[name]]
    if "accept_length" in told and not (told["accept_length"] or 0) > 1:
        found.append(f"the accept length is {told['accept_length']}: nothing was speculated")
    if unstopped := [row["index"] for row in told.get("unstopped", [])]:
        found.append(f"requests {unstopped[:5]} had no stop string: their references are empty")
    for row in told.get("memory", []):
        if row["verdict"] != "flat":
            found.append(f"{row['of']} {row['verdict']}: {row['slope'] / 2**20:.1f} MiB per 1,000 requests")
    return found + list(told.get("troubles", []))


def memory_rows(samples: Sequence[Mapping[str, Any]], requests: int) -> list[dict[str, Any]]:
    """The verdict on RSS and USS after the warm-up, a row each, and on the USS of each kind of process."""
    after = [row for row in samples if row["done"] >= WARM_UP * requests]
    titles = sorted({title for row in after for title in row["by"]})
    series = {"RSS": [row["rss"] for row in after], "USS": [row["uss"] for row in after]}
    series |= {f"USS of {title}": [row["by"].get(title, 0) for row in after] for title in titles}
    rows = []
    for name, sizes in series.items():
        try:
            found = memory.growth([row["done"] for row in after], sizes)
        except ValueError as error:
            found = {"verdict": f"undecided ({error})", "slope": 0}
        ends = {"first": sizes[0], "last": sizes[-1]} if sizes else {}
        rows.append({"of": name, **found, **ends})
    return rows


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path, count: int, concurrency: int, seed: int) -> None:
        self.folder, self.concurrency = folder, concurrency
        prompts = plan.texts(PROMPTS)
        self.questions = plan.questions(prompts, LENGTHS)
        self.planned = plan.make(count, prompts, LENGTHS, seed)
        self.rows: list[dict[str, Any]] = []
        self.sizes: list[dict[str, Any]] = []
        self.told: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["python", "-m", "benchmark.endurance.run", *sys.argv[1:]],
            "seed": seed,
            "concurrency": concurrency,
            "finished": False,
        }

    def references(self) -> dict[str, str]:
        """The unspeculated answers, from the folder or from a server that is started for them."""
        file = self.folder / "references.jsonl"
        known = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
        if all(question.key in known for question in self.questions):
            return known
        self.say("starting the server without speculation")
        begun, missing = time.monotonic(), len(self.questions) - len(known)

        def said(left: int) -> None:
            if left % 24 == 0:
                passed = time.monotonic() - begun
                self.say(f"references: {left} of {missing} left, {passed / max(1, missing - left) * left:.0f} s")

        with Tiny(self.folder / "plain.log", speculative=False) as server:
            begun = time.monotonic()
            known = asked(server.url, server.model, self.questions, known, self.concurrency, said)
        file.write_text("".join(f"{json.dumps(entry)}\n" for entry in known.items()))
        return known

    def load(self, answers: Mapping[str, str]) -> None:
        """The load on a server with EAGLE-3; fills `told` and the files."""
        self.say("starting the server with EAGLE-3")
        begun = time.monotonic()
        with (
            Tiny(self.folder / "spec.log") as server,
            (self.folder / "samples.jsonl").open("w") as samples,
            (self.folder / "memory.jsonl").open("w") as sizes,
        ):
            self.told["provenance"] = provenance_of(server.url)
            self.told["pool_before"] = emptied(server.url)
            del self.told["pool_before"]["flushed"]
            begun = time.monotonic()

            def kept(row: dict[str, Any]) -> None:
                self.rows.append(row)
                samples.write(json.dumps(row) + "\n")
                samples.flush()
                done, passed = len(self.rows), time.monotonic() - begun
                if done % max(1, len(self.planned) // 40) == 0 or row["outcome"] not in GOOD:
                    bad = sum(one["outcome"] not in GOOD for one in self.rows)
                    left = passed / done * (len(self.planned) - done)
                    self.say(f"{done}/{len(self.planned)} requests, {bad} not as they must be; {left:.0f} s left")

            def noted(row: dict[str, Any]) -> None:
                sizes.write(json.dumps(row) + "\n")
                sizes.flush()

            watch = memory.Watch(server.tree, lambda: len(self.rows), noted)
            try:
                with watch:
                    loaded(server.url, server.model, self.planned, answers, self.concurrency, kept)
                self.told["finished"] = True
            finally:
                self.told["seconds"] = round(time.monotonic() - begun, 1)
                self.sizes = watch.samples
                self.told["memory"] = memory_rows(watch.samples, len(self.planned))
                self.told["troubles"] = server.troubles()
                self.told |= {"pool_after": {"flushed": False}, "accept_length": None}
                self.told["load_average_after"] = psutil.getloadavg()
                # A server that is gone or does not answer has not emptied anything, and the result says so.
                with contextlib.suppress(httpx.HTTPError):
                    self.told["pool_after"] = emptied(server.url)
                    self.told["accept_length"] = accept_length(server.url)
        self.told["troubles"] += [f"left behind: {what}" for what in server.left]

    def write(self) -> list[str]:
        """Write the result of what was done; what is not as it must be."""
        self.told |= told_of(self.planned, self.rows)
        self.told["not_as_it_must_be"] = verdicts(self.told) if "pool_after" in self.told else ["no load was sent"]
        bad, seconds = len(self.told["failures"]), self.told.get("seconds", 0)
        self.told["headline"] = (
            f"{len(self.rows)} requests in {seconds:.0f} s, {bad} not as they must be; "
            + ", ".join(f"{row['of'].upper()} {row['verdict']}" for row in self.told.get("memory", []))
        )
        self.told["raw"] = {"requests": sorted(self.rows, key=lambda row: row["index"]), "memory": self.sizes}
        write(self.folder / "load.json", self.told)
        return list(self.told["not_as_it_must_be"])

    def say(self, line: str) -> None:
        """Progress."""
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run it; returns the exit status, see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result; a new one, or to begin again")
    parser.add_argument("--requests", type=int, default=1000, help="how many (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="at a time (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other requests (default %(default)s)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        if (given.out / "load.json").exists():
            raise PatchError(f"{given.out}: holds a result already\n  remedy     name another --out, or remove it")
        run = Run(given.out, given.requests, given.concurrency, given.seed)
        answers = run.references()
        try:
            run.load(answers)
        finally:
            wrong = run.write()
    except (PatchError, httpx.HTTPError, OSError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"run: stopped; what was done is in {given.out}", file=sys.stderr)
        return 2
    print("\n".join(wrong[:20]))
    counts = ", ".join(f"{count} {name}" for name, count in run.told["outcomes"].items())
    print(f"{given.out / 'load.json'}: {counts}; {'not ' if wrong else ''}as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
