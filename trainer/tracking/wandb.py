"""Tracker for Weights & Biases; reads WANDB_API_KEY, WANDB_MODE=offline, WANDB_BASE_URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from trainer.config import TrainerConfig
from trainer.tracking.tracker import Samples, columns_of

_STEP = "training/step"


class WeightsAndBiases:
    """A run of the same id in `tracking.project`; a resumed run continues it.

    Its x-axis is `training/step`: W&B's own step cannot go back to repeat a step after a crash.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._run: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._connect()
            self._run.define_metric("*", step_metric=_STEP)
        self._run.log({**numbers, _STEP: step})

    def log_samples(self, step: int, rows: Samples) -> None:
        """Add a table to the history, as `training/samples`."""
        columns = columns_of(rows)
        data = [list(row) for row in zip(*columns.values(), strict=True)]
        table = wandb.Table(columns=list(columns), data=data)
        self._run.log({_STEP: step, "training/samples": table})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _connect(self) -> Any:
        folder = self._config.tracking_folder
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._config.tracking.project,
            id=self._config.run_id,
            name=self._config.run_id,
            config=self._config.reproducibility_settings(),
            dir=str(folder),
            resume="allow",
            # Do not capture stdout.
            settings=wandb.Settings(silent=True, console="off"),
        )
