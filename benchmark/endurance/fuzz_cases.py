"""Which requests a fuzz of the HTTP API sends: drawn from the server's own OpenAPI schema by schemathesis.

A body drawn from a schema of fifty optional fields has most of them, and the first that is wrong hides the others. So
most bodies here are a request that works, with one to three fields of the drawn body in it.
"""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Paths that are left out, and why: each changes or ends the server for everybody, which is what it is for. All of them
# are for operators (upstream protects them by --admin-api-key where one is set).
EXCLUDED = {
    "/abort_request": "ends other requests",
    "/add_external_corpus": "changes what later requests are drafted from",
    "/begin_weight_update": "changes the weights",
    "/configure_logging": "changes what is logged, and where to",
    "/continue_generation": "undoes /pause_generation",
    "/destroy_weights_update_group": "changes the weights",
    "/dump_expert_distribution_record": "writes files",
    "/end_weight_update": "changes the weights",
    "/flush_cache": "empties the prefix cache; with a request under way it is refused with 400",
    "/freeze_gc": "switches garbage collection of the server's objects off for good",
    "/get_weights_by_name": "sends weights, megabytes a request",
    "/hicache/storage-backend": "attaches storage",
    "/hicache/storage-backend/clear": "deletes stored prefixes",
    "/init_weights_send_group_for_remote_instance": "waits for other machines",
    "/init_weights_update_group": "waits for other machines",
    "/load_lora_adapter": "loads a file into the model",
    "/load_lora_adapter_from_tensors": "unpickles what it is sent",
    "/pause_generation": "stops all requests",
    "/pd_role_switch": "changes what the server is for",
    "/release_memory_occupation": "gives the weights' memory back",
    "/remove_external_corpus": "changes what later requests are drafted from",
    "/resume_memory_occupation": "undoes /release_memory_occupation",
    "/scale_elastic_ep": "adds and removes ranks",
    "/send_weights_to_remote_instance": "waits for other machines",
    "/set_internal_state": "changes server arguments",
    "/set_trace_level": "changes what is traced",
    "/slow_down": "delays every forward pass",
    "/start_expert_distribution_record": "records into memory until it is stopped",
    "/start_profile": "writes profiles to disk",
    "/stop_expert_distribution_record": "ends a record",
    "/stop_profile": "writes profiles to disk",
    "/unload_lora_adapter": "changes the model",
    "/update_weight_version": "changes what the server says of its weights",
    "/update_weights_from_disk": "changes the weights",
    "/update_weights_from_distributed": "changes the weights",
    "/update_weights_from_ipc": "unpickles what it is sent",
    "/update_weights_from_tensor": "unpickles what it is sent",
    "/weights_checker": "overwrites weights on request",
}  # fmt: skip

_CHAT = {"messages": [{"role": "user", "content": "The sea"}], "max_tokens": 4}
#: Requests that work, by path; fields of drawn bodies are put into them.
BASES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "It was", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "It was", "max_tokens": 4},
    "/v1/chat/completions": _CHAT,
    "/invocations": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"messages": _CHAT["messages"]},
    "/v1/responses": {"input": "The sea", "max_output_tokens": 4},
    "/v1/tokenize": {"prompt": "It was"},
    "/v1/detokenize": {"tokens": [5, 6]},
    "/api/chat": {"messages": _CHAT["messages"], "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "It was", "stream": False, "options": {"num_predict": 4}},
    "/vertex_generate": {"instances": [{"text": "It was"}], "parameters": {"sampling_params": {"max_new_tokens": 4}}},
    "/v1/embeddings": {"input": "It was"},
    "/v1/classify": {"input": "It was"},
    "/v1/score": {"query": "It was", "items": ["a"], "label_token_ids": [5]},
    "/v1/rerank": {"query": "It was", "documents": ["a"]},
    "/separate_reasoning": {"text": "x", "reasoning_parser": "kimi_k2"},
    "/parse_function_call": {"text": "x", "tools": [], "tool_call_parser": "kimi_k2"},
    "/open_session": {"capacity_of_str_len": 100},
}  # fmt: skip
#: Paths whose body names a model.
_NAMED = {path for path in BASES if path.startswith(("/v1/", "/api/")) or path == "/invocations"}
# Values for parameters that the schema leaves open (a field that is any object).
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2.5,
    1e308,
    2**40,
    "",
    "x",
    "(",
    [],
    ["x"],
    [-1],
    [10**9],
    {},
    {"5": 1e308},
    {"x": []},
)
_OPEN = {"/generate": "sampling_params", "/api/chat": "options", "/api/generate": "options"}
# More is allowed and only takes long here: (name, largest that is sent as it is drawn, smallest that is).
_SLOW = {"n": (4, 5000), "best_of": (4, 5000), "max_tokens": (16, 10**6), "max_completion_tokens": (16, 10**6),
         "max_output_tokens": (16, 10**6), "max_new_tokens": (16, 10**6), "min_tokens": (16, 10**6),
         "min_new_tokens": (16, 10**6), "num_predict": (16, 10**6)}  # fmt: skip


