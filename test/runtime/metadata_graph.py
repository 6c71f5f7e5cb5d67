"""Prepares cycles with upstream's runners and triton backends on the CPU, in triton's interpreter, and writes what came
of it; see `test_eagle_metadata_graph.py`, which starts it. A process of its own: triton reads TRITON_INTERPRET when it
is imported.

    python metadata_graph.py PART FILE     (PART: a function of this file, below)

Runners are made without their ``__init__``, which captures. In place of a CUDA graph there is `Recorded`: it prepares
again with the view that was captured, as a graph reads again the addresses that were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # isort: skip

from sglang_patches.runtime import _outcome, eagle_metadata_graph
from sglang_patches.runtime.eagle_metadata_graph import gate, prep
from sglang_patches.runtime.eagle_metadata_graph.prep import Kind
from sglang_patches.runtime.eagle_metadata_graph.telling import PATCH, Told

SIZES = [1, 2, 4]
# Requests of a cycle, by row of the table, and their lengths: growing, exchanged, padded (3 to 4), grown again.
CYCLES = [
    *({1: 5 + n, 2: 40 + 3 * n} for n in range(7)),
    *({3: 9 + 2 * n, 1: 11 + n, 2: 60 + n} for n in range(7)),
    {4: 200, 1: 2},
    {4: 7},
    {2: 90, 1: 4},
]


@dataclass
class Recorded:
    """In place of a CUDA graph."""

    prepare: Callable[[], None]
    backend: Counted

    def replay(self) -> None:
        self.backend.replays += 1
        with mock.patch.object(self.backend, "counting", False):
            self.prepare()


@dataclass
class Counted:
    """How often a backend's preparation ran eagerly, and how often it was replayed."""

    eager: int = 0
    replays: int = 0
    counting: bool = True

    def watch(self, backend: Any) -> None:
        prepare = backend.init_forward_metadata_out_graph

        def counted(view: Any) -> None:
            self.eager += self.counting
            prepare(view)

        backend.init_forward_metadata_out_graph = counted


