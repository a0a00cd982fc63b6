"""Samples of a step as text with their rewards, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seamflow.token_text import Decode, load_decoder, token_numbers

from services.chassis.log import get_logger
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence
from trainer.tracking.step_record import StepFile, StepRecord
from trainer.tracking.tracker import Trackers


class SampleTable:
    """Every `samples_every_steps`, some trained samples for `samples_file` and the trackers.

    A row has step, sample_id, task_id, weight_versions, rewards by name, the prompt's text, and
    the answer's: from the first trained token to the last, with tool results between them.
    """

    def __init__(self, config: TrainerConfig, trackers: Trackers) -> None:
        tracking = config.tracking
        has_reader = tracking.samples_file is not None or bool(tracking.trackers)
        self._every = tracking.samples_every_steps if has_reader else 0
        self._config = config
        self._trackers = trackers
        self._file = StepFile(tracking.samples_file)
        self._decode: Decode | None = None

    def begin(self, step: int) -> None:
        """Forget the samples of steps after `step`, which a crash undid."""
        self._file.begin(step, {})

    def add(self, record: StepRecord) -> None:
        """Show samples of a finished step, if one is due."""
        if not self._every or record.step % self._every:
            return
        rows = [self._row(record.step, each) for each in record.shown]
        self._file.append(rows)
        self._trackers.log_samples(record.step, rows)

    def _row(self, step: int, sequence: TokenSequence) -> dict[str, Any]:
        ids, mask = sequence.token_ids_T.tolist(), sequence.loss_mask_T
        first = int(mask.argmax()) if mask.any() else len(ids)
        return {
            "step": step,
            "sample_id": sequence.sample_id,
            "task_id": sequence.group_id,
            "weight_versions": sorted(set(sequence.weight_versions_T[mask].tolist())),
            "rewards": dict(sequence.rewards),
            "prompt": self._text(ids[:first]),
            "answer": self._text(ids[first:]),
        }

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._decode is None:
            self._decode = _decoder(self._config)
        return self._decode(token_ids)


def _decoder(config: TrainerConfig) -> Decode:
    """The tokenizer of the model; ids as numbers for a model without one."""
    try:
        return load_decoder(config.model)
    except ValueError as error:
        get_logger().info("samples_without_text", detail=str(error))
        return token_numbers
