"""No secret gets into a provenance document: not by its name, not under another name, not inside a longer value."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.server_args import ServerArgs

from sglang_patches import api_key
from sglang_patches.document import secrets

SECRET = "Sesame77opensesame"
NAMES = (
    "api_key", "admin-api-key", "HF_TOKEN", "apiKey", "ssl_keyfile_password", "AWS_SECRET_ACCESS_KEY", "authToken",
    "PASSWD", "client_secret", "credentials", "Authorization", "private_key", "SGLANG_ADMIN_PWD", "access_token",
    "watermark_key_b", "accessKey", "db_pass", "s3_creds", "jwt", "HFTOKEN",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_gives_away_is_masked_everywhere(name: str) -> None:
    option = "--" + name.replace("_", "-")
    assert secrets.command(["run", option, SECRET, "--port", "1"]) == ["run", option, "***", "--port", "1"]
    assert secrets.command([f"{option}={SECRET}"]) == [f"{option}=***"]
    nested: Any = {"a": [{name: SECRET}, {name: [SECRET]}, {name: {"x": SECRET}}], "text": json.dumps({name: SECRET})}
    for told in (
        secrets.mask(nested),
        secrets.mask_text(f"https://host/x?a=1&{name}={SECRET}&b=2"),
        secrets.mask_text(f"https://host/x?{name}={SECRET}&b=2"),  # the scheme is a name with a value, too
        secrets.mask_text(f"a:b={name}={SECRET}"),
        secrets.mask_text(f"{name}: {SECRET}"),
        secrets.mask_text(f"--port 1 {option} {SECRET} --x"),
        secrets.command(["--model-loader-extra-config", json.dumps({"x": {name: SECRET}})]),
        secrets.command(["--json", f"{{'{name}': '{SECRET}'}}"]),
        secrets.environment({f"SGLANG_{name.upper().replace('-', '_')}": SECRET}),
    ):
        assert SECRET not in json.dumps(told)


@pytest.mark.parametrize(
    "value",
    [
        "https://user:opensesame@host/x",
        "redis://:opensesame@host:6379",
        "redis://:open/opensesame@host:6379",
        "redis://user:opensesame/+@host:6379",
        "postgres://opensesame@host",
        "https://user:a@opensesame@host/x",
        "user:opensesame@proxy:3128",
        "Authorization: Token opensesame",
        "{'Authorization': 'opensesame', oops",
        "password='open sesame opensesame' x",
        "hf_opensesameopensesame",
        "sk-proj-opensesame1234",
        "ghp_opensesameopensesame",
        "Authorization: Bearer opensesame.abc",
        "AKIAOPENSESAME123456",
        "eyJopensesame.eyJopensesame.opensesame",
        "-----BEGIN RSA PRIVATE KEY-----\nopensesame\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nopensesame",
        "a b opensesameOPENSESAME0123456789abcdef== c",
    ],
)
def test_what_looks_like_a_secret_is_masked_under_any_name(value: str) -> None:
    for told in (
        secrets.mask({"harmless": value}),
        secrets.command(["--harmless", value]),
        secrets.command([f"--harmless={value}", value]),
        secrets.environment({"SGLANG_HARMLESS": value}),
    ):
        assert "opensesame" not in json.dumps(told).lower()
        assert "***" in json.dumps(told)


@pytest.mark.parametrize(
    "value",
    [
        "/models/Kimi-K2.5/snapshots/0123456789abcdef0123456789abcdef01234567",
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "moonshotai/Kimi-K2.5",
        "http://127.0.0.1:30000/v1",
        "https://host:8080/project@v1",
        "--forward-pass-metrics-worker-id w1 --tp 2",
        "0123456789abcdef" * 4,
        "^mlx5_0,eth0",
        "a=1,b:2;c='three four'",
        "expandable_segments:True",
        '{"temperature": 0.3}',
    ],
)
def test_what_tells_something_is_kept(value: str) -> None:
    assert secrets.mask_text(value) == value
    assert secrets.environment({"NCCL_X": value}) == {"NCCL_X": value}


def test_counts_of_tokens_are_kept() -> None:
    args = {
        "max_total_tokens": 16384, "speculative_num_draft_tokens": 4, "swa_full_tokens_ratio": 0.8, "api_key": None,
        "experts_per_token": 8, "speculative_token_map": "a/b.pt", "enable_auth": False,
    }  # fmt: skip
    assert secrets.mask(args) == args
    assert secrets.command(["--max-total-tokens", "16384"]) == ["--max-total-tokens", "16384"]
    assert secrets.mask({"max_tokens": "opensesame"}) == {"max_tokens": "***"}
    # A list of counts, such as bench verify-step has; nothing else with a comma.
    assert secrets.command(["--draft-tokens", "2,4,8"]) == ["--draft-tokens", "2,4,8"]
    assert secrets.command(["--draft-tokens", "4,open"]) == ["--draft-tokens", "***"]
    assert secrets.mask({"keys": "12,,13"}) == {"keys": "***"}


def test_what_upstreams_parser_takes_for_a_keys_option_is_masked() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    for option in api_key.VARIABLES:
        known = [word for word in parser._option_string_actions if word.startswith("--")]
        short = [option[:length] for length in range(4, len(option) + 1)]
        meant = [word for word in short if [full for full in known if full.startswith(word)] == [option]]
        assert option in meant
        assert f"--{option[2:5]}" in meant
        for word in meant:
            assert secrets.command([word, SECRET, f"{word}={SECRET}"]) == [word, "***", f"{word}=***"]
    assert secrets.command(["bench", "ab", "--a", "none"]) == ["bench", "ab", "--a", "none"]


@pytest.mark.parametrize("value", ["a,b;c", "a{b}&c", "$'KEY'", "'a b'"])
@pytest.mark.parametrize("option", ["--api-key ", "--api-key=", "'--api-key' ", "--api-k "])
def test_a_key_behind_an_option_ends_at_a_blank(option: str, value: str) -> None:
    assert secrets.mask_text(f"serve {option}{value} --port 1") == f"serve {option}*** --port 1"


def test_the_last_part_of_a_name_may_be_a_compilers_pass() -> None:
    environ = {"TORCHINDUCTOR_GROUP_BATCH_PASS": "1", "SGLANG_DB_PASS": SECRET}
    assert secrets.environment(environ) == {"SGLANG_DB_PASS": "***", "TORCHINDUCTOR_GROUP_BATCH_PASS": "1"}


def test_a_line_for_a_shell_has_what_the_shell_lacks_in_front() -> None:
    before = {"HOME": "/root", "SGLANG_PATCHES": "all"}
    environ = {**before, "SGLANG_USE_CPU_ENGINE": "1", "X_TEXT": "a b", "SGLANG_API_KEY": SECRET}
    assert secrets.line(["python", "-m", "x", "--api-key", SECRET], environ, before) == (
        "SGLANG_API_KEY='***' SGLANG_USE_CPU_ENGINE=1 X_TEXT='a b' python -m x --api-key '***'"
    )


def test_only_listed_variables_are_told() -> None:
    environ = {"HOME": "/root", "PATH": "/bin", "AWS_REGION": "x", "MY_NCCL_PROTO": "LL", "NCCL_PROTO": "LL"}
    assert secrets.environment(environ) == {"NCCL_PROTO": "LL"}
    kept = dict.fromkeys(("SGLANG_X", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "OMP_NUM_THREADS", "TRITON_X"), "1")
    assert secrets.environment(kept) == dict(sorted(kept.items()))


def test_what_is_no_json_becomes_json_without_addresses() -> None:
    told = secrets.mask({"path": Path("/a"), "call": print, "set": {1}, "odd": object()})
    assert json.loads(json.dumps(told)) == told
    assert "0x" not in json.dumps(told)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_masking_never_fails_and_masks_what_is_below_a_secret_name(data: Any) -> None:
    json.dumps(secrets.mask(data))
    assert secrets.mask({"api_key": SECRET, "data": data})["api_key"] == "***"


@given(st.text(alphabet=st.characters(exclude_characters=" \"'&,;{}[]@/"), min_size=1), st.lists(st.text()))
def test_the_value_of_an_option_is_masked_whatever_stands_around_it(value: str, around: list[str]) -> None:
    told = secrets.command([*around, f"--api-key=q7{value}", "--api-key", f"q7{value}", *around])
    assert told[len(around) : len(around) + 3] == ["--api-key=***", "--api-key", "***"]


@pytest.mark.parametrize("piece", ["a", "eyJ", "a:", "key='", "a.-", "A1b", "://", "a ", "--a ", "--key ", "x=key:"])
def test_long_values_take_no_time(piece: str) -> None:
    began = time.perf_counter()
    secrets.mask_text(piece * 10_000)
    assert time.perf_counter() - began < 1


def test_a_command_again_has_the_variables_that_steer_it() -> None:
    environ = {
        "SGLANG_PATCHES": "-mla-verify-split-kv",
        "SGLANG_PATCHES_MLA_VERIFY_SPLITS": "8",
        "SGLANG_SIMULATE_ACC_LEN": "2.69",
        "NCCL_ALGO": "Ring, Tree",
        "SGLANG_API_KEY": "hunter2",
        "SGLANG_PATCHES_CACHE": "/home/me/cache",
        "SGLANG_PATCHES_DIR": "/home/me/patches",
        "NVIDIA_REQUIRE_CUDA": "cuda>=13",
        "NCCL_VERSION": "2.28.3-1",
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "GPU-8f3e1c2a-0b1d-4e5f-8a9b-0c1d2e3f4a5b",
    }
    words = secrets.again(["sglang-patches", "bench", "--api-key", "hunter2"], environ)
    assert shlex.join(words) == (
        "env 'NCCL_ALGO=Ring, Tree' SGLANG_PATCHES=-mla-verify-split-kv SGLANG_PATCHES_MLA_VERIFY_SPLITS=8 "
        "SGLANG_SIMULATE_ACC_LEN=2.69 sglang-patches bench --api-key '***'"
    )
    assert secrets.again(["sglang-patches"], {"HOME": "/"}) == ["sglang-patches"]
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert secrets.again(["x"], environ) == ["env", "CUDA_VISIBLE_DEVICES=0,1", "x"]
