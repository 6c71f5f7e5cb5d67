"""The prompts that every turn sends: token ids, so that their lengths are exact whatever the tokenizer does.

Either a committed file (`workloads/tiny-kimi.json`: texts of test/models/prompts.jsonl in the bundled model's tokens),
or drawn from a seed for a model's vocabulary. Drawn ids are uniform, hence meaningless to the model: they tell the time
that a prompt and an answer of a length take, and give an accept length that says nothing about real text.

    python -m sglang_patches.bench.workload TOKENIZER.json PROMPTS.jsonl --length 64     # writes a workload file
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_patches import named_model
from sglang_patches.bench.model import Workload
from sglang_patches.draft.checkpoint import local_folder
from sglang_patches.errors import PatchError

FILES = Path(__file__).with_name("workloads")


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length.

    Attributes:
        name: for people.
        vocabulary: every id is below it.
        ids: one list of token ids a prompt, all equally long.
    """

    name: str
    vocabulary: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Of each prompt."""
        return len(self.ids[0])

    def sha256(self) -> str:
        """Over all ids in order, as decimals joined by commas, a line a prompt."""
        return hashlib.sha256("\n".join(",".join(map(str, prompt)) for prompt in self.ids).encode()).hexdigest()

    def first(self, count: int) -> Prompts:
        """The first `count` prompts.

        Raises:
            PatchError: there are fewer.
        """
        if not 1 <= count <= len(self.ids):
            raise PatchError(
                f"workload {self.name}: {count} prompts asked for\n  expected   1 to {len(self.ids)}\n"
                f"  remedy     a smaller --prompts, or drawn prompts, of which there are any number: --prompt-tokens N"
            )
        return Prompts(self.name, self.vocabulary, self.ids[:count])

    def workload(self, output_tokens: int, concurrency: int, warm_up: int) -> Workload:
        """How these prompts are asked, as a result tells it; `Workload` says what the arguments are."""
        return Workload(
            name=self.name, prompts_sha256=self.sha256(), prompts=len(self.ids), prompt_tokens=self.tokens,
            output_tokens=output_tokens, concurrency=concurrency, warm_up=warm_up,
        )  # fmt: skip


def draw(tokens: int, prompts: int, vocabulary: int, seed: int) -> Prompts:
    """Prompts of uniformly drawn ids, without the first and last 1/64 of the vocabulary, where special tokens are.

    Equal arguments give equal ids on every machine and Python (`random.Random` promises it for `random()`).

    Raises:
        PatchError: a number is too small.
    """
    for name, value, least in (("tokens", tokens, 1), ("prompts", prompts, 1), ("vocabulary", vocabulary, 256)):
        if value < least:
            raise PatchError(f"drawn prompts: {name} {value}\n  expected   {least} or more")
    rng, low = random.Random(seed), vocabulary // 64
    span = vocabulary - 2 * low
    ids = tuple(tuple(low + int(rng.random() * span) for _ in range(tokens)) for _ in range(prompts))
    return Prompts(f"drawn-{tokens}x{prompts}-seed{seed}", vocabulary, ids)


def read(file: Path) -> Prompts:
    """The prompts in a workload file.

    Raises:
        PatchError: it is not such a file, its prompts differ in length, or an id is outside its vocabulary.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = Prompts(data["name"], data["vocabulary"], tuple(tuple(prompt) for prompt in data["prompts"]))
        sound = len({len(prompt) for prompt in found.ids}) == 1 and found.tokens > 0
        sound = sound and all(type(id_) is int and 0 <= id_ < found.vocabulary for p in found.ids for id_ in p)
    except (ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{file}: not a workload file: {error!r}\n  expected   {_FORMAT}") from None
    if not sound:
        raise PatchError(
            f"{file}: prompts differ in length, or an id is outside the vocabulary\n  expected   {_FORMAT}"
        )
    return found


_FORMAT = '{"name": TEXT, "vocabulary": N, "prompts": [[ID, ...], ...]}, all prompts equally long'


def vocabulary_of(model: str) -> int | None:
    """Vocabulary size in a model's config.json; None where that cannot be told (a hub name that is not here)."""
    folder = local_folder(model, None, None)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def choose(model: str, *, file: Path | None, prompts: int, prompt_tokens: int, vocabulary: int, seed: int) -> Prompts:
    """The prompts for a model, by what a person asked for.

    Args:
        model: folder or hub name.
        file: a workload file; None: the bundled one, where its vocabulary is the model's.
        prompts: how many; 0: all of the file, or 16 drawn ones.
        prompt_tokens: draw prompts of this length; 0: do not.
        vocabulary: to draw from; 0: the model's.
        seed: of the drawing.

    Raises:
        PatchError: nothing fits, and what to give.
    """
    size = vocabulary_of(model)
    if prompt_tokens:
        if file is not None:
            raise PatchError("a workload file and drawn prompts (--prompt-tokens) exclude each other")
        if not (vocabulary or size):
            raise PatchError(
                f"{model}: {_unknown(model)}, so its vocabulary is unknown\n  remedy     --vocabulary N{_fetch(model)}"
            )
        return draw(prompt_tokens, prompts or 16, vocabulary or size or 0, seed)
    found = read(file or FILES / "tiny-kimi.json")
    if file is None and size is None:
        raise PatchError(
            f"{model}: {_unknown(model)}, so its vocabulary is unknown, and the prompts {found.name} are of "
            f"{found.vocabulary} tokens\n  remedy     --prompt-tokens N --vocabulary N{_fetch(model)}"
        )
    if size is not None and (size < found.vocabulary or (file is None and size != found.vocabulary)):
        raise PatchError(
            f"{model}: vocabulary {size}, and the prompts {found.name} are of {found.vocabulary} tokens\n"
            f"  remedy     --prompt-tokens N draws prompts for any model"
        )
    return found.first(prompts or len(found.ids))


def _unknown(model: str) -> str:
    missing = named_model.absence(model)
    return missing.seen if missing else "its config.json has no vocab_size"


def _fetch(model: str) -> str:
    """How else the vocabulary becomes known, as the end of a remedy."""
    missing = named_model.absence(model)
    return f", or name a model that is here: {missing.remedy}" if missing else ""


def tokenized(tokenizer: Path, texts: Sequence[str], length: int) -> Prompts:
    """Prompts of exactly `length` tokens: the texts, end to end, cut where one is full; the next text begins anew.

    Args:
        tokenizer: a tokenizer.json.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    ids: list[tuple[int, ...]] = []
    filling: list[int] = []
    for text in texts:
        filling += encoder.encode(text, add_special_tokens=False).ids
        if len(filling) >= length:
            ids.append(tuple(filling[:length]))
            filling = []
    return Prompts(tokenizer.parent.name, encoder.get_vocab_size(), tuple(ids))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a workload file to standard output."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json of the model")
    parser.add_argument("texts", type=Path, help='a text a line, as {"text": ...}')
    parser.add_argument("--length", type=int, default=64, help="tokens of each prompt (default 64)")
    given = parser.parse_args(arguments)
    texts = [json.loads(line)["text"] for line in given.texts.read_text(encoding="utf-8").splitlines()]
    found = tokenized(given.tokenizer, texts, given.length)
    lines = ",\n  ".join(json.dumps(prompt, separators=(",", ":")) for prompt in found.ids)
    print(f'{{"name": "{found.name}", "vocabulary": {found.vocabulary}, "prompts": [\n  {lines}\n]}}')


if __name__ == "__main__":
    main()
