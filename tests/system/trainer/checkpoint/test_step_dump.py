"""A step that was written down is computed again alone, and a difference is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.mostly_long import mostly_long
from tests.lib.trainer.support import ROOT, environment
from tests.lib.trainer.training import Training
from trainer.data.computations import Accumulate
from trainer.ranks.commands import decode, encode


def replay(folder: Path) -> subprocess.CompletedProcess[str]:
    """Compute a step again, in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "trainer.step.replay_step", str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


async def dumped(training: Training, tmp_path: Path, **settings: Any) -> Path:
    """Four steps, of which the second and the fourth are written."""
    await training.begin(*(f"t{number}" for number in range(12)), max_staleness=4)
    await training.play(24)
    await training.train(4, checkpoint__dump_every=2, **settings)
    return tmp_path / "checkpoints" / "dumps"


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_step_dump.py")
async def test_a_dumped_step_replays_to_the_last_digit(training: Training, tmp_path: Path) -> None:
    """Loss, gradient and statistics; of the steps asked for and no others."""
    folder = await dumped(training, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["step_000000002", "step_000000004"]
    for step in folder.iterdir():
        done = replay(step)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "grad_norm" in done.stdout


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_step_dump.py")
async def test_a_dumped_step_of_a_pipeline_replays_to_the_last_digit(
    training: Training, tmp_path: Path
) -> None:
    """The commands carry the actions; the critic's own model is in the state."""
    settings = {"backend": "pipeline", "critic": "model", "algorithm__name": "ppo"}
    folder = await dumped(training, tmp_path, **settings)
    done = replay(folder / "step_000000004")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "critic_grad_norm" in done.stdout


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_step_dump.py")
async def test_another_step_is_noticed(training: Training, tmp_path: Path) -> None:
    """Negative control: twice the advantages are another gradient."""
    folder = await dumped(training, tmp_path) / "step_000000002"
    chunk = folder / "chunk_0000_rank_00000.npz"
    command = decode(chunk.read_bytes())
    assert isinstance(command, Accumulate)
    for batch in command.micro_batches:
        np.multiply(batch.advantages_B, 2, out=batch.advantages_B)
    chunk.write_bytes(encode(command))
    done = replay(folder)
    assert done.returncode == 1
    assert "differs" in done.stdout


@pytest.mark.parametrize(
    "missing", mostly_long(["folder", "step.json"], "step.json", short=__file__)
)
def test_a_missing_dump_is_reported(tmp_path: Path, missing: str) -> None:
    """No traceback, but the folder and the cure."""
    folder = tmp_path / "nothing"
    if missing == "step.json":
        folder.mkdir()
    done = replay(folder)
    assert done.returncode == 1
    assert f"{folder} has no step.json: give the folder of a dump" in done.stderr
