"""The contract over real gRPC."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from seamflow.channel import connect
from seamflow.durations import to_duration
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

from scheduler.api.servicer import MAX_PAGE
from scheduler.policy.placement import train_priority
from scheduler.pool.node_leases import NodeLeases
from tests.lib.redis_server import RedisServer
from tests.lib.scheduler.support import (
    BOTH,
    RUN,
    Process,
    heartbeat,
    list_nodes,
    register,
    release_nodes,
    request_nodes,
    running_scheduler,
)

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub


def _released(remaining: int, batch: int, done: int = 0) -> pb.ReleaseNodesRequest:
    forecast = pb.GenerationForecast(
        remaining_rollouts=remaining, batch_rollouts=batch, done_rollouts=done
    )
    return pb.ReleaseNodesRequest(run_id=RUN, gang_id="g", forecast=forecast)


def _bound(node_ids: list[str]) -> pb.RequestNodesRequest:
    return pb.RequestNodesRequest(
        run_id=RUN, gang_id="g", tag="train", num_nodes=2, node_ids=node_ids
    )


def _policy(**fields: Any) -> pb.SetRunPolicyRequest:
    return pb.SetRunPolicyRequest(run_id=RUN, policy=pb.RunPolicy(**fields))


def _heartbeat(**fields: Any) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(node_id="a", state=pb.NODE_STATE_ACTIVE, **fields)


async def _events(
    watch: grpc.aio.UnaryStreamCall[pb.WatchAllocationsRequest, pb.WatchAllocationsResponse],
) -> list[pb.AllocationEvent]:
    """The events of the next message."""
    message = await watch.read()
    assert isinstance(message, pb.WatchAllocationsResponse)
    return list(message.events)


async def _nodes(stub: SchedulerServiceAsyncStub, run_id: str) -> list[pb.Node]:
    return list((await stub.ListNodes(pb.ListNodesRequest(run_id=run_id))).nodes)


async def test_lend_and_take_back() -> None:
    """A node rolls out until its gang asks, trains until its gang releases, then is lent again."""
    async with running_scheduler() as (_, stub):
        lent = await register(stub, "a", *BOTH)
        assert (lent.tag, lent.lent) == ("rollout", True)
        await heartbeat(stub, "a", lent.epoch)

        asking = asyncio.create_task(request_nodes(stub, "g", wait=20))
        taken = await heartbeat(stub, "a", lent.epoch, wait=4)
        assert (taken.tag, taken.gang_id, taken.num_gang_nodes) == ("train", "g", 1)
        assert taken.epoch > lent.epoch
        await heartbeat(stub, "a", taken.epoch)
        answer = await asking
        assert answer.granted
        assert [entry.node_id for entry in answer.nodes] == ["a"]

        await release_nodes(stub, "g")
        back = await heartbeat(stub, "a", taken.epoch, wait=4)
        assert (back.tag, back.lent) == ("rollout", True)


async def test_gang_is_granted_only_when_all_nodes_report_it() -> None:
    """Assigned is not granted: each node must be ACTIVE under its present epoch."""
    async with running_scheduler() as (_, stub):
        for name in "ab":
            await register(stub, name, *BOTH)
        first = await request_nodes(stub, "g", num_nodes=2)
        assert not first.granted
        assert len(first.nodes) == 2
        epochs = {entry.node_id: entry.assignment.epoch for entry in first.nodes}
        await heartbeat(stub, "a", epochs["a"])
        await heartbeat(stub, "b", epochs["b"], pb.NODE_STATE_ACTIVATING)
        assert not (await request_nodes(stub, "g", num_nodes=2)).granted
        await heartbeat(stub, "b", epochs["b"])
        assert (await request_nodes(stub, "g", num_nodes=2)).granted


async def test_same_gang_asks_for_something_else() -> None:
    """A repeated request is idempotent; a different one under the same id is rejected."""
    async with running_scheduler() as (_, stub):
        await request_nodes(stub, "g", num_nodes=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request_nodes(stub, "g", num_nodes=3)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_gang_may_name_other_nodes_when_it_asks_again() -> None:
    """Its ranks were started elsewhere, as a node died."""
    async with running_scheduler() as (_, stub):
        for name in "abc":
            await register(stub, name, *BOTH)
        for names in (["a", "c"], ["b", "c"]):
            answer = await request_nodes(stub, "g", num_nodes=2, node_ids=names)
            assert sorted(entry.node_id for entry in answer.nodes) == names


async def test_stale_heartbeats_are_rejected() -> None:
    """An agent from before the last registration, or one that knows the future, must register."""
    async with running_scheduler() as (_, stub):
        old = await register(stub, "a", *BOTH)
        new = await register(stub, "a", *BOTH)
        assert new.epoch > old.epoch
        for epoch in (old.epoch, new.epoch + 7):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await heartbeat(stub, "a", epoch)
            assert caught.value.code() is grpc.StatusCode.ABORTED
        # An epoch seen by a node is never assigned again, even if the store lost it.
        assert (await register(stub, "a", *BOTH)).epoch > new.epoch + 7
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await heartbeat(stub, "nobody", 1)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_silent_node_is_lost_and_its_gang_re_formed() -> None:
    """The gang moves to a live node under new epochs; the silent one returns under a new epoch."""
    settings = {"lease_seconds": 0.4, "lease_margin_seconds": 0.1}
    async with running_scheduler(**settings) as (_, stub):
        first = await register(stub, "a", "train", priority=1.0)
        await register(stub, "b", *BOTH)
        placed = await request_nodes(stub, "g")
        assert [entry.node_id for entry in placed.nodes] == ["a"]

        epoch = (await list_nodes(stub))["b"].assignment.epoch
        while (moved := await heartbeat(stub, "b", epoch, wait=0.1)).tag != "train":
            epoch = moved.epoch
        nodes = await list_nodes(stub)
        assert nodes["a"].state == pb.NODE_STATE_LOST
        assert nodes["a"].assignment.tag == ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await heartbeat(stub, "a", placed.nodes[0].assignment.epoch)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert (await register(stub, "a", "train")).epoch > moved.epoch > first.epoch


async def test_drained_node_gives_its_work_up() -> None:
    """Draining withdraws the assignment; ending it brings work back; both are logged once."""
    async with running_scheduler() as (_, stub):
        await register(stub, "a", *BOTH)
        for _ in range(2):
            drained = await stub.DrainNode(pb.DrainNodeRequest(node_id="a", drain=True))
            assert (drained.node.draining, drained.node.assignment.tag) == (True, "")
        assert not (await request_nodes(stub, "g")).nodes
        back = await stub.DrainNode(pb.DrainNodeRequest(node_id="a", drain=False))
        assert back.node.assignment.tag == "train"


async def test_leaving_node_gets_nothing_more() -> None:
    """An agent that winds its present assignment down is about to end, until it registers again."""
    async with running_scheduler() as (_, stub):
        mine = await register(stub, "a", "rollout")
        gone = await heartbeat(stub, "a", mine.epoch, pb.NODE_STATE_DRAINING, wait=0)
        assert gone.tag == ""
        await heartbeat(stub, "a", gone.epoch, pb.NODE_STATE_IDLE)
        assert (await list_nodes(stub))["a"].assignment.tag == ""
        assert (await register(stub, "a", "rollout")).tag == "rollout"


async def test_dry_run_changes_nothing() -> None:
    """PlanAssignments returns what would change, and changes nothing."""
    async with running_scheduler() as (_, stub):
        await register(stub, "a", *BOTH)
        before = await list_nodes(stub)
        requests = [
            pb.RequestNodesRequest(run_id=RUN, gang_id=name, tag="train", num_nodes=size)
            for name, size in (("fits", 1), ("does-not", 2))
        ]
        requests.append(
            pb.RequestNodesRequest(run_id="other", gang_id="does-not", tag="train", num_nodes=3)
        )
        plan = await stub.PlanAssignments(pb.PlanAssignmentsRequest(requests=requests))
        assert [entry.assignment.gang_id for entry in plan.nodes] == ["fits"]
        assert [gang.gang_id for gang in plan.unplaced_gangs] == ["does-not", "does-not"]
        causes = {gang.run_id: gang.cause for gang in plan.unplaced_gangs}
        assert "1 can do train for run run, requested 2" in causes[RUN]
        assert "0 can do train for run other" in causes["other"]
        after = await list_nodes(stub)
        assert after["a"].assignment == before["a"].assignment


async def test_audit_log_can_be_followed_from_anywhere() -> None:
    """A watcher gets what it missed, then what happens, without a gap."""
    async with running_scheduler() as (_, stub):
        lent = await register(stub, "a", *BOTH)
        watch = stub.WatchAllocations(pb.WatchAllocationsRequest(run_id=RUN))
        seen = await _events(watch)
        assert [event.kind for event in seen] == ["registered", "assigned"]
        await heartbeat(stub, "a", lent.epoch)
        seen += await _events(watch)
        watch.cancel()
        await request_nodes(stub, "g")
        request = pb.WatchAllocationsRequest(after_sequence=seen[-1].sequence)
        watch = stub.WatchAllocations(request)
        seen += await _events(watch)
        watch.cancel()
        assert [event.kind for event in seen[2:]] == ["reported", "assigned"]
        assert [event.sequence for event in seen] == [1, 2, 3, 4]
        assert seen[-1].node.assignment.tag == "train"


async def test_runs_share_the_pool_by_their_policies() -> None:
    """A node with workers of two runs serves both; each run sees its own workers only."""
    async with running_scheduler() as (_, stub):
        workers = [
            pb.Worker(tag=tag, address=f"{tag}-{run}", run_id=run)
            for tag in BOTH
            for run in ("", "other")
        ]
        for name in "ab":
            request = pb.RegisterNodeRequest(
                node_id=name, run_id=RUN, capability_tags=BOTH, workers=workers
            )
            await stub.RegisterNode(request)
        runs = {entry.node_id: entry.assignment.run_id for entry in (await _nodes(stub, ""))}
        assert sorted(runs.values()) == ["", "other"]
        for run_id, own in ((RUN, ""), ("other", "other")):
            for entry in await _nodes(stub, run_id):
                assert {worker.run_id for worker in entry.workers} == {own}

        policy = pb.RunPolicy(priority=1, max_nodes=1)
        await stub.SetRunPolicy(pb.SetRunPolicyRequest(run_id="other", policy=policy))
        for size in (1, 2):
            await stub.RequestNodes(
                pb.RequestNodesRequest(
                    run_id="other", gang_id=f"g{size}", tag="train", num_nodes=size
                )
            )
        listed = (await stub.ListRuns(pb.ListRunsRequest())).runs
        assert [entry.run_id for entry in listed] == ["other", RUN]
        assert (listed[0].policy.priority, listed[0].policy.max_nodes) == (1, 1)
        assert (dict(listed[0].num_nodes), list(listed[0].waiting_gang_ids)) == (
            {"train": 1},
            ["g2"],
        )
        assert dict(listed[1].num_nodes) == {"rollout": 1}
        first = await stub.ListRuns(pb.ListRunsRequest(page_size=1))
        assert [entry.run_id for entry in first.runs] == ["other"]
        second = await stub.ListRuns(pb.ListRunsRequest(page_token=first.next_page_token))
        assert ([entry.run_id for entry in second.runs], second.next_page_token) == ([RUN], "")

        watch = stub.WatchAllocations(pb.WatchAllocationsRequest(run_id="other"))
        message = [event for event in await _events(watch) if not event.HasField("node")]
        watch.cancel()
        assert [(event.kind, event.run_id) for event in message] == [
            ("policy", "other"),
            ("waiting", "other"),
        ]
        assert message[1].cause == "gang g2: quota: run other may have 1 nodes, requested 2"


async def test_nodes_are_listed_page_by_page() -> None:
    """Each node once, in order; a size beyond the largest is coerced, a negative one refused."""
    names = [f"n{i:04}" for i in range(MAX_PAGE + 5)]
    async with running_scheduler() as (_, stub):
        for name in names:
            await stub.RegisterNode(
                pb.RegisterNodeRequest(node_id=name, run_id=RUN, capability_tags=["rollout"])
            )
        found, sizes = [], []
        request = pb.ListNodesRequest(run_id=RUN, page_size=10 * MAX_PAGE)
        async for page in pages(stub.ListNodes, request):
            found += [node.node_id for node in page.nodes]
            sizes.append(len(page.nodes))
        assert (found, sizes) == (names, [MAX_PAGE, 5])
        with pytest.raises(grpc.aio.AioRpcError, match="page_size is -1"):
            await stub.ListNodes(pb.ListNodesRequest(page_size=-1))


async def test_node_has_its_hardware_and_report() -> None:
    """Its priority comes from its hardware; reports and switches are listed."""
    async with running_scheduler() as (_, stub):
        hardware = pb.Hardware(memory_bytes_per_second=3.35e12, flops=989e12, device_bytes=80)
        request = pb.RegisterNodeRequest(
            node_id="a", run_id=RUN, capability_tags=BOTH, hardware=hardware
        )
        epoch = (await stub.RegisterNode(request)).assignment.epoch
        await heartbeat(stub, "a", epoch)
        await request_nodes(stub, "g")
        epoch = (await list_nodes(stub))["a"].assignment.epoch
        report = pb.NodeReport(num_turns=3, tokens_per_second=7.5, used_host_bytes=9)
        await stub.Heartbeat(
            pb.HeartbeatRequest(
                node_id="a",
                state=pb.NODE_STATE_ACTIVE,
                reported_epoch=epoch,
                known_epoch=epoch,
                switch_duration=to_duration(2.5),
                report=report,
            )
        )
        entry = (await list_nodes(stub))["a"]
        assert entry.train_priority == train_priority(3.35e12, 989e12) > 1
        assert entry.hardware == hardware
        assert entry.report == report
        assert dict(entry.switch_durations) == {"train": to_duration(2.5)}


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("RegisterNode", pb.RegisterNodeRequest(run_id=RUN, capability_tags=["train"])),
        ("RegisterNode", pb.RegisterNodeRequest(run_id=RUN, node_id="a")),
        ("Heartbeat", pb.HeartbeatRequest(node_id="a", state=pb.NODE_STATE_LOST)),
        ("Heartbeat", _heartbeat(wait=to_duration(9.0))),
        ("RequestNodes", pb.RequestNodesRequest(run_id=RUN, gang_id="g", tag="train")),
        ("RequestNodes", pb.RequestNodesRequest(run_id=RUN, gang_id="g", tag="rollout")),
        (
            "RequestNodes",
            pb.RequestNodesRequest(run_id=RUN, gang_id="g", tag="t", num_nodes=1, batch=-1),
        ),
        ("RequestNodes", _bound(["a", "a"])),
        ("RequestNodes", _bound(["a", ""])),
        ("RequestNodes", _bound(["a"])),
        ("ReleaseNodes", pb.ReleaseNodesRequest(run_id=RUN, gang_id="g", batch=-1)),
        ("ReleaseNodes", _released(remaining=1, batch=0)),
        ("ReleaseNodes", _released(remaining=5, batch=4)),
        ("ReleaseNodes", _released(remaining=1, batch=4, done=-1)),
        ("SetRunPolicy", pb.SetRunPolicyRequest()),
        ("SetRunPolicy", _policy(max_nodes=-1)),
        ("SetRunPolicy", _policy(rollout_share=float("nan"))),
        ("Heartbeat", _heartbeat(switch_duration=to_duration(-1.0))),
        ("WatchAllocations", pb.WatchAllocationsRequest(after_sequence=-1)),
        ("DrainNode", pb.DrainNodeRequest()),
    ],
)
async def test_invalid_requests_are_rejected(rpc: str, request_: object) -> None:
    """What makes no sense is INVALID_ARGUMENT."""
    async with running_scheduler() as (_, stub):
        call = getattr(stub, rpc)(request_)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if rpc == "WatchAllocations" else call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_assignments_survive_a_killed_scheduler(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """SIGKILL and restart: same assignments, same epochs, gang still granted, no epoch reused."""
    process = Process("scheduler", tmp_path, redis_url=redis_server.url, log_level="warning")
    await process.start()
    try:
        address = f"127.0.0.1:{process.port}"
        async with connect(address) as channel, AsyncExitStack() as later:
            stub = async_stub(SchedulerServiceStub, channel)
            await register(stub, "a", *BOTH, priority=1.0)
            await register(stub, "b", *BOTH)
            epoch = (await request_nodes(stub, "g")).nodes[0].assignment.epoch
            await heartbeat(stub, "a", epoch)
            before = await list_nodes(stub)

            process.end(signal.SIGKILL)
            await process.start()
            stub = async_stub(
                SchedulerServiceStub, await later.enter_async_context(connect(address))
            )
            assert (await heartbeat(stub, "a", epoch)).epoch == epoch
            after = await list_nodes(stub)
            assert {name: entry.assignment for name, entry in after.items()} == {
                name: entry.assignment for name, entry in before.items()
            }
            assert (await request_nodes(stub, "g")).granted
            assert (await register(stub, "c", "rollout")).epoch > epoch
    finally:
        process.end(signal.SIGTERM)


def test_leases_start_again_after_an_absence() -> None:
    """A scheduler that was frozen cannot know who was silent: everybody gets a full lease."""
    now = [100.0]
    leases = NodeLeases(10.0, 2.0, lambda: now[0])
    leases.renew("a")
    expired = []
    for step in (5.0, 5.0, 3.0):
        now[0] += step
        expired += leases.expired(["a"])
    assert expired == ["a"]
    leases.renew("a")
    now[0] += 500.0
    assert leases.expired(["a"]) == []