@dataclass
class Cycle:
    """One runner, with as much of its own as its preparation needs."""

    kind: Kind
    width: int
    runner: Any
    backend: Any
    counted: Counted = field(default_factory=Counted)
    before_model: Callable[[], Any] = lambda: None

    def batch(self, lengths: dict[int, int]) -> Any:
        """The `ForwardBatch` of its forward, of requests that have ``lengths`` tokens in the cache."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput

        count, width = len(lengths), self.width
        seq_lens, rows = torch.tensor(list(lengths.values())), torch.tensor(list(lengths))
        more: dict[str, Any] = {}
        if self.kind is Kind.VERIFY:
            mode, tokens, positions = ForwardMode.TARGET_VERIFY, count * width, seq_lens.repeat_interleave(width)
            nothing = dict.fromkeys(
                ("draft_token", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "retrieve_cum_len",
                 "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu")
            )  # fmt: skip
            spec_info: Any = EagleVerifyInput(
                custom_mask=self.backend.verify_mask.buffer,
                positions=positions,
                spec_steps=width - 1,
                topk=1,
                draft_token_num=width,
                **nothing,
            )
        elif self.kind is Kind.DRAFT_EXTEND:
            mode, tokens, positions = ForwardMode.DRAFT_EXTEND_V2, count * width, torch.zeros(count * width).long()
            accepted = seq_lens % width + 1
            spec_info = EagleDraftExtendInput(num_correct_drafts=accepted - 1, num_accept_tokens=accepted)
            seq_lens = seq_lens + accepted
            more["extend_seq_lens"] = accepted.int()
        else:
            mode, tokens, positions = ForwardMode.DECODE, count, seq_lens.clone()
            spec_info = EagleDraftInput(
                topk_p=torch.ones(count, 1), topk_index=torch.ones(count, 1).long(), hidden_states=None
            )
        return ForwardBatch(
            forward_mode=mode,
            batch_size=count,
            input_ids=torch.ones(tokens).long(),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=torch.ones(tokens * (width - 1 if self.kind is Kind.DRAFT_DECODE else 1)).long(),
            positions=positions,
            spec_info=spec_info,
            **more,
        )

    def run(self, batch: Any) -> dict[str, torch.Tensor]:
        """What the runner's own code leaves in the buffers when it comes to replaying the model's graph."""
        left: list[dict[str, torch.Tensor]] = []
        bs = next(size for size in SIZES if size >= batch.batch_size)

        def model(*_: Any) -> Any:
            self.before_model()
            left.append({name: tensor.clone() for name, tensor in prep.of(self.runner, self.kind).written(bs)})
            if self.kind is Kind.DRAFT_DECODE:
                return (None, None, None, None)
            return SimpleNamespace(next_token_logits=torch.zeros(bs), hidden_states=torch.zeros(bs, 1))

        for tensor in self.all_written():
            tensor.fill_(-7)
        self.runner._replay_graph = model
        if self.kind is Kind.VERIFY:
            self._verify(batch, bs)
            model()
        elif self.kind is Kind.DRAFT_EXTEND:
            self.runner.execute(batch, torch.arange(batch.batch_size))
        else:
            self.runner.execute(batch)
        return left[0]

    def _verify(self, batch: Any, bs: int) -> None:
        """As ``load_batch``, from where it has filled the buffers."""
        buffers, count = self.runner.buffers, batch.batch_size
        if count < bs:
            buffers.seq_lens.fill_(1)
            buffers.req_pool_indices.zero_()
        buffers.seq_lens[:count].copy_(batch.seq_lens)
        buffers.req_pool_indices[:count].copy_(batch.req_pool_indices)
        self.runner._init_replay_attn_metadata(
            batch,
            raw_bs=count,
            bs=bs,
            num_tokens=bs * self.width,
            glue_key=self.runner._glue_key(bs, str(batch.forward_mode), None),
            early_staged=False,
            attention_variant=None,
        )

    def all_written(self) -> list[torch.Tensor]:
        """Whole buffers, but for what holds a 0 from the start."""
        if self.kind is Kind.DRAFT_DECODE:
            return [self.backend.kv_indptr[:, 1:], self.backend.cuda_graph_kv_indices]
        extra = [self.backend.mask_indptr[1:]] if self.kind is Kind.VERIFY else []
        return [self.backend.kv_indptr[1:], self.backend.qo_indptr, self.backend.cuda_graph_kv_indices, *extra]

    def glue(self) -> Any:
        return self.runner._metadata_glue if self.kind is Kind.VERIFY else getattr(self.runner, NAME, None)


NAME = eagle_metadata_graph.ATTRIBUTE


class Server:
    """The bundled target and draft, and what is made of them."""

    def __init__(self) -> None:
        import runners
        from drafts import DRAFT
        from ranks import free_port

        arguments, self.target = runners.start(free_port())
        from sglang.srt.configs.model_config import ModelConfig

        self.target.alloc_memory_pool()
        config = ModelConfig.from_server_args(arguments, model_path=str(DRAFT), is_draft_model=True)
        shared = {name: getattr(self.target, name) for name in ("req_to_token_pool", "token_to_kv_pool_allocator")}
        self.draft = runners.runner(arguments, config, is_draft_worker=True, **shared)
        self.draft.alloc_memory_pool(self.target.memory_pool_config)
        table = self.target.req_to_token_pool.req_to_token
        table[1:] = torch.arange(table[1:].numel(), dtype=table.dtype).view_as(table[1:]) % 4093

    def cycle(self, kind: Kind, width: int = 4) -> Cycle:
        """A runner for ``width`` draft tokens, through the decorator of its ``__init__``."""
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, TritonMultiStepDraftBackend
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
        from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
        from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

        model_runner = self.target if kind is Kind.VERIFY else self.draft
        if kind is Kind.DRAFT_DECODE:
            backend: Any = TritonMultiStepDraftBackend(model_runner, 1, width - 1)
        else:
            backend = TritonAttnBackend(model_runner)
            backend.num_draft_tokens = backend.target_verify_num_tokens_per_req = width
        made: Any = {
            Kind.VERIFY: DecodeCudaGraphRunner,
            Kind.DRAFT_DECODE: EAGLEDraftCudaGraphRunner,
            Kind.DRAFT_EXTEND: EAGLEDraftExtendCudaGraphRunner,
        }[kind]
        runner = object.__new__(made)
        cycle = Cycle(kind, width, runner, backend)

        def init(self: Any) -> None:
            """What the real one leaves for the code that is run here."""
            tokens = 1 if kind is Kind.DRAFT_DECODE else width
            largest = SIZES[-1]
            backend.init_cuda_graph_state(largest, largest * tokens)
            vars(self).update(
                model_runner=SimpleNamespace(
                    is_draft_worker=model_runner.is_draft_worker,
                    spec_algorithm=model_runner.spec_algorithm,
                    lora_manager=None,
                    model_config=SimpleNamespace(model_is_mrope=False, vocab_size=4096),
                    device_timer=None,
                    shared_read_done_event=None,
                ),
                device="cpu",
                attn_backend=backend,
                draft_attn_backend=backend,
                draft_extend_attn_backend=backend,
                deepep_adapter=SimpleNamespace(replay=lambda: None),
                capture_bs=SIZES,
                captured_req_width=tokens,
                speculative_num_steps=width - 1,
                seq_len_fill_value=1,
                extend_seq_lens_cpu=[width] * largest,
                forward_mode=ForwardMode.DRAFT_EXTEND_V2,
                capture_forward_mode=ForwardMode.TARGET_VERIFY,
                **dict.fromkeys(
                    ("require_mlp_tp_gather", "require_attn_tp_gather", "require_gathered_buffer", "enable_pdmux",
                     "enable_two_batch_overlap", "is_encoder_decoder", "ragged_verify_mode"),
                    False,
                ),
                buffers=SimpleNamespace(
                    **{
                        name: torch.zeros(largest * width).long()
                        for name in ("input_ids", "positions", "out_cache_loc")
                    },
                    **{
                        name: torch.ones(largest).long()
                        for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices", "select_index")
                    },
                    **{
                        name: torch.full((largest,), width).int()
                        for name in ("extend_seq_lens", "num_correct_drafts", "num_accept_tokens")
                    },
                    topk_p=torch.zeros(largest, 1),
                    topk_index=torch.zeros(largest, 1).long(),
                    **dict.fromkeys(
                        ("hidden_states", "mamba_track_indices", "rids_int", "bootstrap_room_ids_int", "draft_probs",
                         "dsa_seed_topk", "encoder_lens"),
                    ),
                ),
            )  # fmt: skip
            if kind is Kind.VERIFY:
                self._metadata_glue, self._skip_glued_replay_view = None, False

        eagle_metadata_graph.glues(init)(runner)
        cycle.counted.watch(backend)
        if (glue := cycle.glue()) is not None:
            glue._capture = lambda prepare: Recorded(prepare, cycle.counted)
        return cycle


def reference(cycle: Cycle, batch: Any) -> dict[str, torch.Tensor]:
    """What upstream's operations alone leave for a batch."""
    hidden = {"_metadata_glue": None, NAME: None}
    with mock.patch.dict(vars(cycle.runner), hidden), mock.patch.object(cycle.counted, "counting", False):
        return cycle.run(batch)


