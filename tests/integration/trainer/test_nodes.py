"""How a trainer asks the real scheduler for its nodes and gives them back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from seamflow.channel import connect
from seamflow.durations import to_duration
from seamflow.errors import SeamflowError
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis.errors import ConfigError
from tests.lib.scheduler.support import (
    BOTH,
    RUN,
    heartbeat,
    list_nodes,
    register,
    running_scheduler,
)
from tests.lib.trainer.support import trainer_config
from trainer.cli import build
from trainer.clients.node_client import NodeClient
from trainer.config import TrainerConfig
from trainer.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

GANG = "trainer"
HALF = pb.GenerationForecast(remaining_rollouts=2, batch_rollouts=4)


async def test_nodes_are_asked_for_ahead_only_while_others_generate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lone node would leave its batch unfinished; with another rollout node it returns early.

    The trainer's clock, which is far ahead of the scheduler's, does not count.
    """
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        await register(stub, "both", *BOTH)
        await nodes.request_ahead()
        assert (await list_nodes(stub))["both"].assignment.tag == "rollout"
        await register(stub, "other", "rollout")
        monkeypatch.setattr("time.time", lambda: 4e9)  # in the year 2096
        await nodes.request_ahead()
        assert (await list_nodes(stub))["both"].assignment.tag == "train"


async def test_nodes_that_alone_can_score_are_not_taken_before_the_batch_is_full() -> None:
    """Its groups would never be complete; a node that is left to score is enough."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        await register(stub, "other", "rollout")
        await register(stub, "all", *BOTH, "score")
        assert not await nodes.others_generate()
        await register(stub, "second", "score")
        assert await nodes.others_generate()


async def test_nodes_that_generate_for_other_runs_are_no_others() -> None:
    """A shared node fills no batch of this run until it works for it."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        workers = [
            pb.Worker(tag="rollout", address="host:1", run_id=run_id) for run_id in (RUN, "other")
        ]
        await stub.RegisterNode(
            pb.RegisterNodeRequest(
                node_id="shared", run_id="other", capability_tags=["rollout"], workers=workers
            )
        )
        await register(stub, "both", *BOTH)
        await nodes.request_ahead()
        assert (await list_nodes(stub))["both"].assignment.tag == "rollout"
        await register(stub, "own", "rollout")
        await nodes.request_ahead()
        assert (await list_nodes(stub))["both"].assignment.tag == "train"


async def test_a_trainer_loads_once_the_rollout_server_has_released_the_device() -> None:
    """Assigned is not enough, nor what is reported for an older assignment."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        before = await register(stub, "both", *BOTH)
        await heartbeat(stub, "both", before.epoch)
        waiting = asyncio.create_task(nodes.until_free())
        while (assigned := (await list_nodes(stub))["both"].assignment).tag != "train":
            await asyncio.sleep(0.01)
        for state in (pb.NODE_STATE_ACTIVE, pb.NODE_STATE_DRAINING):
            await heartbeat(stub, "both", before.epoch, state)
            assert await nodes._num_free() == 0
            assert not waiting.done()
        await heartbeat(stub, "both", assigned.epoch, pb.NODE_STATE_ACTIVATING)
        await waiting
        await heartbeat(stub, "both", assigned.epoch)
        await nodes.until_free()  # a trainer that was restarted while it has the device


@pytest.mark.parametrize(("device", "waits"), [("cuda", True), ("cpu", False)])
async def test_only_a_gpu_is_waited_for(
    device: str, waits: bool, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """The ranks are started after the wait; on a CPU nothing is lent that could be occupied."""
    began: list[str] = []

    async def until_free(self: NodeClient) -> None:
        began.append("wait")

    async def start(self: RankGroup, config: TrainerConfig) -> None:
        began.append("start")
        raise ValueError("far enough")

    monkeypatch.setattr(NodeClient, "until_free", until_free)
    monkeypatch.setattr(RankGroup, "start", start)
    config = trainer_config(
        **{"run_id": RUN, "model": model, "scheduler": "127.0.0.1:1", "device": device},
        checkpoint__folder=tmp_path / "checkpoints",
    )
    with pytest.raises(ConfigError, match="far enough"):
        async with build(config):
            pass
    assert began == (["wait", "start"] if waits else ["start"])


async def test_a_repeated_release_keeps_the_decision() -> None:
    """They came too early for the batch. After the last step they are free."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        await register(stub, "other", "rollout")
        await register(stub, "both", *BOTH)
        await _placed(stub)
        await nodes.release(2, HALF)
        for _ in range(2):
            await nodes.request_ahead()
            await nodes.release_again()
        assert (await list_nodes(stub))["both"].assignment.tag == "train"
        again = "gang trainer: kept: decided before for batch 2"
        assert (await _causes(stub))[1:] == [again, again]
        await nodes.acquire(2)
        await nodes.release()
        assert (await list_nodes(stub))["both"].assignment.tag == "rollout"


