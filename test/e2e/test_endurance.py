"""A small load (benchmark.endurance.run) and a short fuzz (benchmark.endurance.fuzz), which go on for longer: all
right, nothing lost, nothing held.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmark.endurance import fuzz, fuzz_cases, plan, run

from .server import Server

# Examples of each operation; those that reach the scheduler get more.
FUZZ, FUZZ_MORE = 2, {"POST /generate": 12, "POST /v1/completions": 12, "POST /v1/chat/completions": 12}


def test_a_mixed_load_is_answered_as_without_speculation(plain_server: Server, spec_server: Server) -> None:
    prompts, model = plan.texts(3), spec_server.model_path.name
    lengths = (4, 24)
    planned = plan.make(64, prompts, lengths, seed=5)
    answers = run.asked(plain_server.url, model, plan.questions(prompts, lengths), {}, 8)
    passes = spec_server.get("/server_info")["sglang_patches"]["verify_passes"]
    before = run.emptied(spec_server.url)
    rows: list[dict[str, Any]] = []
    run.loaded(spec_server.url, model, planned, answers, 16, rows.append)
    told = run.told_of(planned, rows)
    after = run.emptied(spec_server.url)
    told |= {"pool_before": {**before, "num_used_tokens": 0}, "pool_after": after}
    assert told["pool_before"].pop("flushed"), "an earlier test left a request behind"
    passes = spec_server.get("/server_info")["sglang_patches"]["verify_passes"] - passes
    assert passes > 100, "nothing was speculated"
    assert run.verdicts(told) == []
    # All of it was there to go wrong.
    assert {row["kind"] for row in rows} == set(plan.KINDS)
    assert min(Counter(row["outcome"] for row in rows)[what] for what in ("equal", "refused", "cancelled")) >= 3
    assert spec_server.healthy()


def test_a_fuzz_of_the_api_finds_no_5xx_and_the_server_answers_as_before(spec_server: Server) -> None:
    fuzzer = fuzz.Fuzzer(spec_server.url, seed=1)
    before, tree = fuzzer.answers(), {process.pid for process in spec_server.tree()}
    for operation in fuzz_cases.operations(fuzzer.schema):
        fuzzer.operation(operation, FUZZ_MORE.get(operation.label, FUZZ))
    assert fuzzer.failures == []
    assert sum(row["sent"] for row in fuzzer.operations) > 80
    served = {row["operation"]: row["statuses"].get("200", 0) for row in fuzzer.operations}
    assert sum(served.values()) > 25, "nothing was served"
    assert sum(served[label] for label in FUZZ_MORE) >= 3, f"nothing reached the scheduler: {served}"
    assert fuzzer.answers() == before
    assert {process.pid for process in spec_server.tree()} == tree
