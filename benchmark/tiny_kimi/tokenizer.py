"""Step 2: train the byte-level BPE tokenizer and encode the corpus.

Writes the tokenizer and processor files into the target's folder, and into `<work>`: `plain.npy` (training documents,
each followed by `[EOS]`), `chat.npy` with `chat_rows.npy` (conversations and where each begins) and `held_out.npy`;
token ids are uint16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmark.tiny_kimi.corpus import sentences

VOCAB_SIZE = 4096
SPECIAL_TOKENS = [
    "[PAD]",
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
]
PAD_ID, BOS_ID, EOS_ID, IM_END_ID = range(4)
MEDIA_PAD_ID = SPECIAL_TOKENS.index("<|media_pad|>")

# Kimi's turn format: a role marker, the role's name, a divider, the content, an end marker.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set marker = message.role if message.role in ('user', 'assistant') else 'system' -%}
<|im_{{ marker }}|>{{ message.role }}<|im_middle|>
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type in ('image', 'image_url') -%}
<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
INSTRUCTIONS = ("", "", "Continue: ", "Continue: ", "Continue this passage: ", "Please go on: ")


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCAB_SIZE` entries; the special tokens take the first ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        additional_special_tokens=SPECIAL_TOKENS[4:],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that carries the chat template."""
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["chat_template"] = CHAT_TEMPLATE
    path.write_text(json.dumps(config, indent=2) + "\n")


def conversations(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Cut a document into (user message, assistant message) pairs.

    The user gives 12 to 50 words that begin at a sentence; the assistant goes on, mid-sentence or not, to the end of a
    sentence 25 to 170 words later.
    """
    pieces = sentences(text)[rng.randrange(3) :]
    while pieces:
        prompt: list[str] = []
        wanted = rng.randint(12, 50)
        while pieces and len(prompt) < wanted:
            prompt += pieces.pop(0).split()
        cut = len(prompt) if rng.random() < 0.4 else rng.randint(min(12, len(prompt)), len(prompt))
        answer = prompt[cut:]
        wanted = rng.randint(25, 140)
        while pieces and len(answer) < wanted:
            answer += pieces.pop(0).split()
        if len(answer) >= 12:
            yield rng.choice(INSTRUCTIONS) + " ".join(prompt[:cut]), " ".join(answer[:220])


def render(user: str, assistant: str) -> str:
    """One finished exchange in the chat template's form."""
    return f"<|im_user|>user<|im_middle|>{user}<|im_end|><|im_assistant|>assistant<|im_middle|>{assistant}<|im_end|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"))
    parser.add_argument("--target", type=Path, default=Path("test/models/tiny-kimi"))
    parser.add_argument("--chat-passes", type=int, default=3, help="how often each document is cut into conversations")
    arguments = parser.parse_args()
    started = time.perf_counter()
    documents = [json.loads(line) for line in (arguments.work / "documents.jsonl").open()]
    train = [document["text"] for document in documents if document["split"] == "train"]
    held_out = [document["text"] for document in documents if document["split"] != "train"]
    arguments.target.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(iter(train))
    save_tokenizer(tokenizer, arguments.target)
    print(f"tokenizer of {len(tokenizer)} entries; {time.perf_counter() - started:.1f} s", flush=True)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    def joined(texts: list[str]) -> np.ndarray:
        return np.array([token for ids in encode(texts) for token in (*ids, EOS_ID)], dtype=np.uint16)

    rng = random.Random(0)
    exchanges = [
        render(*pair) for _ in range(arguments.chat_passes) for text in train for pair in conversations(text, rng)
    ]
    rng.shuffle(exchanges)
    encoded = encode(exchanges)
    lengths = np.array([len(ids) for ids in encoded])
    arrays = {
        "plain": joined(train),
        "held_out": joined(held_out),
        "chat": np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoded]),
        "chat_rows": np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
    }
    for name, array in arrays.items():
        np.save(arguments.work / f"{name}.npy", array)
        print(f"{name}: {len(array)}", flush=True)
    bytes_per_token = sum(len(text.encode()) for text in held_out) / len(arrays["held_out"])
    print(f"{bytes_per_token:.2f} held-out bytes a token; {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