async def test_batches_that_are_full_immediately_are_distinguished() -> None:
    """The nodes are never given back: each acquire with another number is a batch, no other."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        await register(stub, "other", "rollout")
        await register(stub, "both", *BOTH)
        await _placed(stub)

        async def measured() -> int:
            (run,) = (await stub.ListRuns(pb.ListRunsRequest())).runs
            return len(run.stage_times)

        for _ in range(9):
            await nodes.acquire(1)
            await nodes.acquire()
        assert await measured() == 0
        for batch in range(2, 9):
            await nodes.acquire(batch)
        assert await measured() == 1


async def test_a_gang_that_shrinks_frees_a_node_and_gets_it_back_when_it_grows() -> None:
    """Between two releases; a gang of fixed size may not."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 2, ["a", "b"])
        nodes.offer(1, 2)
        for name in ("a", "b"):
            await register(stub, name, *BOTH)

        async def acquired() -> list[str]:
            waiting = asyncio.create_task(nodes.acquire(1))
            while not waiting.done():
                for name, known in (await list_nodes(stub)).items():
                    await heartbeat(stub, name, known.assignment.epoch)
                await asyncio.sleep(0.01)
            await waiting
            return [known.assignment.tag for known in (await list_nodes(stub)).values()]

        assert await acquired() == ["train", "train"]
        nodes.need(["a"])
        assert await acquired() == ["train", "rollout"]
        nodes.need(["a", "b"])
        assert await acquired() == ["train", "train"]
        nodes.offer(0, 0)
        nodes.need(["a"])
        with pytest.raises(SeamflowError, match="trainer"):
            await nodes.acquire(1)


async def test_return_seconds_are_measured_by_the_nodes() -> None:
    """The trainer knows how early to ask from its nodes' own switches."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        lent = await register(stub, "both", *BOTH)
        await heartbeat(stub, "both", lent.epoch)
        await nodes.request_ahead()
        assert nodes.return_seconds == 0.0
        placed = await stub.RequestNodes(
            pb.RequestNodesRequest(run_id=RUN, gang_id=GANG, tag="train", num_nodes=1)
        )
        epoch = placed.nodes[0].assignment.epoch
        await stub.Heartbeat(
            pb.HeartbeatRequest(
                node_id="both",
                reported_epoch=epoch,
                known_epoch=epoch,
                state=pb.NODE_STATE_ACTIVE,
                switch_duration=to_duration(4.0),
            )
        )
        await nodes.acquire()
        assert nodes.return_seconds == 4.0


async def test_a_release_reports_the_rest_of_the_batch() -> None:
    """The audit log has the cause of keeping the nodes; a repeated release logs nothing."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = NodeClient(channel, RUN, GANG, 1)
        await register(stub, "other", "rollout")
        await register(stub, "both", *BOTH)
        await _placed(stub)
        for _ in range(2):
            await nodes.release(2, HALF)
        [cause] = await _causes(stub)
        assert cause.startswith("gang trainer: kept: cycle 1 of 3 before modes are compared; ")


async def _placed(stub: SchedulerServiceAsyncStub) -> None:
    placed = await stub.RequestNodes(
        pb.RequestNodesRequest(run_id=RUN, gang_id=GANG, tag="train", num_nodes=1)
    )
    await heartbeat(stub, "both", placed.nodes[0].assignment.epoch)


async def _causes(stub: SchedulerServiceAsyncStub) -> list[str]:
    watch = stub.WatchAllocations(pb.WatchAllocationsRequest())
    message = await watch.read()
    watch.cancel()
    assert isinstance(message, pb.WatchAllocationsResponse)
    return [event.cause for event in message.events if "kept" in event.cause]
