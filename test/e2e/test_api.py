"""The OpenAI-compatible API as its users meet it: the real client, good and bad requests, and what the server tells."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import lane_table
import openai
import pytest
from transformers import AutoTokenizer

from sglang_patches.document.diff import diff
from sglang_patches.document.server import ask

from .server import REPO, Server

PROMPT = "It was a dark and stormy night; the rain fell in torrents, and"
CHAT: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture
def model(spec_server: Server) -> str:
    return spec_server.model_path.name


@pytest.fixture
def client(spec_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spec_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models_lists_the_served_model(client: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_chat_completion_with_usage(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, max_tokens=24, temperature=0)
    assert answer.model == model
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason == ("length" if answer.usage.completion_tokens == 24 else "stop")


def test_text_completion_and_exact_max_tokens(client: openai.OpenAI, model: str) -> None:
    # 1 to 9: accepted drafts must not overshoot at any place within a verify pass of 4 tokens.
    for limit in range(1, 10):
        answer = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=limit, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"


def test_streams_carry_the_same_text_and_usage(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CHAT, max_tokens=32, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=CHAT,
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) > 1
    assert chunks[-1].usage == whole.usage
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]

    whole_text = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0)
    parts = client.completions.create(model=model, prompt=PROMPT, max_tokens=32, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole_text.choices[0].text


def test_several_prompts_and_several_choices(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, "The captain looked at the", "Once upon a time"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=12, temperature=0)
    alone = [client.completions.create(model=model, prompt=p, max_tokens=12, temperature=0) for p in prompts]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]

    chat = client.chat.completions.create(model=model, messages=CHAT, max_tokens=16, n=3, temperature=1.0)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in chat.choices}) > 1
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 48


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0).choices[0].text
    stop = free[len(free) // 2 :][:3]
    stopped = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0, stop=stop)
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_no_part_of_a_stop_string_is_in_the_text(spec_server: Server, stream: bool) -> None:
    """Upstream hands text on at every 50th token, and the stop string lies across it (patch whole-stop-strings)."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    url, tokenizer = f"{spec_server.url}/generate", AutoTokenizer.from_pretrained(spec_server.model_path)
    ids = httpx.post(url, json={"text": PROMPT, "sampling_params": sampling}, timeout=120).json()["output_ids"]
    before, after = str(tokenizer.decode(ids[:50])), str(tokenizer.decode(ids[:51]))
    # As much of the 50th token's end as makes it the first of its kind.
    stop = next(after[at:] for at in range(len(before) - 1, 0, -1) if after.index(after[at:]) == at)
    wanted = after.removesuffix(stop)
    body = {"text": PROMPT, "sampling_params": {**sampling, "stop": stop}, "stream": stream}
    answer = httpx.post(url, json=body, timeout=120).text
    last = answer.split("data: ")[-2] if stream else answer
    assert json.loads(last)["text"] == wanted


def test_logprobs_belong_to_the_greedy_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=16, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        best = max(entry.logprob for entry in token.top_logprobs)
        assert token.logprob == pytest.approx(best, abs=1e-4)