def differing(cycle: Cycle, lengths: dict[int, int], change: Callable[[Any], None] = lambda batch: None) -> list[str]:
    """Names of buffers that a cycle does not leave as upstream's operations do."""
    batches = [cycle.batch(lengths) for _ in range(2)]
    for batch in batches:
        change(batch)
    found, wanted = cycle.run(batches[0]), reference(cycle, batches[1])
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def told(cycle: Cycle) -> dict[str, Any]:
    entry: dict[str, Any] = _outcome.outcomes()[PATCH]["runners"][cycle.kind.value][str(cycle.width)]
    return entry


def cycles(server: Server) -> dict[str, Any]:
    """All cycles of all forwards, of two widths in turn as under adaptive speculation."""
    found: dict[str, Any] = {}
    for kind in Kind:
        both = {width: server.cycle(kind, width) for width in (4, 3)}
        wrong = {w: [differing(c, lengths) for lengths in CYCLES] for w, c in both.items()}
        found[kind.value] = {
            width: {
                "wrong": wrong[width],
                "told": told(cycle),
                "eager": cycle.counted.eager,
                "skips": getattr(cycle.runner, "_skip_glued_replay_view", None),
                "held": [state["view"] for state in cycle.glue()._states.values() if state["view"] is not None] == [],
            }
            for width, cycle in both.items()
        }
    found["outcome"] = {k: v for k, v in _outcome.outcomes()[PATCH].items() if k != "runners"}
    found["by hand"] = _by_hand(server)
    found["order"] = _order(server)
    return found


