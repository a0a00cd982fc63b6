"""The init project's model, untrained."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from seamflow.cli.init_project.template import tiny_model


def main(logit_scale: float = 1.0) -> None:
    """Write OUT/model, whose logits are multiplied by `logit_scale`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(logit_scale)
    model.save_pretrained(given.out / "model")
    tokenizer.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
