"""TensorBoard: `tensorboard --logdir <tracking.folder>`, which any number of runs may share."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainerConfig
from trainer.tracking.tracker import Samples, columns_of

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

    def log_samples(self, step: int, rows: Samples) -> None:
        """A table of Markdown, as text `training/samples`."""
        self._writer.add_text("training/samples", _markdown(columns_of(rows)), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def _markdown(columns: Mapping[str, Sequence[object]]) -> str:
    lines = [_line(columns), _line("---" for _ in columns)]
    return "\n".join([*lines, *map(_line, zip(*columns.values(), strict=True))])


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: object) -> str:
    """Text that stays in its cell and is shown as it is."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")
