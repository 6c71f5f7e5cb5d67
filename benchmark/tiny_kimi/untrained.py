"""Write both checkpoints with random weights: enough to start a server, before or without training."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from benchmark.tiny_kimi.checkpoint import DRAFT_VOCAB_SIZE, save_draft, save_target, text_config
from benchmark.tiny_kimi.draft_model import Eagle3Draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(text_config())
    save_target(model, arguments.target)
    draft = Eagle3Draft()
    save_draft(draft.state_dict(), torch.arange(DRAFT_VOCAB_SIZE), arguments.draft)
    for name, module in (("target", model), ("draft", draft)):
        print(f"{name}: {sum(parameter.numel() for parameter in module.parameters()) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
