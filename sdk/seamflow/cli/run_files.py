"""Files in which a run's processes write a JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["json_lines", "read_steps"]


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, none if it cannot be opened.

    A line that is in writing, or that a killed process left half written, is left out.
    """
    try:
        lines = file.open(encoding="utf-8", errors="replace")
    except OSError:
        return
    with lines:
        for line in lines:
            record = None
            with suppress(ValueError):
                record = json.loads(line)
            if isinstance(record, dict):
                yield record


def read_steps(metrics_file: Path) -> list[dict[str, Any]]:
    """The trainer's lines, one for each optimizer step in order; of a repeated step the last."""
    steps = {line["step"]: line for line in json_lines(metrics_file) if "step" in line}
    return [steps[number] for number in sorted(steps)]
