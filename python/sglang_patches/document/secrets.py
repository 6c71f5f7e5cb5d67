"""Keeping secrets out of a document: which environment variables go in, and what is masked in any value.

Names decide first, values second, so a key under a harmless name is found where it looks like one. When in doubt it is
masked: a value too few in a document is a smaller harm than a key in a result that is published.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

MASK = "***"

_ALLOWED = re.compile(
    r"(SGLANG|SGL|NCCL|CUDA|CUBLAS|CUDNN|NVIDIA|NVSHMEM|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|FLASHINFER|OMP|MKL|KMP|GOMP|"
    r"OPENBLAS|GLOO|UCX|MC|MOONCAKE|DG|DEEPEP|TOKENIZERS|HF_HUB|TRANSFORMERS)_[A-Z0-9_]+|SGLANG_PATCHES|LD_PRELOAD|"
    r"LD_LIBRARY_PATH|PYTHONHASHSEED|PYTHONOPTIMIZE"
)
_SECRET_WORDS = frozenset((
    "key", "secret", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "private",
    "pwd", "pat", "sas", "sig", "signature", "passphrase", "keyfile", "keyfiles", "cred", "creds", "jwt", "psk",
))  # fmt: skip
_SECRET_PARTS = ("password", "passwd", "secret", "apikey", "credential", "accesskey", "authtoken", "privatekey")
# Words that are secrets under some names and counts under others: `max_total_tokens`, `experts_per_token`.
_COUNTED = frozenset(("tokens", "keys", "token"))
# Short for a password at the end of a name, or a switch of a compiler's pass: `DB_PASS`, `TORCHINDUCTOR_X_PASS=1`.
_ENDINGS = frozenset(("pass", "pw"))
# Upstream's parser takes any beginning of an option that is no other's: `--api-k KEY` serves with that key. From four
# characters on, because our own commands have an option --a.
_KEY_OPTIONS = ("--api-key", "--admin-api-key")
_SHORTEST = 4
# Upstream's arguments that have such a word, a value that is no count, and no secret.
_HARMLESS = frozenset((
    "speculative_token_map", "bucket_time_to_first_token", "prompt_tokens_buckets", "generation_tokens_buckets",
    "sglang_patches_oea_tokens",
))  # fmt: skip
_NUMBER = r"-?\d{1,9}(\.\d{1,9})?"
# One, or a list of a few: `--draft-tokens 2,4,8`.
_COUNT = re.compile(rf"{_NUMBER}(,{_NUMBER}){{0,31}}|true|false|none|null|", re.IGNORECASE)

_VALUES = (
    # scheme://user:password@host, also with an @ in the password, and user:password@host
    (re.compile(r"(?<=://)[^/\s\"']+(?=@)"), MASK),
    # and with a / in the password, which is no port with a path behind it
    (re.compile(r"(?<=://)[^/\s\"':@]{0,200}:(?!\d+/)[^\s\"'@]{1,200}(?=@)"), MASK),
    (re.compile(r"(?<![\w./-])[\w.-]+:[^\s:/@\"']+(?=@[\w.-])"), MASK),
    (re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?)[^\"'\n,;}]+"), rf"\1{MASK}"),
    # -----BEGIN ... PRIVATE KEY----- up to its end, if it has one
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
    # Keys by their makers' prefixes.
    (
        re.compile(
            r"\b(hf_|sk-|pk-|rk-|gh[opusr]_|github_pat_|glpat-|xox[abprs]-|nvapi-|AIza|dop_v1_|npm_|pypi-|gsk_|r8_|ya29\.)"
            r"[\w.-]{8,}"
        ),
        MASK,
    ),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b"), MASK),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{4,}(\.[\w-]*)?"), MASK),
    # A long run of upper case, lower case and digits is no word, path, UUID or hexadecimal hash.
    (
        re.compile(r"(?<![\w/+=-])(?=[^\W_]*[a-z])(?=[^\W_]*[A-Z])(?=[^\W_]*\d)[A-Za-z0-9+]{32,}={0,2}(?![\w/+=-])"),
        MASK,
    ),
)
# Names start at a boundary and are bounded, or long values would take time that grows with their square.
# key=value and "key": "value" inside a value: query strings, headers, JSON in an argument.
_NAME = re.compile(r"""(?P<name>(?<![\w-])[\w-]{1,200})(["']?\s*[=:]\s*|(?<=[\w-])["']?\s+)""")
_VALUE = re.compile(r""""[^"]*"?|'[^']*'?|[^\s"'&,;}{]+""")
# Behind an option everything up to the next blank is its value.
_OPTION_VALUE = re.compile(r""""[^"]*"?|'[^']*'?|\S+""")


def is_secret(name: str, value: object = "x") -> bool:
    """Whether a variable, argument or field of this name keeps its value to itself."""
    plain = name.strip().lstrip("-").replace("-", "_")
    if plain.lower() in _HARMLESS:
        return False
    option = name.strip()
    if len(option) >= _SHORTEST and any(full.startswith(option) for full in _KEY_OPTIONS):
        return value is not None and not isinstance(value, bool) and value != ""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", plain).lower().split("_")
    joined = plain.lower().replace("_", "")
    if not _SECRET_WORDS.isdisjoint(words) or any(part in joined for part in _SECRET_PARTS):
        return value is not None and not isinstance(value, bool) and value != ""
    if words[-1] == "token" and words[-2:-1] != ["per"]:
        return value is not None and not isinstance(value, bool) and value != ""
    counted = words[-1] in _ENDINGS or words[-1].endswith("token") or not _COUNTED.isdisjoint(words)
    return counted and not _COUNT.fullmatch(str(value))


def mask_text(text: str) -> str:
    """The text without what looks like a secret in it."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(mask(json.loads(text)))
        except (ValueError, RecursionError):
            pass  # not JSON after all
    for pattern, put in _VALUES:
        text = pattern.sub(put, text)
    return _pairs(text)


def _pairs(text: str) -> str:
    """The text without the values that stand behind the name of a secret.

    What stands behind another name is looked at in its turn: `https:` is a name, and what follows may have `?token=`.
    """
    out, kept = [], 0
    for match in _NAME.finditer(text):
        # Apart by blanks, as in a command line: there a name is an option.
        option = match[2].strip("\"'").isspace()
        if match.start() < kept or (option and not match["name"].startswith("--")) or not is_secret(match["name"]):
            continue
        pattern = _OPTION_VALUE if match["name"].startswith("--") else _VALUE
        value = pattern.match(text, match.end())
        if value and not (option and value[0].startswith("-")) and is_secret(match["name"], value[0].strip("\"'")):
            out += [text[kept : match.end()], MASK]
            kept = value.end()
    return "".join([*out, text[kept:]])


def mask(value: Any, name: str = "") -> Any:
    """JSON-able data without secrets: by the name of every field, and by what strings look like."""
    if name and is_secret(name, value):
        return MASK
    if isinstance(value, Mapping):
        return {mask_text(str(key)): mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [mask(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Enum):
        return mask(value.value)
    # Not `str` of just anything: it may hold an address in memory, which differs in every process.
    return mask_text(str(value)) if isinstance(value, (str, os.PathLike)) else f"<{type(value).__qualname__}>"


def command(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets: `--api-key X` and `--api-key=X` keep their first part."""
    out: list[str] = []
    hide = ""
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            hide = "" if equals else name
            secret = equals and is_secret(name, value)
            out.append(f"{name}={MASK if secret else mask_text(value)}" if equals else mask_text(argument))
        else:
            # Options may take several values, so the name holds until the next option.
            out.append(MASK if hide and is_secret(hide, argument) else mask_text(argument))
    return out


def line(arguments: Sequence[str], environ: Mapping[str, str], before: Mapping[str, str]) -> str:
    """`command` for a shell, with the variables in front that ``environ`` has and ``before``, the shell's, has not."""
    changed = {key: value for key, value in environ.items() if before.get(key) != value}
    # Quoted behind the sign: a shell takes 'A=b c' for a program's name.
    assignments = [f"{key}={shlex.quote(value)}" for key, value in sorted(mask(changed).items())]
    return " ".join([*assignments, shlex.join(command(arguments))])


# Variables that make a command do something else. Of those in `_ALLOWED`, an image sets many for itself: they do not.
# NCCL_VERSION is of NVIDIA's images, too: the package that is in them; NCCL reads no such variable.
_STEERS = re.compile(
    r"SGLANG_PATCHES|(?!NCCL_VERSION)(SGLANG|SGL|NCCL|FLASHINFER|TRITON|TORCHINDUCTOR|PYTORCH)_\w+|CUDA_VISIBLE_DEVICES|"
    r"CUDA_DEVICE_ORDER|OMP_NUM_THREADS"
)
_PLACES = re.compile(r"\w+_(CACHE|CACHE_DIR|CACHE_DIRECTORY|HOME)|SGLANG_PATCHES_DIR")


def again(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`command` with the variables that steer it in front, by ``env``: what a person has to type to do the same.

    Left out are secrets, variables that only say where files are kept, and GPUs named by UUID.
    """
    from sglang_patches.document.unnamed import unnamed  # which needs `MASK`

    told = environment({name: value for name, value in environ.items() if _STEERS.fullmatch(name)})
    words = [
        f"{name}={value}"
        for name, value in told.items()
        if MASK not in value and unnamed(value) == value and not _PLACES.fullmatch(name)
    ]
    return [*(["env", *words] if words else []), *command(arguments)]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change what is computed or how fast, by name, without secrets."""
    return {
        name: MASK if is_secret(name, value) else mask_text(value)
        for name, value in sorted(environ.items())
        if _ALLOWED.fullmatch(name)
    }
