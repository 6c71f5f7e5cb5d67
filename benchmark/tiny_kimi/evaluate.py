"""Step 6: what the pair does on held-out prompts: loss, accept length of greedy chains, sample text.

The target continues every prompt greedily. A chain drafted from any position can be scored against that continuation
in one unrolled forward, because a draft token counts only while all before it were right, and then the draft was fed
the true tokens. The walk over the positions is the server's: after `a` accepted tokens and one of the target's own,
the next chain begins `a + 1` tokens on. Everything is float32 from the saved weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmark.tiny_kimi.checkpoint import draft_layer_ids, load_text_model
from benchmark.tiny_kimi.draft import Capture
from benchmark.tiny_kimi.draft_model import Eagle3Draft
from benchmark.tiny_kimi.experts import default_device, use_all_experts
from benchmark.tiny_kimi.progress import Progress
from benchmark.tiny_kimi.target import held_out_loss
from benchmark.tiny_kimi.tokenizer import EOS_ID, IM_END_ID


def load_draft(folder: Path) -> tuple[Eagle3Draft, Tensor]:
    """The draft of a checkpoint in float32, and its (draft vocab,) target ids."""
    state = load_file(folder / "model.safetensors")
    offsets = state.pop("d2t")
    del state["t2d"]
    draft = Eagle3Draft(len(draft_layer_ids(folder)))
    draft.load_state_dict(state, strict=True)
    return draft.float().eval(), offsets + torch.arange(len(offsets))


def encode_prompts(tokenizer: PreTrainedTokenizerBase, path: Path, form: str) -> list[list[int]]:
    """Token ids of every prompt, as plain text or as a chat that awaits the assistant."""
    prompts = [json.loads(line) for line in path.open()]
    if form == "text":
        return [tokenizer(prompt["text"], add_special_tokens=False)["input_ids"] for prompt in prompts]
    chats = [[{"role": "user", "content": prompt["chat"]}] for prompt in prompts]
    rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def chain_cycles(
    capture: Capture, draft: Eagle3Draft, vocabulary: Tensor, ids: list[int], prompt: int, steps: int
) -> list[int]:
    """Tokens gained by each draft-verify cycle over the greedy continuation `ids[prompt:]`, chains of `steps`."""
    device = vocabulary.device
    tokens = torch.tensor([ids], device=device)
    aux, _ = capture(tokens)
    slots = len(ids) - 1 - steps
    embeds = capture.model.model.embed_tokens(tokens[:, 1:])
    step_logits = draft(aux[:, :slots], embeds, steps)
    guesses = torch.stack([vocabulary[logits[0].argmax(-1)] for logits in step_logits])
    right = torch.stack([guesses[step] == tokens[0, 2 + step : 2 + step + slots] for step in range(steps)])
    accepted = right.int().cumprod(0).sum(0).tolist()
    cycles = []
    slot = prompt - 1  # the first token after the prompt is the target's own
    while slot < slots:
        cycles.append(accepted[slot] + 1)
        slot += cycles[-1]
    return cycles


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"))
    parser.add_argument("--target", type=Path, default=Path("test/models/tiny-kimi"))
    parser.add_argument("--draft", type=Path, default=Path("test/models/tiny-kimi-eagle3"))
    parser.add_argument("--prompts", type=Path, default=Path("test/models/prompts.jsonl"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    arguments = parser.parse_args()
    device = default_device()
    model = load_text_model(arguments.target, device=device)
    use_all_experts(model)
    capture = Capture(model, draft_layer_ids(arguments.draft))
    draft, vocabulary = load_draft(arguments.draft)
    draft, vocabulary = draft.to(device), vocabulary.to(device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    if (arguments.work / "held_out.npy").exists():
        print(f"held-out loss {held_out_loss(model, arguments.work):.4f} nats a token")
    for form in ("text", "chat"):
        progress = Progress(f"evaluate {form}", "tokens")
        prompts = encode_prompts(tokenizer, arguments.prompts, form)
        padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device)
        output = model.generate(  # type: ignore[misc]  # the library types `self` as a protocol
            **padded, do_sample=False, max_new_tokens=arguments.tokens, eos_token_id=[IM_END_ID, EOS_ID], pad_token_id=0
        )
        new = [row[padded["input_ids"].shape[1] :].tolist() for row in output]
        new = [[token for token in row if token != 0] for row in new]
        cycles: dict[int, list[int]] = {steps: [] for steps in (1, 3, 5)}
        for steps, gained in cycles.items():
            for prompt, row in zip(prompts, new, strict=True):
                if len(row) > steps + 2:
                    gained += chain_cycles(capture, draft, vocabulary, prompt + row, len(prompt), steps)
        progress.finish(sum(map(len, new)))
        lengths = ", ".join(f"steps {steps}: {sum(gained) / len(gained):.3f}" for steps, gained in cycles.items())
        ended = sum(row[-1] in (IM_END_ID, EOS_ID) for row in new)
        print(f"{form}: {len(prompts)} prompts, {ended} ended by themselves; accept length {lengths}")
        for index in range(0, len(new), max(1, len(new) // arguments.samples)):
            print(f"  [{tokenizer.decode(prompts[index])}] -> {tokenizer.decode(new[index])}")


if __name__ == "__main__":
    main()
