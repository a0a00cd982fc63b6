"""TensorBoard: `tensorboard --logdir <tracking.folder>`, which any number of runs may share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainerConfig
from trainer.tracking.tracker import Samples, columns_of

_MARKS = re.compile(r"\r\n|[^\w ]|_|(?<= ) |^ | $", re.MULTILINE)
_WRITTEN = {" ": "&nbsp;"} | dict.fromkeys(("\n", "\r", "\r\n"), "<br>")


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
        self._writer.add_text("training/samples", markdown(columns_of(rows)), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def markdown(columns: Mapping[str, Sequence[object]]) -> str:
    """A table of Markdown whose cells show the values as they are."""
    rows = [columns, *zip(*columns.values(), strict=True)]
    head, *body = (_line(map(_cell, row)) for row in rows)
    return "\n".join([head, _line("---" for _ in columns), *body])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    """Text that stays in its cell and is shown as it is.

    All but letters, digits and single spaces is written as a character reference of HTML, which
    Markdown leaves alone.
    """
    return _MARKS.sub(_reference, str(value))


def _reference(found: re.Match[str]) -> str:
    return _WRITTEN.get(found.group()) or f"&#{ord(found.group())};"
