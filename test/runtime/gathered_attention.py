"""Runs upstream's FlashInfer MLA backend with the patch and without, and compares outputs bit by bit; see
`test_flashinfer_mla_gather_cast.py`, which starts it. A process of its own: Triton reads TRITON_INTERPRET once.

In the repository's root:

    export PYTHONPATH=.:python:sgl-kernel/python
    SGLANG_PATCHES=torch-native-mla,cpu-eagle3,flashinfer-mla-gather-cast TRITON_INTERPRET=1 SGLANG_USE_CPU_ENGINE=1 \
      python test/runtime/gathered_attention.py
    SGLANG_PATCHES=flashinfer-mla-gather-cast python test/runtime/gathered_attention.py --gpu

With a GPU all is real. On a CPU flashinfer's wrapper is replaced by `Attention`, which reads the same plan and attends
in PyTorch; all else is upstream's own, its Triton kernels included. A CPU has no CUDA graphs: a capture is a tape of
what would be launched, with the tensors it was launched with, and a replay runs the tape and no line of the backend.
Rows that nothing wrote are NaN, and the static buffer is filled with NaN before each forward.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from benchmark.gather_cast import run as measurement
from benchmark.gather_cast.backends import (
    Server,
    Sizes,
    draft_input,
    extend_input,
    modules,
    publish_arguments,
    verify_input,
)
from benchmark.gather_cast.stand_in import Attention, OnCpu, stand_in
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_patches.runtime import _outcome
from sglang_patches.runtime import flashinfer_mla_gather_cast as patch
from sglang_patches.runtime.flashinfer_mla_gather_cast import crossover, pages
from sglang_patches.runtime.flashinfer_mla_gather_cast.pages import Pages, Shape

GPU = "--gpu" in sys.argv
DEVICE = "cuda" if GPU else "cpu"
# Captured batch size, tokens of a verify, draft steps.
CAPTURED, WIDTH, STEPS, LAYERS = 4, 3, 3, 2
if GPU:  # the dimensions that flashinfer has kernels for
    SIZES = Sizes(DEVICE, 512, 64, 16, LAYERS, 512, CAPTURED, WIDTH, STEPS)
else:
    SIZES = Sizes(DEVICE, 32, 16, 2, LAYERS, 320, CAPTURED, WIDTH, STEPS)
MODES = ("extend", "decode", "decode graph", "verify", "verify graph", "draft", "draft graph", "draft extend")
NAN = 0x7F


class Graph:
    """One captured forward of one backend, of ``tokens`` tokens in all layers."""

    def __init__(self, server: Server, backend: Any, batch: Any, tokens: int, patched: bool) -> None:
        self.server, self.backend, self.batch, self.patched = server, backend, batch, patched
        self.q = torch.zeros(LAYERS, tokens, SIZES.heads, SIZES.dim, dtype=torch.bfloat16, device=DEVICE)
        self.metadata = backend.forward_metadata
        self.tape: list[Any] = []
        if GPU:
            server.forward(backend, batch, self.q, False)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = server.forward(backend, batch, self.q, False)
        elif patched:
            self.out = self._taped()

    def _taped(self) -> list[torch.Tensor]:
        cast = pages.cast

        def recorded(*given: Any) -> None:
            self.tape.append(functools.partial(cast, *given))
            cast(*given)

        Attention.tape = self.tape
        vars(pages)["cast"] = recorded
        try:
            return self.server.forward(self.backend, self.batch, self.q, False)
        finally:
            Attention.tape = None
            vars(pages)["cast"] = cast
            assert len(self.tape) == 2 * LAYERS, "a gather and an attention a layer"

    def replay(self, q: torch.Tensor) -> list[torch.Tensor]:
        self.q.zero_()
        self.q[:, : q.shape[1]].copy_(q)
        if GPU:
            self.graph.replay()
            return self.out
        if not self.patched:
            self.backend.forward_metadata = self.metadata
            return self.server.forward(self.backend, self.batch, self.q, False)
        for work in self.tape:
            work()
        return self.out


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64, device=DEVICE)


def capture(server: Server, patched: bool) -> dict[str, list[Graph]]:
    """As upstream's runners do: dummy requests of length 1 in row 0."""
    rows, ones, graphs = [0] * CAPTURED, [1] * CAPTURED, {}
    for kind, mode, n, spec in (
        ("decode graph", ForwardMode.DECODE, 1, None),
        ("verify graph", ForwardMode.TARGET_VERIFY, WIDTH, verify_input(WIDTH, DEVICE)),
    ):
        batch = server.batch(mode, rows, ones, spec_info=spec, positions=zeros(CAPTURED * n))
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        graphs[kind] = [Graph(server, server.backend, batch, CAPTURED * n, patched)]
    batch = server.batch(ForwardMode.DECODE, rows, ones, spec_info=draft_input(), positions=zeros(CAPTURED) + 1)
    server.draft.init_forward_metadata_out_graph(batch, in_capture=True)
    graphs["draft graph"] = [Graph(server, b, batch, CAPTURED, patched) for b in server.draft.attn_backends]
    return graphs


