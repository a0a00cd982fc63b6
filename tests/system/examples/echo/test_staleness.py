"""Echo's two modes, each by its example: how old the trained samples are, as the store says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from seamflow.channel import connect
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from bench.harness.processes import manager
from tests.lib.end_to_end.support import ROOT, child_environment
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.client import Client

pytestmark = pytest.mark.timeout(300)
STEPS, SAMPLES_OF_A_STEP = 4, 4
_SETTINGS = {
    "trainer.num_steps": STEPS,
    "rollout_server.engine": "fake",
    "rollout_server.fake_vocab_size": 46,
    "rollout_server.fake_mean_tokens": 8,
}


@pytest.mark.long(short="tests/system/end_to_end/test_training_run.py")
@pytest.mark.parametrize(("mode", "bound"), [("sequential_pull", 0), ("asynchronous_push_pull", 2)])
def test_no_sample_is_older_than_its_mode_allows(
    mode: str, bound: int, redis_server: RedisServer, tmp_path: Path
) -> None:
    """0 where generation waits for weights, up to the bound where it does not: as control for
    the first, the second mode has samples that are older than 0."""
    config = ROOT / f"examples/echo/{mode}.toml"
    trained(config, redis_server.url, tmp_path)
    name = tomllib.loads(config.read_text())["launcher"]["name"]
    found = asyncio.run(staleness(name, redis_server.url, tmp_path))
    assert len(found) == STEPS * SAMPLES_OF_A_STEP
    assert max(found) <= bound
    assert bound == 0 or max(found) > 0


def trained(config: Path, redis_url: str, folder: Path) -> None:
    """Train a few steps with the example's settings, with a fake engine and without warm start."""
    flags = {
        "prepare": "tests.lib.end_to_end.quickstart_files",
        "tasks": "{run}/prepared/tasks.jsonl",
        "heldout-tasks": "",
        "runs-folder": folder / "runs",
        "redis-url": redis_url,
        "group-size": 2,
        "groups-per-step": SAMPLES_OF_A_STEP // 2,
    }
    command = [sys.executable, "-m", "services.launcher", "--config", str(config)]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command += [f"--set={name}={value}" for name, value in _SETTINGS.items()]
    found = subprocess.run(
        command, cwd=ROOT, env=child_environment({}), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


async def staleness(run_id: str, redis_url: str, folder: Path) -> Sequence[int]:
    """Of all samples of a run that has ended, as its trainer recorded them with the store."""
    with manager(folder, redis_url, durability="fast") as server:
        async with connect(server.address) as channel:
            samples = Client(channel, run_id).samples
            found = [
                await samples.ListTrainedSamples(
                    sample_pb.ListTrainedSamplesRequest(run_id=run_id, step=step, page_size=100)
                )
                for step in range(1, STEPS + 1)
            ]
    return [sample.staleness for listed in found for sample in listed.samples]
