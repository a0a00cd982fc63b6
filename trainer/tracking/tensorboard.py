"""TensorBoard: `tensorboard --logdir <tracking.folder>`, which any number of runs may share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainerConfig

__all__ = ["TensorBoard"]


class TensorBoard:
    """Event files in `tracking.folder`/<run_id>."""

    def __init__(self, config: TrainerConfig) -> None:
        self._folder = config.tracking_folder / config.run_id
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a scalar per number. Values for later steps from before a crash are hidden."""
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
