"""How TRL is started: `bench.baselines.training.trl_grpo`, in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bench.baselines.environments import interpreter, module_of

PEER = "trl_grpo"


def trl_command(rules: Mapping[str, Any], **flags: object) -> list[str]:
    """Program and arguments; makes the environment if there is none yet.

    Args:
        rules: our configuration of the same run; rollouts in a step are as many.
        flags: all others of `bench.baselines.training.trl_grpo`.
    """
    launcher = rules["launcher"]
    batch = {name: launcher[name] for name in ("group_size", "groups_per_step")}
    python = str(interpreter(PEER))
    return [python, "-m", module_of(PEER), *as_arguments(**batch, **flags)]


def trl_environment(threads: int) -> dict[str, str]:
    """All variables of the process: its torch threads, no GPU, no network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def as_arguments(**flags: object) -> list[str]:
    """Flags of a command line: `max_new_tokens=64` is "--max-new-tokens", "64"."""
    return [
        part
        for name, value in flags.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
