"""Which rewards training uses, by the trainer's settings; checked before the trainer sees any."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from services.launcher.checks.process_settings import process_setting
from services.launcher.config import LauncherConfig

__all__ = ["trained_rewards"]


def trained_rewards(config: LauncherConfig, config_file: Path) -> Collection[str]:
    """Names in reward_weights or reward of [trainer.algorithm]; none: neither is set."""
    weights = process_setting(config, config_file, "trainer.algorithm.reward_weights")
    if isinstance(weights, str):
        with suppress(ValueError):  # the trainer's own check names it
            weights = json.loads(weights)
    if isinstance(weights, dict) and weights:
        return weights.keys()
    name = process_setting(config, config_file, "trainer.algorithm.reward")
    return (str(name),) if name else ()
