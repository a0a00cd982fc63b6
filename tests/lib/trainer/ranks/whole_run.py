"""A run of a gang in this process or in forked ones, and how two runs compare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG


def run(num_ranks: int, model: Path, out: Path, **job: object) -> Path:
    """Run a gang and return its folder."""
    description = {"config": JOB_CONFIG, "model": str(model), "out": str(out), **job}
    if num_ranks == 1:
        run_rank(description)
    else:
        run_forked(num_ranks, run_rank, description)
    return out


def greatest_difference(one: Path, other: Path) -> float:
    """Between the final weights of two runs."""
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def same_rows(one: Path, other: Path) -> bool:
    """Whether two runs trained each token with the same log-prob and advantage, in float16."""
    first, second = (json.loads((folder / "rows.json").read_text()) for folder in (one, other))
    pairs = zip(_columns(first), _columns(second), strict=True)
    return all(len(a) == len(b) and np.allclose(a, b, rtol=5e-3, atol=2e-3) for a, b in pairs)


def _columns(steps: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> Iterator[Sequence[float]]:
    """Of each sequence of each step, by number."""
    for rows in steps:
        assert rows, "no rank sent anything"
        for _, columns in sorted(rows.items(), key=lambda pair: int(pair[0])):
            yield from columns


def losses(folder: Path) -> list[float]:
    """Of each step."""
    return [metrics["loss"] for metrics in json.loads((folder / "metrics.json").read_text())]
