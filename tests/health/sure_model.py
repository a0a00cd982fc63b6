"""The init project's model, so sure of itself that it always says the same."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from seamflow.cli.init_project.template import tiny_model


def main() -> None:
    """Write OUT/model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    tokenizer = tiny_model.make_tokenizer()
    model = tiny_model.make_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(10_000.0)
    model.save_pretrained(given.out / "model")
    tokenizer.save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
