"""Memory and open files of processes over time, and how fast they grow."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_WARM_UP_SECONDS = 600.0
"""Of each start, not looked at: models are loaded, pools and the ranker's window filled."""
_MIN_SAMPLES = 3
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process and the others of its group."""

    process: str
    pid: int
    """Of the first of the group; tells the starts of a process apart."""
    age: float
    """Seconds since this start."""
    mib: float
    """Resident memory."""
    files: int
    """Open file descriptors."""


def measured(process: str, pid: int, now: float) -> Sample | None:
    """A look at the process at wall time `now`; None if it is gone."""
    try:
        first = psutil.Process(pid)
        others = [each for each in first.children(recursive=True) if os.getpgid(each.pid) == pid]
        group = [first, *others]
        mib = sum(each.memory_info().rss for each in group) / 2**20
        files = sum(each.num_fds() for each in group)
        return Sample(process, pid, now - first.create_time(), mib, files)
    except (psutil.Error, ProcessLookupError):
        return None


def append(file: Path, samples: Iterable[Sample]) -> None:
    """Write a JSON line per sample."""
    with file.open("a") as out:
        out.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)


def read(file: Path) -> list[Sample]:
    """All samples of the file."""
    return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]


def mib_per_hour(samples: Iterable[Sample]) -> dict[str, float]:
    """By process, the common slope of its starts (least squares), without the first minutes.

    A start's own level does not count. A process whose starts were all too short is left out.
    """
    starts: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.age >= _WARM_UP_SECONDS:
            starts[sample.process][sample.pid].append(sample)
    slopes = {process: _slope(of_process) for process, of_process in starts.items()}
    return {process: slope for process, slope in sorted(slopes.items()) if slope is not None}


def _slope(starts: Mapping[int, Sequence[Sample]]) -> float | None:
    products = squares = 0.0
    for samples in starts.values():
        if len(samples) < _MIN_SAMPLES:
            continue
        mean_age = sum(sample.age for sample in samples) / len(samples)
        mean_mib = sum(sample.mib for sample in samples) / len(samples)
        products += sum((each.age - mean_age) * (each.mib - mean_mib) for each in samples)
        squares += sum((each.age - mean_age) ** 2 for each in samples)
    return _SECONDS_PER_HOUR * products / squares if squares else None
