"""`python -m trainer.model.adapted_layers --config FILE`: which layers get an adapter, in one line.

The model is made without memory; nothing is loaded. `seamflow train --dry-run` runs it.
"""

from __future__ import annotations

import sys

import torch

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode
from trainer.config import TrainerConfig
from trainer.model.lora import adapted_layers, describe_layers

__all__ = ["main"]


def main() -> None:
    """Print the line, or what is wrong with the targets, with exit code 78."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load_or_exit(TrainerConfig, "trainer")
    if not config.lora.rank:
        return
    try:
        found = AutoConfig.from_pretrained(config.model, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)  # type: ignore[no-untyped-call]
        layers = adapted_layers(model, config)
    except (OSError, ValueError, KeyError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.CONFIG) from error
    print(f"adapters of rank {config.lora.rank} for {describe_layers(layers)}")


if __name__ == "__main__":
    main()
