"""Workers of any tag and of several training jobs on one node, and the node's reports."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import REGISTRY
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.node_agent.config import WorkerConfig
from tests.lib.node_agent.scripted_scheduler import ScriptedScheduler
from tests.lib.node_agent.support import Journal, Workers, agent_config, running_agent
from tests.lib.redis_server import free_port
from tests.lib.scheduler.support import running_scheduler


async def test_one_role_at_a_time_over_tags_and_runs() -> None:
    """A role is a tag and a run; the device is released before the next worker takes it."""
    scheduler, journal = ScriptedScheduler(), Journal()
    async with AsyncExitStack() as stack:
        roles = [("critic", ""), ("critic", "other"), ("reward", "")]
        workers = []
        for tag, run_id in roles:
            served = Workers(journal, f"{tag}/{run_id}").serving()
            address = await stack.enter_async_context(served)
            workers.append(WorkerConfig(tag=tag, address=address, run_id=run_id))
        port = await stack.enter_async_context(scheduler.serving())
        config = agent_config("a", port, "", ("critic", "reward"), workers=tuple(workers))
        await stack.enter_async_context(running_agent(config))
        expected = []
        for tag, run_id in roles * 2:
            await scheduler.until_active(await scheduler.assign(tag, run_id))
            expected += [f"{tag}/{run_id} on", f"{tag}/{run_id} off"]
        assert journal.entries == expected[:-1]


async def test_a_gang_of_another_run_gets_the_worker_of_its_run() -> None:
    """With a real scheduler: the node is one run's, the gang and its worker another's."""
    mine, other = Workers(name="mine"), Workers(name="other")
    async with (
        running_scheduler() as (port, stub),
        mine.serving() as address,
        other.serving() as elsewhere,
    ):
        workers = (
            WorkerConfig(tag="critic", address=address),
            WorkerConfig(tag="critic", address=elsewhere, run_id="other"),
        )
        async with running_agent(agent_config("a", port, "", ("critic",), workers=workers)):
            gang = pb.RequestNodesRequest(run_id="other", gang_id="g", tag="critic", num_nodes=1)
            gang.wait.FromSeconds(20)
            assert (await stub.RequestNodes(gang)).granted
            assert (mine.journal.entries, other.journal.entries) == ([], ["other on"])


async def test_rollout_servers_of_one_node_are_switched_together() -> None:
    """The next role begins when the last of them has released its device; measurements add up."""
    scheduler, journal = ScriptedScheduler(), Journal()
    first, second = Workers(journal), Workers(journal)
    async with (
        scheduler.serving() as port,
        first.serving() as address,
        second.serving() as other,
    ):
        workers = (WorkerConfig(tag="rollout", address=other),)
        config = agent_config("a", port, address, ("rollout", "train"), workers=workers)
        async with running_agent(config, recheck_seconds=0.02):
            await scheduler.until_active(await scheduler.assign("rollout"))
            await scheduler.until(lambda report: report.report.num_turns == 10)
            num_before = len(journal.entries)
            await scheduler.until_active(await scheduler.assign("train"))
            *before, last = journal.entries[num_before:]
            assert (sorted(before), last) == (["ABORT"] * 2 + ["release"] * 2, "train")
            assert len(scheduler.registrations[0].workers) == 3
            await scheduler.until_active(await scheduler.assign("rollout"))
            assert journal.entries[-4:].count("serve") == 2


async def test_registration_and_reports_describe_the_node() -> None:
    """Workers with their runs, hardware, turns, tokens and device bytes; a switch its time."""
    scheduler, workers = ScriptedScheduler(lease_seconds=2), Workers()
    async with scheduler.serving() as port, workers.serving() as address:
        settings: dict[str, Any] = {
            "workers": (WorkerConfig(tag="critic", address=address, run_id="other"),),
            "memory_bytes_per_second": 2e12,
            "flops": 1e15,
            "device_bytes": 80,
        }
        tags = ("rollout", "critic")
        config = agent_config("a", port, address, tags, **settings)
        async with running_agent(config, recheck_seconds=0.02):
            await scheduler.until_active(await scheduler.assign("rollout"))
            await scheduler.until(lambda report: report.report.num_turns == 5)
            await scheduler.until_active(await scheduler.assign("critic", "other"))
            assert scheduler.reports[-1].HasField("switch_duration")
            await scheduler.until(lambda report: report.report.used_device_bytes == 500)
            assert scheduler.reports[-1].report.tokens_per_second == 70.0
            await scheduler.until_active(await scheduler.assign("rollout"))
            await scheduler.until(lambda report: report.report.used_device_bytes == 1000)
    (registration,) = scheduler.registrations
    assert [(worker.tag, worker.run_id) for worker in registration.workers] == [
        ("rollout", ""),
        ("critic", "other"),
    ]
    assert registration.hardware == pb.Hardware(
        memory_bytes_per_second=2e12, flops=1e15, device_bytes=80
    )


async def test_a_new_epoch_for_the_same_work_is_no_switch() -> None:
    """Its gang was formed anew: next to no time, which would spoil the mean of all switches."""
    scheduler, workers = ScriptedScheduler(), Workers()
    async with (
        scheduler.serving() as port,
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        await scheduler.until_active(await scheduler.assign("train"))
        told, before = len(scheduler.reports), _measured_switches()
        for _ in range(3):
            await scheduler.until_active(await scheduler.assign("train"))
        assert not any(report.HasField("switch_duration") for report in scheduler.reports[told:])
        assert _measured_switches() == before


async def test_an_assignment_without_a_worker_is_not_active() -> None:
    """The node reports IDLE, and releases the device."""
    scheduler, workers = ScriptedScheduler(), Workers()
    async with (
        scheduler.serving() as port,
        workers.serving() as address,
        running_agent(agent_config("a", port, address)),
    ):
        await scheduler.until_active(await scheduler.assign("train"))
        epoch = await scheduler.assign("train", "nobody's")
        await scheduler.until(
            lambda report: (report.state, report.reported_epoch) == (pb.NODE_STATE_IDLE, epoch)
        )
        assert workers.trainer.suspended


async def test_an_unreachable_worker_is_not_reported_active() -> None:
    """Until it answers again the node reports ACTIVATING, under the same epoch."""
    scheduler, workers = ScriptedScheduler(), Workers()
    async with scheduler.serving() as port, AsyncExitStack() as stack:
        async with workers.serving(free_port()) as address:
            config = agent_config("a", port, address)
            await stack.enter_async_context(running_agent(config, recheck_seconds=0.05))
            epoch = await scheduler.assign("train")
            await scheduler.until_active(epoch)
        await scheduler.until(lambda report: report.state == pb.NODE_STATE_ACTIVATING)
        assert scheduler.reports[-1].reported_epoch == epoch
        async with workers.serving(int(address.rpartition(":")[2])):
            await scheduler.until_active(epoch)


def _measured_switches() -> float | None:
    name = "seamflow_node_agent_switch_seconds_count"
    return REGISTRY.get_sample_value(name, {"tag": "train"})
