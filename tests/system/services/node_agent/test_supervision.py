"""Worker processes of a node agent: killed, frozen, hung, and always accounted for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from tests.lib.redis_server import free_port
from tests.system.services.node_agent.supervised import is_alive, scripted_node


async def test_processes_stay_across_switches(tmp_path: Path) -> None:
    """A switch moves the device from one worker to another; no process is started again."""
    async with scripted_node(tmp_path, critic="", reward="") as (scheduler, node):
        await node.start()
        pids = {name: await node.is_up(name) for name in node.ports}
        expected = []
        for tag in ("critic", "reward", "critic"):
            epoch = await scheduler.assign(tag)
            await scheduler.until_active(epoch)
            expected.append((tag, "on", epoch, pids[tag]))
        await scheduler.until(lambda report: report.report.used_host_bytes > 10_000_000)
        switches = [entry for entry in node.journal() if entry.event in ("on", "off")]
        assert [entry for entry in switches if entry.event == "on"] == expected
        assert [entry.event for entry in switches] == ["on", "off", "on", "off", "on"]


async def test_a_killed_worker_restarts_under_the_same_epoch(tmp_path: Path) -> None:
    """It is started again and activated again, which is no switch."""
    async with scripted_node(tmp_path, critic="") as (scheduler, node):
        await node.start()
        epoch = await scheduler.assign("critic")
        await scheduler.until_active(epoch)
        pid = await node.is_up("critic")
        told = len(scheduler.reports)
        os.kill(pid, signal.SIGKILL)
        after = await node.is_up("critic", except_pids=(pid,))
        await node.until(lambda entry: entry == ("critic", "on", epoch, after))
        await scheduler.until_active(epoch)
        assert {report.reported_epoch for report in scheduler.reports[told:]} == {epoch}
        assert not any(report.HasField("switch_duration") for report in scheduler.reports[told:])


async def test_a_newer_order_has_priority_over_a_lost_worker(tmp_path: Path) -> None:
    """While the active worker is dead the node can be given other work, and does it."""
    async with scripted_node(tmp_path, critic="", reward="") as (scheduler, node):
        await node.start()
        await scheduler.until_active(await scheduler.assign("critic"))
        os.kill(await node.is_up("critic"), signal.SIGKILL)
        epoch = await scheduler.assign("reward")
        await scheduler.until_active(epoch)
        await node.until(lambda entry: entry[:3] == ("reward", "on", epoch))


async def test_a_worker_that_does_not_release_the_device_is_killed(tmp_path: Path) -> None:
    """Its process is started again, off, and the next activity gets the device."""
    async with scripted_node(tmp_path, critic="hung", reward="") as (scheduler, node):
        node.options["critic"] = "deactivate_seconds = 0.3"
        await node.start()
        await scheduler.until_active(await scheduler.assign("critic"))
        pid = await node.is_up("critic")
        await scheduler.until_active(await scheduler.assign("reward"))
        assert "hangs" in {entry.event for entry in node.journal()}
        assert not is_alive(pid)
        await node.is_up("critic", except_pids=(pid,))
        assert [entry.name for entry in node.journal() if entry.event == "on"] == [
            "critic",
            "reward",
        ]


async def test_a_frozen_worker_is_killed_when_the_device_is_reassigned(tmp_path: Path) -> None:
    """SIGSTOP: it answers nothing, so the node is not ACTIVE; the device is taken back by force."""
    async with scripted_node(tmp_path, critic="", reward="") as (scheduler, node):
        node.options["critic"] = "deactivate_seconds = 0.3"
        await node.start()
        await scheduler.until_active(await scheduler.assign("critic"))
        pid = await node.is_up("critic")
        os.kill(pid, signal.SIGSTOP)
        await scheduler.until_active(await scheduler.assign("reward"))
        assert not is_alive(pid)


async def test_descendants_of_a_dead_worker_are_killed(tmp_path: Path) -> None:
    """A child in another session holds the device: the next life could not have it."""
    async with scripted_node(tmp_path, critic="parent") as (scheduler, node):
        await node.start()
        epoch = await scheduler.assign("critic")
        await scheduler.until_active(epoch)
        child = int((tmp_path / "child").read_text())
        await written_down(tmp_path, child)
        pid = await node.is_up("critic")
        os.kill(pid, signal.SIGKILL)
        await node.until(lambda entry: entry[:3] == ("critic", "on", epoch) and entry.pid != pid)
        assert not is_alive(child)
        assert "refused" not in {entry.event for entry in node.journal()}


async def test_sigterm_ends_the_workers_and_the_node_leaves(tmp_path: Path) -> None:
    """The scheduler hears DRAINING, nothing else; a stubborn worker is killed after its grace."""
    async with scripted_node(tmp_path, critic="", reward="stubborn") as (scheduler, node):
        node.options["reward"] = "end_seconds = 0.3"
        await node.start()
        pids = {name: await node.is_up(name) for name in node.ports}
        await scheduler.until_active(await scheduler.assign("critic"))
        told = len(scheduler.reports)
        ended = asyncio.create_task(node.end_agent(signal.SIGTERM))
        await scheduler.until(lambda report: report.state == pb.NODE_STATE_DRAINING)
        await scheduler.assign("")
        assert await ended == 0
        assert {report.state for report in scheduler.reports[told:]} == {pb.NODE_STATE_DRAINING}
        assert [entry.event for entry in node.journal()][-2:] == ["off", "ended"]
        assert not any(map(is_alive, pids.values()))
        assert json.loads((tmp_path / "state" / "processes.json").read_text()) == {}


async def test_a_killed_agent_leaves_no_worker(tmp_path: Path) -> None:
    """SIGKILL leaves the agent no time; the kernel signals its workers."""
    async with scripted_node(tmp_path, critic="") as (scheduler, node):
        await node.start()
        await scheduler.until_active(await scheduler.assign("critic"))
        pid = await node.is_up("critic")
        await node.end_agent(signal.SIGKILL)
        while is_alive(pid):
            await asyncio.sleep(0.02)


async def test_orphans_of_an_earlier_agent_are_killed_before_registering(tmp_path: Path) -> None:
    """A stopped worker and its unknown child hold the device; the next agent frees it.

    Negative control: an agent that knows nothing of the earlier life cannot get the device.
    """
    async with scripted_node(tmp_path, critic="parent stubborn") as (scheduler, node):
        node.options["critic"] = "end_seconds = 0.1"
        await node.start()
        await scheduler.until_active(await scheduler.assign("critic"))
        pid, child = await node.is_up("critic"), int((tmp_path / "child").read_text())
        await written_down(tmp_path, child)
        os.kill(pid, signal.SIGSTOP)
        await node.end_agent(signal.SIGKILL)

        node.state, node.ports = "empty", {"critic": free_port()}
        await node.start()
        await node.until(lambda entry: entry.event == "refused")
        assert is_alive(pid), "negative control: the zombie has the device"
        assert is_alive(child)
        await node.end_agent(signal.SIGTERM)

        node.state = "state"
        registrations = len(scheduler.registrations)
        await node.start()
        while len(scheduler.registrations) == registrations:
            await asyncio.sleep(0.01)
        assert not is_alive(pid)
        assert not is_alive(child)
        await scheduler.until_active()


async def written_down(folder: Path, pid: int) -> None:
    """Wait until the agent has noted a process."""
    while f"[{pid}, " not in (folder / "state" / "processes.json").read_text():
        await asyncio.sleep(0.02)