def _order(server: Server) -> list[str]:
    """What a draft extend does in turn, where the scheduler waits until its preparation has read what they share."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    cycle, order = server.cycle(Kind.DRAFT_EXTEND), list[str]()
    replay = cycle.glue().replay

    def replayed(key: Any) -> None:
        order.append("prepared")
        replay(key)

    cycle.backend.shared_read_ends = lambda mode: SharedReadEnds.PRE_REPLAY
    cycle.runner._publish_read_done = lambda in_graph: order.append("read done")
    cycle.glue().replay = replayed
    cycle.before_model = lambda: order.append("model")
    for n in range(6):
        order.clear()
        cycle.run(cycle.batch({1: 5 + n, 2: 20 + n}))
    return order


def _by_hand(server: Server) -> list[bool]:
    """What a replayed graph left, against the table of requests."""
    table, same = server.target.req_to_token_pool.req_to_token, []
    for kind in Kind:
        cycle = server.cycle(kind)
        for n in range(8):
            lengths = {2: 30 + n, 1: 4 + n}
            left = cycle.run(cycle.batch(lengths))
        if kind is Kind.DRAFT_DECODE:
            for step in range(3):
                slots = torch.cat([table[row, : length + step + 1] for row, length in lengths.items()])
                same.append(torch.equal(left[f"kv_indices of step {step}"], slots.long()))
        else:
            slots = torch.cat([table[row, :length] for row, length in lengths.items()])
            same.append(torch.equal(left["kv_indices"], slots.long()))
    return same


def refused(server: Server) -> dict[str, Any]:
    """What is not to be captured, and a graph that is wrong."""
    found: dict[str, Any] = {}
    lengths = [{1: 5 + n, 2: 20 + n} for n in range(8)]

    def outcome(cycle: Cycle, wrong: list[list[str]]) -> dict[str, Any]:
        return {"wrong": wrong, "told": told(cycle), "replays": cycle.counted.replays}

    # A view of the batch's own tensors, as upstream makes it for an unpadded draft.
    for name in ("seq_lens", "req_pool_indices", "positions"):
        with mock.patch.object(prep, "static_draft_view", _fresh(name)):
            cycle = server.cycle(Kind.DRAFT_DECODE)
            found[f"fresh {name}"] = outcome(cycle, [differing(cycle, given) for given in lengths])
            cycle = server.cycle(Kind.DRAFT_DECODE)
            # Rows do not change while a batch goes on, so that comparing cannot tell.
            if name != "req_pool_indices":
                with mock.patch.object(prep.Prep, "moved", return_value=""):
                    found[f"{name} that stays"] = outcome(cycle, [differing(cycle, given) for given in lengths])
    for kind in Kind:
        cycle = server.cycle(kind)
        real = cycle.glue()._capture
        cycle.glue()._capture = lambda prepare, real=real: replace(real(prepare), prepare=lambda: None)
        found[f"{kind} that writes nothing"] = outcome(cycle, [differing(cycle, given) for given in lengths])
        cycle = server.cycle(kind)
        cycle.glue()._capture = mock.Mock(side_effect=RuntimeError("a sync in a capture"))
        found[f"{kind} that cannot be captured"] = outcome(cycle, [differing(cycle, given) for given in lengths])

    cycle = server.cycle(Kind.VERIFY)
    wrong = [differing(cycle, given) for given in lengths]
    before = cycle.counted.replays

    def own_mask(batch: Any) -> None:
        batch.spec_info.custom_mask = cycle.backend.verify_mask.buffer.clone()

    def first_slice(batch: Any) -> None:
        batch.spec_info.custom_mask = cycle.backend.verify_mask.buffer[: 2 * 4 * 4]

    def no_mask(batch: Any) -> None:
        batch.spec_info.custom_mask = None

    def narrow(batch: Any) -> None:
        batch.spec_info.num_tokens_per_req = 3

    changes = (own_mask, first_slice, no_mask, narrow)
    wrong += [differing(cycle, lengths[n], change) for n, change in enumerate(changes)]
    found["batches"] = outcome(cycle, wrong) | {"replays": cycle.counted.replays - before}
    wrong = [differing(cycle, lengths[2])]
    found["batch after"] = outcome(cycle, wrong) | {"replays": cycle.counted.replays - before}
    return found


def _fresh(name: str) -> Callable[..., Any]:
    real = prep.static_draft_view

    def view(runner: Any, forward_batch: Any, raw_bs: int, bs: int) -> Any:
        made = real(runner, forward_batch, raw_bs, bs)
        setattr(made, name, getattr(forward_batch, name))
        return made

    return view


def operator(server: Server) -> dict[str, Any]:
    """Upstream's two switches, as an operator sets them."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    found: dict[str, Any] = {}
    for name, switches in {
        "neither": {},
        "view": {"SGLANG_OPT_SKIP_GLUED_REPLAY_VIEW": "0"},
        "off": {"SGLANG_ENABLE_METADATA_GLUE_GRAPH": "false"},
    }.items():
        with mock.patch.dict(os.environ, switches):
            made = [server.cycle(kind) for kind in Kind]
        verify = next(cycle for cycle in made if cycle.kind is Kind.VERIFY)
        real = decode_cuda_graph_runner.build_replay_fb_view
        with mock.patch.object(decode_cuda_graph_runner, "build_replay_fb_view", side_effect=real) as views:
            for n in range(9):
                verify.run(verify.batch({1: 5 + n, 2: 20 + n}))
        found[name] = {
            "views": views.call_count,
            "replays": verify.counted.replays,
            "told": [told(cycle) for cycle in made],
            "glue": [cycle.glue() is not None for cycle in made],
        }
    assert not envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.is_set()
    return found


def off(server: Server) -> dict[str, Any]:
    """With the patch out of the process: upstream's calls, one a cycle, and no line of ours."""
    import inspect

    found: dict[str, Any] = {}
    for kind in Kind:
        with mock.patch.object(eagle_metadata_graph, "glues", lambda init: init):  # as there is no decorator
            cycle = server.cycle(kind)
        for n in range(8):
            cycle.run(cycle.batch({1: 5 + n, 2: 20 + n}))
        found[kind.value] = (
            cycle.counted.eager,
            cycle.counted.replays,
            "eagle_metadata_graph" in inspect.getsource(inspect.getmodule(type(cycle.runner)) or sys),
        )
    return found


if __name__ == "__main__":
    facts = gate.facts
    gate.facts = lambda runner, which: replace(facts(runner, which), nvidia=True)
    eagle_metadata_graph.told = Told()
    server = Server()
    with torch.inference_mode():
        torch.save(globals()[sys.argv[1]](server), sys.argv[2])
