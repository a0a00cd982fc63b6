"""A node that rolls out, scores and trains by tag: scheduler, node agent, manager, scorer, server.

All of them are processes of their own but the trainer, of which only the orders it gets are noted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.channel import connect
from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as column_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

from bench.harness.processes import Server, service
from tests.lib.node_agent.support import Workers, active
from tests.lib.trajectory_manager.client import RULES, Client
from tests.system.services.scoring.gated import journal

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

NODE, COLUMN = "node-a", "reference"
LEASE_SECONDS = 600
ENOUGH = 4
"""Samples for which the node is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a test sees of the processes."""

    client: Client
    scheduler: SchedulerServiceAsyncStub
    trainer: Workers
    folder: Path

    async def finish(self, number: int) -> list[str]:
        """Play so many rollouts to their end."""
        return [f"{await self.client.play()}#t2" for _ in range(number)]

    async def does(self, tag: str) -> None:
        """Wait until the node does this."""
        await active(self.scheduler, NODE, tag)

    def allow(self, number: int) -> None:
        """Let so many samples be scored in all."""
        (self.folder / "allowed").write_text(str(number))

    def noted(self, word: str) -> list[str]:
        """The samples of the scorer's lines that begin with this word."""
        return [line.split()[1] for line in journal(self.folder) if line.startswith(word + " ")]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something in the journal."""
        while not condition():
            await asyncio.sleep(0.02)

    async def backlog(self) -> int:
        """Samples that lack the column."""
        stub = async_stub(ColumnServiceStub, self.client.channel)
        request = column_pb.GetColumnBacklogRequest(run_id=self.client.run_id, column=COLUMN)
        return (await stub.GetColumnBacklog(request)).num_samples

    async def train(self) -> None:
        """Request the node as the trainer does, and wait until it is granted."""
        request = pb.RequestNodesRequest(
            run_id=self.client.run_id,
            gang_id="trainer",
            tag="train",
            num_nodes=1,
            node_ids=[NODE],
            wait=to_duration(20),
        )
        while not (await self.scheduler.RequestNodes(request)).granted:
            pass

    async def stop_training(self) -> None:
        """Release it as the trainer does."""
        request = pb.ReleaseNodesRequest(run_id=self.client.run_id, gang_id="trainer")
        await self.scheduler.ReleaseNodes(request)


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A run, and a node with three tags that begins with rollout."""
    run_id = uuid.uuid4().hex
    (tmp_path / "allowed").write_text("0")
    manager = service("trajectory_manager", "trajectory_manager", tmp_path, redis_url=redis_url)
    scheduler = service("scheduler", "scheduler", tmp_path, redis_url=redis_url)
    rollout = service(
        "rollout.server", "rollout_server", tmp_path, engine="fake", server_id=NODE, run_id=run_id
    )
    trainer = Workers()
    async with AsyncExitStack() as stack:
        for process in (manager, scheduler, rollout):
            stack.enter_context(process)
        channel = await stack.enter_async_context(connect(manager.address))
        client = Client(channel, run_id)
        await client.create_run(_rules())
        await client.submit(*(f"task-{number}" for number in range(8)))
        scoring = _scoring(run_id, manager, scheduler, tmp_path)
        address = await stack.enter_async_context(trainer.serving())
        stack.enter_context(scoring)
        agent = _node_agent(run_id, scheduler, rollout, scoring, address, tmp_path)
        stack.enter_context(agent)
        nodes = await stack.enter_async_context(connect(scheduler.address))
        stub = async_stub(SchedulerServiceStub, nodes)
        async with asyncio.timeout(60):
            yield World(client=client, scheduler=stub, trainer=trainer, folder=tmp_path)


def _rules() -> trajectory_pb2.RunConfig:
    """Those of other tests, with a column and leases that outlast a test."""
    rules = trajectory_pb2.RunConfig(required_columns=[COLUMN])
    rules.MergeFrom(RULES)
    rules.max_staleness = 7
    rules.lease_duration.CopyFrom(Duration(seconds=LEASE_SECONDS))
    return rules


def _scoring(run_id: str, manager: Server, scheduler: Server, folder: Path) -> Server:
    return service(
        "services.scoring",
        "scoring",
        folder,
        run_id=run_id,
        column=COLUMN,
        model=folder,
        scorer="tests.system.services.scoring.gated:Gated",
        trajectory_manager=manager.address,
        micro_batch_tokens=1,
        node_agent="true",
        node_id=NODE,
        scheduler=scheduler.address,
        request_samples=ENOUGH,
    )


def _node_agent(
    run_id: str, scheduler: Server, rollout: Server, scoring: Server, trainer: str, folder: Path
) -> Server:
    return service(
        "services.node_agent",
        "node_agent",
        folder,
        node_id=NODE,
        run_id=run_id,
        scheduler=scheduler.address,
        capability_tags="rollout,train,score",
        rollout_server=rollout.address,
        trainer=trainer,
        workers=f'[{{"tag": "score", "address": "{scoring.address}"}}]',
    )


@pytest.mark.long(short="tests/system/end_to_end/test_scoring_node.py")
async def test_a_node_scores_between_two_spells_of_rollout(world: World) -> None:
    """Once enough samples lack the column; none is scored while the node rolls out."""
    world.allow(99)
    await world.does("rollout")
    await world.client.lease()  # runs all the time
    first = await world.finish(ENOUGH - 1)
    await asyncio.sleep(1)  # too few: nothing happens
    assert journal(world.folder) == []
    first += await world.finish(1)
    await world.until(lambda: sorted(world.noted("scored")) == sorted(first))
    await world.does("rollout")
    assert await world.backlog() == 0
    before = journal(world.folder)
    await world.finish(ENOUGH - 1)
    await asyncio.sleep(1)
    assert journal(world.folder) == before
    assert before[0] == "loaded"


async def test_training_takes_a_node_that_scores_in_mid_batch(world: World) -> None:
    """What is scored is written, the rest goes back at once, and each sample is scored once."""
    world.allow(3)
    await world.does("rollout")
    samples = await world.finish(7)
    await world.until(lambda: len(world.noted("begun")) == 4)
    training = asyncio.create_task(world.train())
    await asyncio.sleep(0.5)
    assert world.trainer.journal.entries == ["suspending", "suspended"]
    world.allow(4)  # the forward pass ends; no other begins
    await training
    await world.does("train")
    assert world.trainer.journal.entries[-1] == "train"
    assert await world.backlog() == 3
    world.allow(99)
    await asyncio.sleep(1)
    assert len(world.noted("begun")) == 4
    await world.stop_training()
    await world.until(lambda: len(world.noted("scored")) == 7)
    await world.does("rollout")
    assert sorted(world.noted("scored")) == sorted(samples)
    assert await world.backlog() == 0
