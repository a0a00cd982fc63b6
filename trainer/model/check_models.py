"""`python -m trainer.model.check_models --config FILE`: whether the trainer can train its models.

The models are made without memory; no weights are read. `seamflow train --dry-run` runs it. It says
in a line which layers get an adapter.
"""

from __future__ import annotations

import sys

import torch

from services.chassis.config.load import load_or_exit
from services.chassis.errors import ExitCode
from services.lib.transformer.can_pack import check_padded
from trainer.config import TrainerConfig
from trainer.model.lora import adapted_layers, add_adapter, describe_layers


def main() -> None:
    """Print the line, or what is wrong with models or targets, with exit code 78."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load_or_exit(TrainerConfig, "trainer")
    try:
        found = AutoConfig.from_pretrained(config.model, local_files_only=True)
        check_padded(found)
        if config.critic_model is not None:
            check_padded(AutoConfig.from_pretrained(config.critic_model, local_files_only=True))
        if not config.lora.rank:
            return
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)  # type: ignore[no-untyped-call]
        layers = adapted_layers(model, config)
        add_adapter(model, config)
    except (OSError, ValueError, KeyError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.CONFIG) from error
    print(f"adapters of rank {config.lora.rank} for {describe_layers(layers)}")


if __name__ == "__main__":
    main()
