"""`torchrun -m trainer` with a pipeline, against real gRPC neighbours."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.lib.trainer.child import Child
from tests.lib.trainer.ranks.whole_run import run
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING, make_model, read_lines
from tests.system.trainer.test_process import TORCHRUN


def pid_of_rank(rank: int, launcher: int) -> int:
    """Of a rank that this process of torchrun started; in the order of ranks."""
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == launcher:
                children.append(int(entry.name))
    return sorted(children)[rank]


@pytest.mark.long(short="tests/system/trainer/pipeline/test_pipelined_policy.py")
async def test_a_pipeline_trains_publishes_and_loses_a_rank_and_fsdp_goes_on(
    tmp_path: Path, model: Path
) -> None:
    """PPO with a critic of its own on two ranks; rank 1 is killed in the third step, and one rank
    of the other backend ends the run: the weights are those of an undisturbed run.
    """
    critic_model = make_model(tmp_path / "critic", seed=1)
    around = Neighbours(tmp_path / "weights")
    flags = ("--algorithm.name=ppo", "--critic=model", f"--critic-model={critic_model}")
    async with around.serving():
        child, ledger = Child(tmp_path, model, around), around.ledger

        def kill(step: int) -> None:
            if step == 3 and ledger.epoch == 1:
                os.kill(pid_of_rank(1, child.process.pid), signal.SIGKILL)

        ledger.on_lease = kill
        pipeline = ("--backend=pipeline", "--pipeline.plan-seconds=0.1", "--num-steps=6")
        await child.start(*flags, *pipeline, launcher=TORCHRUN)
        code, output = await child.finish()
        assert code != 0, output
        assert around.weights.manifests[0].step == 1

        await child.start(*flags, "--num-steps=4", "--resume")
        code, output = await child.finish()
        assert code == 0, output
        records = read_lines(child.metrics_file)
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        newest = around.weights.manifests[-1]
        published = load_file(around.weights.folder(newest.weight_version) / "model.safetensors")
    config = {**JOB_CONFIG, "algorithm__name": "ppo", "critic": "model"}
    whole = await asyncio.to_thread(  # which runs a loop of its own
        run,
        1,
        model,
        tmp_path / "whole",
        steps=[1, 2, 3, 4],
        config={**config, "critic_model": str(critic_model)},
    )
    expected = load_file(whole / "weights.safetensors")
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (published[name] - tensor).abs().max().item() < ROUNDING, name