def tokens_of(mode: str) -> int:
    return WIDTH if mode.startswith(("verify", "draft extend", "extend")) else 1


def step(
    server: Server, graphs: dict[str, list[Graph]], mode: str, rows: list[int], lens: list[int], q: Any, split: bool
) -> list[torch.Tensor]:
    """One step over requests that have ``lens`` committed tokens. ``q``: [layers, len(rows) * WIDTH, heads, dim]."""
    n = tokens_of(mode)
    query = q[:, : len(rows) * n]
    if mode == "draft":
        batch = server.batch(
            ForwardMode.DECODE, rows, lens, spec_info=draft_input(), positions=torch.tensor(lens, device=DEVICE)
        )
        server.draft.init_forward_metadata(batch)
        return [out for b in server.draft.attn_backends for out in server.forward(b, batch, query, split)]
    if not mode.endswith("graph"):
        more: dict[str, Any] = {}
        kind = ForwardMode.DECODE
        if mode == "verify":
            kind, more = ForwardMode.TARGET_VERIFY, {"spec_info": verify_input(WIDTH, DEVICE)}
        elif mode != "decode":  # the last WIDTH tokens are the chunk; all before is its prefix
            prefix = [length - WIDTH for length in lens]
            kind = ForwardMode.EXTEND if mode == "extend" else ForwardMode.DRAFT_EXTEND_V2
            more = {"extend_prefix_lens": torch.tensor(prefix, device=DEVICE), "extend_prefix_lens_cpu": prefix}
            if mode == "draft extend":
                more["spec_info"] = extend_input(len(rows), WIDTH)
        batch = server.batch(kind, rows, lens, **more)
        server.backend.init_forward_metadata(batch)
        return server.forward(server.backend, batch, query, split)
    # Graphs: padded as upstream's runners pad, with requests of length 1 in row 0.
    padded = CAPTURED - len(rows)
    spec = {"verify graph": verify_input(WIDTH, DEVICE), "draft graph": draft_input(), "decode graph": None}[mode]
    kind = ForwardMode.TARGET_VERIFY if mode == "verify graph" else ForwardMode.DECODE
    batch = server.batch(kind, rows + [0] * padded, lens + [1] * padded, spec_info=spec)
    batch.positions = batch.seq_lens if mode == "draft graph" else zeros(CAPTURED * n)
    planner = server.draft if mode == "draft graph" else server.backend
    planner.init_forward_metadata_out_graph(batch)
    return [out[: len(rows) * n] for graph in graphs[mode] for out in graph.replay(query)]


seen: Counter[str] = Counter()


