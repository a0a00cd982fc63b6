"""A run of a gang in this process or in forked ones, and how two runs compare."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG

__all__ = ["greatest_difference", "losses", "run"]


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


def losses(folder: Path) -> list[float]:
    """Of each step."""
    return [metrics["loss"] for metrics in json.loads((folder / "metrics.json").read_text())]
