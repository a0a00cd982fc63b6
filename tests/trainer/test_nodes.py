"""How a trainer asks the real scheduler for its nodes and gives them back."""

from __future__ import annotations

import time

from seamflow.channel import connect
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from tests.scheduler.support import (
    BOTH,
    RUN,
    heartbeat,
    list_nodes,
    register,
    running_scheduler,
)
from trainer.peers import Nodes

GANG = "trainer"


async def test_nodes_are_asked_for_ahead_only_while_others_generate() -> None:
    """Alone, the node would leave its batch unfinished; beside a rollout node it comes early."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = Nodes(channel, RUN, GANG, 1)
        await register(stub, "both", *BOTH)
        await nodes.ask_ahead(time.time())
        assert (await list_nodes(stub))["both"].assignment.tag == "rollout"
        await register(stub, "other", "rollout")
        await nodes.ask_ahead(time.time() + 3600)
        assert (await list_nodes(stub))["both"].assignment.tag == "rollout", "not yet"
        await nodes.ask_ahead(time.time())
        assert (await list_nodes(stub))["both"].assignment.tag == "train"


async def test_way_back_is_what_the_nodes_measured() -> None:
    """The trainer knows how early to ask from its nodes' own switches."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = Nodes(channel, RUN, GANG, 1)
        lent = await register(stub, "both", *BOTH)
        await heartbeat(stub, "both", lent.epoch)
        await nodes.ask_ahead(0.0)
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
                switch_seconds=4.0,
            )
        )
        await nodes.acquire()
        assert nodes.return_seconds == 4.0


async def test_release_tells_what_is_left_of_the_batch() -> None:
    """The audit log says why the nodes are lent; a second release says nothing."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        nodes = Nodes(channel, RUN, GANG, 1)
        await register(stub, "other", "rollout")
        await register(stub, "both", *BOTH)
        await _placed(stub)
        for _ in range(2):
            await nodes.release(pb.Outlook(remaining_rollouts=3, batch_rollouts=4))
        assert await _causes(stub) == ["gang trainer released; lent: nothing was measured yet"]


async def _placed(stub: SchedulerServiceStub) -> None:
    placed = await stub.RequestNodes(
        pb.RequestNodesRequest(run_id=RUN, gang_id=GANG, tag="train", num_nodes=1)
    )
    await heartbeat(stub, "both", placed.nodes[0].assignment.epoch)


async def _causes(stub: SchedulerServiceStub) -> list[str]:
    watch = stub.WatchAllocations(pb.WatchAllocationsRequest())
    events = (await watch.read()).events
    watch.cancel()
    return [event.cause for event in events if "released" in event.cause]