def fill(servers: list[Server], case: dict[str, Any], pool_pages: int, rng: torch.Generator) -> list[int]:
    """The same requests and KV in each: a prefix that all share, then pages of their own. Returns their lengths."""
    page = case["page"]
    # A radix cache shares whole pages.
    shared = case["shared_pages"] * (64 if page == 64 else 17)
    free = (torch.randperm(pool_pages, generator=rng) + 1).tolist()  # page 0 is the pool's own
    taken, free = free[: shared // page], free[shared // page :]
    table = torch.zeros(servers[0].requests.req_to_token.shape, dtype=torch.int32)
    content = torch.full((LAYERS, (pool_pages + 1) * page, SIZES.dim), NAN, dtype=torch.uint8)
    random_bytes = torch.randint(0, 256, content.shape, generator=rng).to(torch.uint8)
    random_bytes[(random_bytes & 0x7F) == NAN] = 1
    lens = []
    for row, own in enumerate(case["own"], start=1):
        wanted = -(-(own + 2 * WIDTH) // page)
        mine, free = taken + free[:wanted], free[wanted:]
        ids = (torch.tensor(mine)[:, None] * page + torch.arange(page)).flatten()
        table[row, : ids.numel()] = ids.int()
        lens.append(shared + own)
        written = ids[: lens[-1] + 2 * WIDTH]
        content[:, written] = random_bytes[:, written]
    content[:, 0] = random_bytes[:, 0]
    for server in servers:
        server.requests.req_to_token.copy_(table)
        for layer in range(LAYERS):
            server.pool.kv_buffer[layer].view(-1, SIZES.dim).copy_(content[layer])
    return lens


def compare(both: tuple[ModuleType, ModuleType], case: dict[str, Any]) -> None:
    """One case: two servers alike but for the patch, and every step's outputs equal bit for bit."""
    rng = torch.Generator().manual_seed(case["seed"])
    page = case["page"]
    pool_pages = 6 * -(-(100 + WIDTH * 4) // page) + 3 * (2 if page == 64 else 17)
    os.environ[crossover.VARIABLE] = str(case["share"])
    patch._shared.clear()
    _outcome._recorded.clear()
    pages.reference_on_cpu = not case["kernels"]
    servers = [Server(module, SIZES, page, pool_pages * page, max(CAPTURED, len(case["own"]))) for module in both]
    lens = fill(servers, case, pool_pages, rng)
    graphs = [capture(server, patched) for server, patched in zip(servers, (False, True), strict=True)]
    table, static = servers[1].requests.req_to_token.cpu(), servers[1].backend.gather_cast.shared
    for mode in case["steps"]:
        chosen = (torch.randperm(len(lens), generator=rng)[:CAPTURED] + 1).tolist()
        chosen = chosen[: int(torch.randint(1, len(chosen) + 1, (1,), generator=rng))]
        q = torch.randn(LAYERS, len(chosen) * WIDTH, SIZES.heads, SIZES.dim, generator=rng).bfloat16().to(DEVICE)
        at = [lens[row - 1] for row in chosen]
        split = bool(torch.randint(2, (1,), generator=rng))
        static.out.fill_(float("nan"))
        plans, whole, _ = static.totals.tolist()
        wanted, got = (step(server, g, mode, chosen, at, q, split) for server, g in zip(servers, graphs, strict=True))
        assert len(wanted) == len(got)
        for one, other in zip(wanted, got, strict=True):
            assert not one.isnan().any(), (mode, "upstream read a row that nothing wrote")
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), mode
        new_plans, new_whole = static.totals[0] - plans, static.totals[1] - whole
        assert new_plans == (STEPS - 1 if mode in ("draft", "draft graph") else 1), "one plan a step for all layers"
        seen[f"{mode}, {'whole' if new_whole else 'gathered'}"] += 1
        if new_whole == 0:
            written = int(static.out.isnan().logical_not().any(dim=-1).sum())
            # What the batch reads: its requests' pages, and in a padded graph the page of slot 0.
            read = {int(s) // page for row, n in zip(chosen, at, strict=True) for s in table[row, : n + WIDTH]}
            assert written <= (len(read) + 1) * page, (mode, "more was cast than the pages that the batch reads")
            assert len(read) <= case["share"] * (pool_pages + 1) + WIDTH * len(chosen), (mode, "over the limit")
    told = _outcome.outcomes()[patch.PATCH]
    assert told["result"] == "applied"
    assert told["crossover"] == {"origin": "set", "share": case["share"]}
    assert told["plans"] >= len(case["steps"])


SHARES, PAGES = [0.0, 0.3, 1.0], [1, 64]
EXAMPLES = int(os.environ.get("EXAMPLES", "12"))


def every_case(both: tuple[ModuleType, ModuleType]) -> None:
    """Hypothesis draws the cases; on a GPU, where it may not be installed, ``random`` does."""
    if GPU:
        chance = random.Random(11)
        for _ in range(EXAMPLES):
            own = [chance.randint(WIDTH + 1, 100) for _ in range(chance.randint(1, 5))]
            steps = chance.choices(MODES, k=chance.randint(2, 6))
            case = {"page": chance.choice(PAGES), "own": own, "shared_pages": chance.randint(0, 2), "steps": steps}
            compare(both, {**case, "share": chance.choice(SHARES), "kernels": True, "seed": chance.randint(0, 2**16)})
        return
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    cases = st.fixed_dictionaries(
        {
            "page": st.sampled_from(PAGES),
            "own": st.lists(st.integers(WIDTH + 1, 100), min_size=1, max_size=5),
            "shared_pages": st.integers(0, 2),
            "share": st.sampled_from(SHARES),
            "steps": st.lists(st.sampled_from(MODES), min_size=2, max_size=6),
            # Triton's interpreter is slow.
            "kernels": st.sampled_from([False, False, False, True]),
            "seed": st.integers(0, 2**16),
        }
    )

    # No shrinking: a failure names its case, and cases differ in cost a hundredfold.
    @seed(11)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    @given(case=cases)
    def drawn(case: dict[str, Any]) -> None:
        compare(both, case)

    drawn()


def kernels_agree() -> None:
    """The three kernels of a plan against PyTorch, around the limit and with a stale tail."""
    shape = Shape(rows=24 * 4, dim=SIZES.dim, page=4)
    rng = torch.Generator().manual_seed(0)
    for over in (-1, 0, 1):
        before = torch.randint(0, shape.rows, (40,), generator=rng).int()
        limit = len({int(slot) // 4 for slot in before[:33]}) + over
        used = torch.tensor([33], dtype=torch.int32, device=DEVICE)
        found: list[Any] = []
        for device in ("cpu", DEVICE):
            pages.reference_on_cpu = device == "cpu" and not found
            slots, into = before.clone().to(device), Pages.empty(shape, device)
            totals = torch.zeros(3, dtype=torch.int64, device=device)
            pages.plan(slots, used.to(device), shape, limit, into, totals)
            n = int(into.count)
            found.append((slots.tolist(), n, into.order[:n].tolist(), totals.tolist()))
        assert found[0] == found[1]
        assert found[0][3][1] == (over < 0)


def measure(both: tuple[ModuleType, ModuleType]) -> None:
    """The benchmark's own flow, which must find outputs equal and say what does not fit."""
    os.environ[crossover.VARIABLE] = "auto"
    given = measurement.parser().parse_args(["--out", "-", "--cpu", "--shared", "64"])
    vars(given).update(measurement.TINY)
    cells: list[dict[str, Any]] = []
    measurement.cells(given, both, 512, cells.append)
    assert [(cell["batch"], cell["kind"], cell["equal"]) for cell in cells] == [
        (batch, kind, True) for batch in (1, 2) for kind in ("decode", "verify")
    ]
    assert all(took > 0 for cell in cells for took in cell["ms"].values())
    assert cells[0]["outcome"]["crossover"] == {"origin": "default", "share": 1.0}
    import pytest

    with pytest.raises(ValueError, match=r"2 requests .* \(64 shared\) need 192 token slots, the pool has 128"):
        measurement.cells(given, both, 128, cells.append)
    refusal, many = patch._refusal, len(cells)
    vars(patch)["_refusal"] = lambda *_: ("failed", "it is Tuesday")
    try:
        with pytest.raises(ValueError, match="not at work in a pool of 512 slots: failed, it is Tuesday"):
            measurement.cells(given, both, 512, cells.append)
    finally:
        vars(patch)["_refusal"] = refusal
    assert len(cells) == many, "upstream against itself is no measurement"


def main() -> None:
    publish_arguments(DEVICE)
    both = modules()
    if not GPU:
        stand_in(both)

    def run() -> None:
        every_case(both)
        # No mode may be left to chance, gathered as well as whole, in PyTorch as well as in Triton.
        for kernels, page, share in ((False, 64, 1.0), (False, 1, 0.0), (True, 1, 1.0), (True, 64, 0.0)):
            fixed = {"page": page, "own": [30, 7], "shared_pages": 1, "share": share, "seed": 5}
            compare(both, {**fixed, "steps": [*MODES, *reversed(MODES)], "kernels": kernels})

    if GPU:
        run()
        kernels_agree()
    else:
        with OnCpu():
            run()
            kernels_agree()
            measure(both)
    for name, times in sorted(seen.items()):
        print(f"{times:4d} {name}")
    print(f"equal in {sum(seen.values())} steps")


if __name__ == "__main__":
    main()
