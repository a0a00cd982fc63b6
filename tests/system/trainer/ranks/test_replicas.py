"""Replicas of a sharded model compute the steps of one model."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run, same_rows
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING
from trainer.checkpoint.checkpoint_files import read_parameters

CONFIG = {**JOB_CONFIG, "replicas": 2, "algorithm__name": "ppo"}
"""With a critic's layer, whose one row lies on one rank of each replica."""


@pytest.fixture(scope="module")
def replicated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on four ranks; then the last two again from the checkpoint of the fourth."""
    out = tmp_path_factory.mktemp("replicated")
    again = {
        "steps": [5, 6],
        "load": str(out / "checkpoints/step_000000004"),
        "out": str(out / "again"),
    }
    return run(4, model, out, config=CONFIG, steps=[1, 2, 3, 4, 5, 6], save_after=4, then=[again])


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps on one rank."""
    config = {**CONFIG, "replicas": 1}
    out = tmp_path_factory.mktemp("alone")
    return run(1, model, out, config=config, steps=[1, 2, 3, 4, 5, 6], save_after=4)


def test_two_replicas_of_two_ranks_and_one_rank_give_the_same_steps(
    replicated: Path, alone: Path
) -> None:
    """Losses, gradient norms in the clipping, and weights."""
    assert losses(replicated) == pytest.approx(losses(alone), abs=ROUNDING)
    assert greatest_difference(replicated, alone) < ROUNDING
    assert same_rows(replicated, alone)


def test_one_replica_saves_and_all_resume(
    model: Path, replicated: Path, alone: Path, tmp_path: Path
) -> None:
    """Bit-equal on as many ranks and replicas, to rounding on others and without replicas."""
    assert greatest_difference(replicated / "again", replicated) == 0.0
    checkpoint = replicated / "checkpoints/step_000000004"
    second = load_file(checkpoint / "rank_00002_of_00004.safetensors")
    assert list(second) == ["rng"]
    whole = read_parameters(alone / "checkpoints/step_000000004")
    found = read_parameters(checkpoint)
    assert {name: found[name].shape for name in found} == {n: whole[n].shape for n in whole}
    config = {**CONFIG, "replicas": 1}
    for origin, ranks in ((replicated, 1), (alone, 4), (replicated, 4)):
        resumed = run(
            ranks,
            model,
            tmp_path / f"{origin.name}-{ranks}",
            config={**config, "replicas": 2 if origin is alone else 1},
            steps=[5, 6],
            load=str(origin / "checkpoints/step_000000004"),
        )
        assert greatest_difference(resumed, alone) < ROUNDING


def test_ranks_that_replicas_do_not_divide_are_refused(model: Path, tmp_path: Path) -> None:
    """The number of ranks and the cure are named."""
    config = {**CONFIG, "replicas": 2}
    with pytest.raises(ValueError, match="replicas is 2 and there are 1 ranks"):
        run(1, model, tmp_path, config=config, steps=[1])