# Where a request says how long its answer may be: without, it is as long as fits, or 2,048 tokens.
_LENGTHS = {"/generate": ("sampling_params", "max_new_tokens"), "/api/chat": ("options", "num_predict"),
            "/api/generate": ("options", "num_predict"), "/v1/completions": ("max_tokens",),
            "/v1/chat/completions": ("max_tokens", ), "/invocations": ("max_tokens", ),
            "/v1/responses": ("max_output_tokens", )}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One method of one path; `valid` and `invalid` are schemathesis' own operations, to draw from."""

    label: str
    path: str
    valid: Any
    invalid: Any


def operations(schema: dict[str, Any]) -> Iterator[Operation]:
    """All operations of an OpenAPI schema that are fuzzed."""
    import schemathesis

    found = [schemathesis.openapi.from_dict(one).get_all_operations() for one in (schema, shallow(schema))]
    for whole, flat in zip(*found, strict=True):
        valid, invalid = whole.ok(), flat.ok()
        if valid.path not in EXCLUDED:
            yield Operation(valid.label, valid.path, valid, invalid)


def shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with what is inside a body's fields by type only.

    schemathesis lists every place that can be made wrong, and messages inside tools inside messages are two million:
    half a minute a request. What is inside the fields of valid bodies is drawn from the whole schema.
    """
    components = schema["components"]["schemas"]

    def flat(value: Any) -> Any:
        if isinstance(value, list):
            return [flat(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            named = components[value["$ref"].rpartition("/")[2]]
            return {name: named[name] for name in ("type", "enum") if name in named} or {"type": "object"}
        return {name: flat(entry) for name, entry in value.items() if name != "discriminator"}

    return {**schema, "components": {"schemas": {name: flat(value) for name, value in components.items()}}}


def excluded(schema: dict[str, Any]) -> dict[str, str]:
    """What of `EXCLUDED` this server has."""
    return {path: why for path, why in EXCLUDED.items() if path in schema["paths"]}


def draw(operation: Operation, examples: int, seed: int, send: Callable[[Any], None]) -> None:
    """Call `send` with cases of an operation, half of them valid by the schema; the same ones for the same seed."""
    import hypothesis
    from schemathesis import GenerationMode

    for mode, drawn_from in (
        (GenerationMode.POSITIVE, operation.valid),
        (GenerationMode.NEGATIVE, operation.invalid),
    ):

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(1, examples // 2), database=None, deadline=None,
            phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=drawn_from.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            send(case)

        # Nothing can be wrong about a request that has no parameters.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            each()


def within_reach(path: str, body: Any, model: str) -> Any:
    """A drawn body as it is sent: three of four are a request that works with some of the drawn fields, and none asks
    for so much that only time is lost."""
    if not isinstance(body, dict):
        return body
    drawn = random.Random(zlib.crc32(json.dumps(body, sort_keys=True, default=repr).encode()))
    if path in BASES and drawn.random() < 0.75:
        base = json.loads(json.dumps(BASES[path]))
        fields = drawn.sample(sorted(body), min(len(body), drawn.randint(1, 3))) if body else []
        body = {**base, **{name: body[name] for name in fields}}
        if path in _OPEN and drawn.random() < 0.5:
            inner = dict(base[_OPEN[path]])
            for name in drawn.sample(_open_names(path), 2):
                inner[name] = drawn.choice(_ODD)
            body[_OPEN[path]] = inner
    if path in _NAMED and drawn.random() < 0.95:
        body = {**body, "model": model}
    return _short(path, _quick(body))


def _short(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same with the length of the answer given, where it is not."""
    *outer, name = _LENGTHS.get(path, ("",))
    if not name or (name == "max_tokens" and body.get("max_completion_tokens") is not None):
        return body
    if not outer:
        return body if body.get(name) is not None else {**body, name: 4}
    inner = body.get(outer[0])
    if inner is None:
        inner = {}
    if not isinstance(inner, dict) or inner.get(name) is not None:
        return body
    return {**body, outer[0]: {**inner, name: 4}}


def _open_names(path: str) -> list[str]:
    if path == "/generate":
        import msgspec
        from sglang.srt.sampling.sampling_params import SamplingParams

        return sorted(field.name for field in msgspec.structs.fields(SamplingParams))
    return ["num_predict", "temperature", "top_k", "top_p", "stop", "seed", "num_ctx", "repeat_penalty"]


def _quick(value: Any) -> Any:
    """The same with counts that take long replaced by their largest quick value; what is refused anyway stays."""
    if isinstance(value, list):
        return [_quick(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    quick = {}
    for name, entry in value.items():
        most, refused = _SLOW.get(name, (0, 0))
        between = isinstance(entry, int | float) and most < entry < refused
        quick[name] = most if name in _SLOW and between else _quick(entry)
    return quick
