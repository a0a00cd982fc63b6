"""Weights & Biases. Its own variables hold: WANDB_API_KEY, WANDB_MODE=offline, WANDB_BASE_URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from trainer.config import TrainerConfig

__all__ = ["WeightsAndBiases"]

_STEP = "training/step"


class WeightsAndBiases:
    """A run named after ours, in `tracker_project`; a resumed run goes on in it.

    Its x-axis is `training/step`: W&B's own step cannot go back to one that a crash undid.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._run: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """A line of the run's history."""
        if self._run is None:
            self._run = self._begun()
            self._run.define_metric("*", step_metric=_STEP)
        self._run.log({_STEP: step, **numbers})

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()

    def _begun(self) -> Any:
        folder = self._config.tracking_folder
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._config.tracker_project,
            id=self._config.run_id,
            name=self._config.run_id,
            config=self._config.reproducibility_settings(),
            dir=str(folder),
            resume="allow",
            # The log is not its business, and its wrapper would stand in the loop's way.
            settings=wandb.Settings(silent=True, console="off"),
        )
