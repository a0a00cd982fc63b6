"""The samples of each step that a trainer recorded beside its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def steps_with_samples(metrics_file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, each with the `sample_ids` of its step.

    Trainers of release 0.2 have them in the metrics file.
    """
    ids = metrics_file.with_name("trained_samples.jsonl")
    trained = {line["step"]: line for line in _lines(ids)} if ids.exists() else {}
    return [{**trained.get(line["step"], {}), **line} for line in _lines(metrics_file)]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
