"""Groups that end a trainer, fed to real runs: each run goes on, and loses that group alone.

`python -m tests.chaos.edges.poison` runs it alone. The trajectory manager takes what no door lets
in today, as if an earlier release had recorded it. A trainer is a process that is started again as
often as `seamflow train` does; a run is poisoned if none of them finishes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from seamflow.channel import connect
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1.trajectory_service_pb2 import RecordedGroup

from services.chassis.rpc.server import started
from tests.lib.redis_server import RedisServer
from tests.lib.trainer.rejection.poisons import GOOD, POISONS, Group, record
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import ROOT, environment, make_model
from tests.lib.trainer.training import Training
from tests.lib.trajectory_manager.client import Client
from trajectory_manager.api import record_groups, validation
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import redis_store

_STEPS = 2
_GROUPS = 7
"""Two steps of three, and one to replace the bad one."""
_MAX_STARTS = 6
_CONTROL_STARTS = 2
_START_SECONDS = 120.0
_ALGORITHMS = "tests.lib.trainer.rejection.dying_algorithm"
_DYING = ("killing", "raising", "overflowing")
_CONTROLS = ("vocabulary", "reward name", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run."""

    finished: bool
    """Whether it trained all its steps."""
    starts: int
    """Trainers it took."""
    lost: int
    """Groups that became dead letters."""


def run(seed: int, *, quick: bool = False) -> dict[str, float]:
    """The figures; `quick`: of a few kinds of groups."""
    kinds = random.Random(seed).sample(sorted(POISONS), 3) if quick else list(POISONS)
    dying, controls = (_DYING[:1], _CONTROLS[:1]) if quick else (_DYING, _CONTROLS)
    return asyncio.run(_run(seed, kinds, dying, controls))


async def _run(
    seed: int, kinds: Sequence[str], dying: Sequence[str], unchecked: Sequence[str]
) -> dict[str, float]:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, _open_door():
        async with _manager(Path(name)) as (port, model):
            runs = _Runs(Path(name), port, model, dice)
            found = [await runs.poisoned(POISONS[each][0]) for each in kinds]
            found += [await runs.dying(each) for each in dying]
            controls = [await runs.poisoned(POISONS[each][0], checks=False) for each in unchecked]
            controls += [await runs.dying(each, checks=False) for each in dying[:1]]
    return {
        "runs": len(found),
        "runs_poisoned": sum(not each.finished for each in found),
        "poison_groups_lost_beyond_the_bad": sum(max(0, each.lost - 1) for each in found),
        "poison_groups_not_rejected": sum(each.lost == 0 for each in found),
        "poison_max_starts": max(each.starts for each in found),
        "negative_controls": len(controls),
        "negative_controls_failed": sum(not each.finished for each in controls),
    }


class _Runs:
    """Runs on one trajectory manager."""

    def __init__(self, folder: Path, port: int, model: Path, dice: random.Random) -> None:
        self._folder, self._port, self._model, self._dice = folder, port, model, dice

    async def poisoned(self, bad: Group, *, checks: bool = True) -> Outcome:
        """One group of the first step is bad."""
        place = self._dice.randrange(3)
        groups = [(bad if number == place else GOOD)(f"t{number}") for number in range(_GROUPS)]
        module = "trainer" if checks else "tests.chaos.edges.unchecked_trainer"
        given = {"algorithm.reward": "reward"}
        return await self._trained(
            groups, module, given, _MAX_STARTS if checks else _CONTROL_STARTS
        )

    async def dying(self, algorithm: str, *, checks: bool = True) -> Outcome:
        """The algorithm ends the trainer on group t1."""
        groups = [GOOD(f"t{number}") for number in range(_GROUPS)]
        given = {"algorithm.name": f"{_ALGORITHMS}:{algorithm}"}
        if not checks:
            given["batch.trial-deliveries"] = "0"
        return await self._trained(
            groups, "trainer", given, _MAX_STARTS if checks else _CONTROL_STARTS
        )

    async def _trained(
        self, groups: list[RecordedGroup], module: str, given: dict[str, str], max_starts: int
    ) -> Outcome:
        folder = self._folder / uuid.uuid4().hex
        folder.mkdir()
        async with connect(f"127.0.0.1:{self._port}") as channel:
            client = Client(channel, uuid.uuid4().hex)
            training = Training(client, self._port, folder, self._model)
            await training.begin(max_staleness=4)
            await client.trajectories.RecordGroups(record(client.run_id, *groups))
            starts, finished = 0, False
            neighbours = Neighbours(folder / "weights")
            async with neighbours.serving():
                while not finished and starts < max_starts:
                    starts += 1
                    finished = await _start(module, training, neighbours.address, given)
            request = task_pb.ListDeadLettersRequest(run_id=client.run_id)
            letters = (await client.tasks.ListDeadLetters(request)).dead_letters
        finite = all(math.isfinite(each["grad_norm"]) for each in training.records())
        return Outcome(finished=finished and finite, starts=starts, lost=len(letters))


async def _start(module: str, training: Training, weights: str, given: dict[str, str]) -> bool:
    """One trainer process, from start to end; whether it finished."""
    settings = {
        "run-id": training.client.run_id,
        "model": training.model,
        "checkpoint.folder": training.checkpoints,
        "tracking.metrics-file": training.metrics_file,
        "trajectory-manager": f"127.0.0.1:{training.port}",
        "weights": weights,
        "num-steps": _STEPS,
        "port": 0,
        "admin-port": -1,
        **given,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with (training.metrics_file.parent / "trainer.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--resume", "--exit-when-finished", *flags),
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextmanager
def _open_door() -> Iterator[None]:
    """The trajectory manager refuses nothing that it would record."""
    with (
        mock.patch.object(record_groups, "MIN_TEMPERATURE", 0.0),
        mock.patch.object(validation, "_check_logprobs", lambda field, values: None),
        mock.patch.object(validation, "reward", lambda field, value: value),
    ):
        yield


@asynccontextmanager
async def _manager(folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """Port of a trajectory manager on a Redis of its own, and a model folder."""
    redis = RedisServer(folder)
    redis.start()
    config = TrajectoryManagerConfig(redis_url="redis://oracle", port=0, admin_port=-1)
    try:
        async with (
            redis_store(redis.url, Durability.FAST, 15.0) as store,
            started(service(config, store), config) as port,
        ):
            yield port, make_model(folder / "model")
    finally:
        redis.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few kinds of groups")
    given = parser.parse_args()
    print(json.dumps(run(given.seed, quick=given.quick)))
