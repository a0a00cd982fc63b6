"""A scoring service on the real trajectory manager and a real Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from seamflow.channel import connect
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2

from services.scoring.cli import build
from services.scoring.config import ScoringConfig
from tests.integration.services.scoring.support import (
    COLUMN,
    Away,
    Fails,
    Lengths,
    Slow,
    Together,
    Twice,
    Wrong,
)
from tests.lib.trajectory_manager.client import RULES, Client, running_manager
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.column_store import MAX_COLUMN_TRIES
from trajectory_manager.store.redis.connect import redis_store


class Run:
    """A run of groups of two, with scoring services."""

    def __init__(self, client: Client, port: int) -> None:
        self.client, self._port = client, port
        Lengths.scored.clear()
        Lengths.began.clear()
        Lengths.going_on.set()

    async def begin(self, *task_ids: str, columns: Sequence[str] = (COLUMN,), **rules: Any) -> None:
        """Create it, and let agents play all tasks."""
        config = trajectory_pb2.RunConfig()
        config.CopyFrom(RULES)
        for name in rules:
            config.ClearField(name)  # type: ignore[arg-type]
        config.MergeFrom(trajectory_pb2.RunConfig(required_columns=columns, **rules))
        await self.client.create_run(config)
        await self.client.submit(*task_ids)
        for _ in range(2 * len(task_ids)):
            await self.client.play()

    def config(self, scorer: type, **settings: Any) -> ScoringConfig:
        """Of a service with a scorer of this file."""
        values = {
            "run_id": self.client.run_id,
            "column": COLUMN,
            "model": Path("none"),
            "trajectory_manager": f"127.0.0.1:{self._port}",
            "scorer": f"tests.integration.services.scoring.support:{scorer.__name__}",
        }
        return ScoringConfig(**{**values, **settings})

    @asynccontextmanager
    async def scoring(
        self, scorer: type = Lengths, **settings: Any
    ) -> AsyncIterator[asyncio.Task[None]]:
        """A service while the block runs."""
        async with build(self.config(scorer, **settings)) as scoring:
            task = asyncio.ensure_future(scoring.background[0]())
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def readiness(self) -> sample_pb2.Readiness:
        """Counts of the run."""
        request = sample_pb2.GetReadinessRequest(run_id=self.client.run_id)
        return (await self.client.samples.GetReadiness(request)).readiness

    async def until(self, num_ready: int) -> None:
        """Wait for this number of ready groups."""
        await waited_for(lambda: self.readiness(), lambda c: c.num_ready_groups == num_ready)

    async def columns(self) -> dict[str, dict[str, list[float]]]:
        """Of each sample of the first step."""
        epoch = await self.client.reconcile()
        counts = await self.readiness()
        leased = await self.client.lease_samples(epoch, 1, num_groups=counts.num_ready_groups)
        return {
            sample.sample_id: {
                entry.name: np.frombuffer(entry.values, "<f4").tolist() for entry in sample.columns
            }
            for sample in leased.samples
        }


async def waited_for(look: Callable[[], Any], enough: Callable[[Any], bool]) -> None:
    """Look until it is enough."""
    async with asyncio.timeout(30):
        while not enough(await look()):
            await asyncio.sleep(0.02)


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    """A run that begins with `begin`."""
    async with (
        redis_store(redis_url, Durability.FAST, 5.0) as store,
        running_manager(store) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        yield Run(Client(channel, uuid.uuid4().hex), port)
        Lengths.going_on.set()


async def test_a_group_is_ready_once_it_is_scored(run: Run) -> None:
    """The trainer finds the column in its samples, a value for each token."""
    await run.begin("a", "b", groups_per_step=2)
    counts = await run.readiness()
    assert (counts.num_incomplete_groups, counts.num_ready_groups) == (2, 0)
    async with run.scoring():
        await run.until(2)
    columns = await run.columns()
    assert sorted(columns) == sorted(Lengths.scored)
    assert len(columns) == 4
    assert all(found == {COLUMN: [0, 1, 2, 3, 4, 5]} for found in columns.values())


async def test_a_service_that_needs_another_column_waits_for_it(run: Run) -> None:
    """Two services, one after the other for each sample, whichever is there first."""
    await run.begin("a", columns=(COLUMN, "twice"))
    async with run.scoring(Twice, column="twice", needs=(COLUMN,)), run.scoring():
        await run.until(1)
    for found in (await run.columns()).values():
        assert found == {COLUMN: [0, 1, 2, 3, 4, 5], "twice": [0, 2, 4, 6, 8, 10]}


async def test_samples_leased_by_a_dead_service_are_scored_by_another(run: Run) -> None:
    """After its lease: the one that died never wrote."""
    Lengths.going_on.clear()
    await run.begin("a", lease_duration=to_duration(1.0))
    async with run.scoring(max_samples=1):
        # It hangs in its scorer, and goes without a word.
        assert await asyncio.to_thread(Lengths.began.wait, 20)
    assert (await run.readiness()).num_ready_groups == 0
    async with run.scoring():
        Lengths.going_on.set()
        await run.until(1)
    assert set(Lengths.scored) == set(await run.columns())


async def test_two_services_share_the_samples(run: Run) -> None:
    """Each sample is with one of them, and both work at the same time."""
    await run.begin("a", "b", groups_per_step=2, max_staleness=3)
    async with run.scoring(Together, max_samples=1), run.scoring(Together, max_samples=1):
        await run.until(2)
    assert len(Lengths.scored) == len(set(Lengths.scored)) == 4


async def test_leases_shrink_until_they_are_scored_in_time(run: Run) -> None:
    """Four need longer than a lease lives, and would be leased and lost for ever."""
    await run.begin("a", "b", groups_per_step=2, lease_duration=to_duration(0.8))
    async with run.scoring(Slow, max_samples=4):
        await run.until(2)
    assert len(Lengths.scored) > 4


async def test_a_run_that_comes_later_is_waited_for(run: Run) -> None:
    """Services start in any order."""
    async with run.scoring():
        await asyncio.sleep(0.1)
        await run.begin("a")
        await run.until(1)


async def test_a_sample_that_cannot_be_scored_holds_up_no_other(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named with what is wrong, and nothing is written for it."""
    await run.begin("a", "b", "c", groups_per_step=3, max_staleness=3)
    async with run.scoring(Wrong) as task:
        await run.until(1)
        assert not task.done()
    assert list({name.split("/")[0] for name in await run.columns()}) == ["c"]
    message = capsys.readouterr().out
    assert "the scorer gave values of shape (5,); return one value, or one for each of 6" in message
    assert "sample 'b/1/1#t2': the scorer gave values that are not finite" in message


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_sample_that_cannot_be_scored_is_replaced(run: Run, max_staleness: int) -> None:
    """After three tries, like that of a failed rollout, in a synchronous run too."""
    Fails.rollouts, Fails.num_failures = ("a/0/1#",), 0
    await run.begin("a", groups_per_step=1, max_staleness=max_staleness)
    async with run.scoring(Fails, max_samples=1):
        await waited_for(run.readiness, lambda counts: counts.num_incomplete_groups == 0)
        assert Fails.num_failures == 2 * MAX_COLUMN_TRIES, "each alone and in a batch"
        await run.client.play()
        await run.until(1)
    assert [name.partition("#")[0] for name in await run.columns()] == ["a/0/2", "a/1/1"]


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_task_whose_samples_can_never_be_scored_ends_in_the_dead_letters(
    run: Run, max_staleness: int
) -> None:
    """With the scorer's words, and its place is given to another task."""
    Fails.rollouts = ("a/",)
    await run.begin("a", groups_per_step=1, max_staleness=max_staleness)
    async with run.scoring(Fails):
        await waited_for(run.readiness, lambda counts: "cannot judge a/" in counts.column_failure)
        while not await run.client.dead_letters():
            for lease in (await run.client.ask()).leases:
                await played_if_needed(run, lease)
        await run.client.submit("b")
        await run.client.play()
        await run.client.play()
        await run.until(1)
        assert not (await run.readiness()).column_failure, "control: a column was written"
    (letter,) = await run.client.dead_letters()
    assert letter.task.task_id == "a"
    assert "column length: ValueError: cannot judge a/" in letter.message


async def played_if_needed(run: Run, lease: task_pb.TaskLease) -> None:
    """Play a rollout, whose group may end meanwhile: the scorer gives up on its samples."""
    try:
        await run.client.play(lease=lease)
    except grpc.aio.AioRpcError as error:
        words = error.details() or ""
        assert "needs no more samples" in words or "has finished (FAILED)" in words


async def test_what_a_scorer_needs_may_be_away_for_long(run: Run) -> None:
    """It is not the sample's fault: it is tried again and again, and not replaced."""
    Away.num_failures = 0
    await run.begin("a")
    async with run.scoring(Away):
        await run.until(1)
    assert [name.partition("#")[0] for name in await run.columns()] == ["a/0/1", "a/1/1"]


async def test_a_column_that_the_run_does_not_require_is_rejected(run: Run) -> None:
    """By the trajectory manager, with the columns that it knows."""
    await run.begin("a", columns=("other",))
    async with run.scoring() as task:
        with pytest.raises(Exception, match="column"):
            await task