def test_a_seed_repeats_a_sampled_answer_and_another_does_not(
    spec_server: Server, client: openai.OpenAI, model: str
) -> None:
    if spec_server.get("/server_info")["device"] != "cpu":
        pytest.skip("on a GPU upstream reads seeds only under --enable-deterministic-inference")

    def sample(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=model, messages=CHAT, max_tokens=32, temperature=1.0, top_p=0.95, seed=seed
        )
        return answer.choices[0].message.content

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def _image(url: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


BAD: dict[str, tuple[str, Any]] = {
    "unknown model": ("completions", {"model": "gpt-4o", "prompt": "x"}),
    "unknown model in chat": ("chat/completions", {"model": "gpt-4o", "messages": CHAT}),
    "negative max_tokens": ("completions", {"prompt": "x", "max_tokens": -1}),
    "negative max_tokens in chat": ("chat/completions", {"messages": CHAT, "max_tokens": -1}),
    "prompt too long": ("completions", {"prompt": "word " * 200_000}),
    "more tokens than fit": ("completions", {"prompt": "x", "max_tokens": 10_000_000}),
    "malformed JSON": ("chat/completions", '{"messages": ['),
    "JSON of another type": ("chat/completions", [1, 2]),
    "no messages": ("chat/completions", {"messages": []}),
    "messages of a wrong type": ("chat/completions", {"messages": "hello"}),
    "message without role": ("chat/completions", {"messages": [{"content": "x"}]}),
    "no prompt": ("completions", {"max_tokens": 4}),
    "empty prompt": ("completions", {"prompt": ""}),
    "prompt of a wrong type": ("completions", {"prompt": {"a": 1}}),
    "token id beyond the vocabulary": ("completions", {"prompt": [10**6], "max_tokens": 2}),
    "token id beyond the vocabulary in a stream": ("completions", {"prompt": [10**6], "stream": True}),
    "empty prompt in a batch": ("completions", {"prompt": ["", "x"]}),
    "empty list of token ids in a batch": ("completions", {"prompt": [[1], []]}),
    "stop token id beyond the vocabulary": ("completions", {"prompt": "x", "stop_token_ids": [10**6], "min_tokens": 3}),
    "infinite logit_bias": ("completions", {"prompt": "x", "logit_bias": {"5": 1e308}}),
    "top_k beyond int32": ("completions", {"prompt": "x", "top_k": 2**40}),
    "logprobs beyond the vocabulary": ("completions", {"prompt": "x", "logprobs": 10**6}),
    "broken stop_regex": ("completions", {"prompt": "x", "stop_regex": "("}),
    "two request ids for one prompt": ("completions", {"prompt": "x", "rid": ["a", "b"]}),
    "response format of a wrong type": ("chat/completions", {"messages": CHAT, "response_format": "json"}),
    "negative token id": ("completions", {"prompt": [-5], "max_tokens": 2}),
    "max_tokens of a wrong type": ("completions", {"prompt": "x", "max_tokens": "many"}),
    "temperature of a wrong type": ("completions", {"prompt": "x", "temperature": "hot"}),
    "negative temperature": ("completions", {"prompt": "x", "temperature": -1}),
    "top_p above 1": ("completions", {"prompt": "x", "top_p": 1.5}),
    "top_k of 0": ("completions", {"prompt": "x", "top_k": 0}),
    "penalty out of range": ("completions", {"prompt": "x", "frequency_penalty": 99}),
    "n of 0": ("completions", {"prompt": "x", "n": 0}),
    "negative n": ("chat/completions", {"messages": CHAT, "n": -1}),
    "stop of a wrong type": ("completions", {"prompt": "x", "stop": 5}),
    "seed of a wrong type": ("completions", {"prompt": "x", "seed": "lucky"}),
    "seed beyond 64 bits": ("completions", {"prompt": "x", "seed": 2**70}),
    "negative logprobs": ("completions", {"prompt": "x", "logprobs": -3}),
    "top_logprobs out of range": ("chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 10**6}),
    "logit_bias beyond the vocabulary": ("completions", {"prompt": "x", "logit_bias": {"99999999": 1.0}}),
    "logit_bias of a wrong key": ("completions", {"prompt": "x", "logit_bias": {"word": 1.0}}),
    "unknown response format": ("chat/completions", {"messages": CHAT, "response_format": {"type": "poem"}}),
    "two grammars": ("completions", {"prompt": "x", "regex": "a+", "ebnf": 'root ::= "a"'}),
    "broken regex": ("completions", {"prompt": "x", "regex": "(", "max_tokens": 4}),
    "temperature beyond float32": ("completions", {"prompt": "x", "temperature": 1e39, "min_tokens": 3}),
    "repetition penalty below float32": ("completions", {"prompt": "x", "repetition_penalty": 1e-40}),
    "n beyond all memory": ("completions", {"prompt": "x", "n": 10**8}),
    **{
        f"{json.dumps(params)} to /generate": ("/generate", {"text": "x", "sampling_params": params})
        for params in (
            {"logit_bias": {"5": "x"}},
            {"logit_bias": [1]},
            {"top_k": 1e12},
            {"max_new_tokens": 3.5},
            {"stop_token_ids": ["999999"], "min_new_tokens": 3},
        )
    },
    "list of parameters for one prompt, streaming": (
        "/generate",
        {"text": "x", "sampling_params": [{}, {}], "stream": True},
    ),
    "list of logprob starts for one prompt": (
        "/generate",
        {"text": "x", "return_logprob": True, "logprob_start_len": [0, 1]},
    ),
    "custom_params of a wrong type": ("/generate", {"text": "x", "sampling_params": {"custom_params": 5}}),
    "undeclared metric label": ("/generate", {"text": "x", "custom_labels": {"team": "x"}}),
    "embedding overrides of a wrong type": ("/generate", {"text": "x", "positional_embed_overrides": 5}),
    "unknown model in Anthropic's API": ("messages", {"model": "gpt-4o", "messages": CHAT, "max_tokens": 2}),
    "too many tokens in an Anthropic stream": ("messages", {"messages": CHAT, "max_tokens": 10**7, "stream": True}),
    "unknown model in Ollama's API": ("/api/chat", {"model": "gpt-4o", "messages": CHAT}),
    "grammar that does not compile, streaming": (
        "chat/completions",
        {
            "messages": CHAT,
            "stream": True,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        },
    ),
    "local file as an image": ("chat/completions", {"messages": _image("/etc/hostname")}),
    "image that cannot be fetched": ("chat/completions", {"messages": _image("http://127.0.0.1:9/x.png")}),
    "token id that none has": ("/detokenize", {"tokens": [-1]}),
    "no profile to stop": ("/stop_profile", {}),
    "unknown parser": ("/separate_reasoning", {"text": "x", "reasoning_parser": "none"}),
    "chat template option that it sets itself": (
        "chat/completions",
        {"messages": CHAT, "chat_template_kwargs": {"messages": 5}},
    ),
    "unknown lora adapter": ("completions", {"prompt": "x", "lora_path": "absent"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_4xx_with_a_message_and_hurts_nobody(spec_server: Server, model: str, case: str) -> None:
    endpoint, body = BAD[case]
    if isinstance(body, dict):
        body = {"model": model, **body}
    good = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
    with (
        httpx.Client(base_url=spec_server.url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=good) as other,
    ):
        # A good request runs while the bad one comes in.
        lines = other.iter_lines()
        first = next(lines)
        response = http.post(
            endpoint if endpoint.startswith("/") else f"/v1/{endpoint}",
            content=body if isinstance(body, str) else json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        rest = [line for line in lines if line]
    assert 400 <= response.status_code < 500, response.text
    told = response.json()
    error = told.get("error")  # OpenAI's endpoints give an object, /generate gives the sentence itself
    message = told.get("message") or (error if isinstance(error, str) else error["message"])
    assert isinstance(message, str)
    assert len(message) > 10
    assert "Traceback" not in message
    assert ".py" not in message
    assert other.status_code == 200
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert spec_server.healthy()
    assert spec_server.process.poll() is None


def test_unknown_model_is_not_found_for_the_client(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match=model):
        client.chat.completions.create(model="gpt-4o", messages=CHAT)


@pytest.mark.main_job
def test_server_info_tells_patch_set_and_accept_length(spec_server: Server, client: openai.OpenAI, model: str) -> None:
    before = spec_server.get("/server_info")["sglang_patches"]
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=40, temperature=0)
    told = spec_server.get("/server_info")
    after = told["sglang_patches"]
    assert after["release"] == told["version"] == lane_table.release()
    names = [patch["name"] for patch in after["patches"]]
    assert "provenance" in names
    assert all(len(patch["sha256"]) == 64 for patch in after["patches"])
    assert {state["sglang_patches"]["patch_set_id"] for state in told["internal_states"]} == {after["patch_set_id"]}
    assert answer.usage is not None
    # The first token comes from the prefill, all others from verify passes. The last may accept 3 more than is kept.
    # The one that is under way when the request ends (on a GPU, overlap scheduling) is not counted.
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    assert answer.usage.completion_tokens - 1 <= accepted <= answer.usage.completion_tokens + 2
    assert after["verify_passes"] - before["verify_passes"] < accepted
    assert after["accept_length"] == after["accepted_tokens"] / after["verify_passes"]
    for patch in {"pcie-nccl-allreduce", "allreduce-fusion-gate"} & set(names):
        assert after["outcomes"][patch]["result"] == "not needed"  # one rank has no all-reduce


def test_server_info_tells_the_provenance_document(spec_server: Server) -> None:
    told = ask(spec_server.url)
    published = json.loads((REPO / "docs/provenance.schema.json").read_text())
    jsonschema.validate(told.model_dump(), published)
    assert told.code.id == spec_server.get("/server_info")["sglang_patches"]["patch_set_id"]
    assert [process.name for process in told.processes] == ["http", "dp 0 pp 0 tp 0"]
    for process in told.processes:
        assert process.patch_set_id == told.code.id
        assert "libtorch_cpu.so" in {library.name for library in process.libraries}
        assert "patch" in {file.by for file in process.files}
        assert not [file for file in process.files if file.by == "edit"]
    assert told.server_args is not None
    assert told.server_args["speculative_algorithm"] == "EAGLE3"
    assert told.models["target"].config_sha256
    assert told.models["draft"].index_sha256
    assert diff(told, ask(spec_server.url)) == []
    began = time.perf_counter()
    spec_server.get("/server_info")
    assert time.perf_counter() - began < 1  # collected once


@pytest.mark.main_job
def test_accept_length_on_held_out_prompts(spec_server: Server, client: openai.OpenAI, model: str) -> None:
    """Greedy chat completions; other tests of this server sample, so only what these add is counted."""
    prompts = [json.loads(line)["chat"] for line in (REPO / "test/models/prompts.jsonl").read_text().splitlines()][:8]
    before = spec_server.get("/server_info")["sglang_patches"]
    for prompt in prompts:
        message: Any = {"role": "user", "content": prompt}
        client.chat.completions.create(model=model, messages=[message], max_tokens=96, temperature=0)
    after = spec_server.get("/server_info")["sglang_patches"]
    accepted, passes = (after[key] - before[key] for key in ("accepted_tokens", "verify_passes"))
    print(f"accept length over {len(prompts)} held-out chats: {accepted / passes:.2f}")
    assert accepted / passes > 1.8


def test_a_chat_that_names_no_temperature_speculates_well_too(
    spec_server: Server, client: openai.OpenAI, model: str
) -> None:
    """What a newcomer sends first: the model's own generation_config decides how hot it samples."""
    before = spec_server.get("/server_info")["sglang_patches"]
    for prompt in ("Tell me a story.", "Once upon a time", "Fellow citizens", "Call me Ishmael") * 3:
        message: Any = {"role": "user", "content": prompt}
        client.chat.completions.create(model=model, messages=[message], max_tokens=96)
    after = spec_server.get("/server_info")["sglang_patches"]
    accepted, passes = (after[key] - before[key] for key in ("accepted_tokens", "verify_passes"))
    print(f"accept length of chats at the model's own temperature: {accepted / passes:.2f}")
    assert accepted / passes > 1.8


def test_metrics_tell_patch_set_and_accept_length(spec_server: Server, client: openai.OpenAI, model: str) -> None:
    client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    told = spec_server.get("/server_info")["sglang_patches"]
    lines = spec_server.metrics().splitlines()
    (info,) = [line for line in lines if line.startswith("sglang_patches_info{")]
    assert f'patch_set_id="{told["patch_set_id"]}"' in info
    assert f'release="{lane_table.release()}"' in info
    assert "provenance" in info
    assert info.endswith(" 1.0")
    (length,) = [line for line in lines if line.startswith("sglang_patches_accept_length{")]
    assert float(length.rsplit(" ", 1)[1]) == pytest.approx(told["accept_length"])


def test_the_person_who_started_it_is_told_when_it_is_ready(spec_server: Server) -> None:
    deadline = time.monotonic() + 30
    while "serve: ready after" not in spec_server.log() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert f"curl -s {spec_server.url}/v1/chat/completions" in spec_server.log()


def test_every_process_logs_the_patch_set_once(spec_server: Server) -> None:
    identifier = spec_server.get("/server_info")["sglang_patches"]["patch_set_id"]
    lines = [line for line in spec_server.log().splitlines() if identifier in line]
    pids = [line.split("pid ")[1].partition(":")[0] for line in lines]
    assert len(pids) == len(set(pids)), lines
    # Every process that runs patched code: the one that was started and the scheduler at least.
    assert str(spec_server.process.pid) in pids
    schedulers = [str(p.pid) for p in spec_server.tree() if "sglang::scheduler" in " ".join(p.cmdline())]
    assert len(schedulers) == 1
    assert set(schedulers) <= set(pids)
