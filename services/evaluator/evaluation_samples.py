"""Some rollouts of every evaluation with text and rewards: evaluation_samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from seamflow.token_text import Decode, load_decoder, token_numbers
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.transcript import transcript


class EvaluationSamples:
    """Appends transcripts; each has the label and the step of its evaluation too."""

    def __init__(self, file: Path, model: Path) -> None:
        """`model` is the folder whose tokenizer gives the text; without one, ids are written."""
        self._file, self._model = file, model
        self._decode: Decode | None = None

    def add(self, shown: Sequence[trajectory_pb2.Trajectory], label: str, step: int) -> None:
        """Append rollouts of an evaluation. Blocks while the tokenizer is loaded."""
        if self._decode is None:
            self._decode = _decoder(self._model)
        facts = {"evaluation": label, "step": step}
        rows = [{**facts, **transcript(each, self._decode)} for each in shown]
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _decoder(model: Path) -> Decode:
    try:
        return load_decoder(model)
    except ValueError:
        return token_numbers
