"""Kills, freezes, cuts and deaths of a pool under load."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

from bench.harness.processes import Server
from bench.report import percentile
from tests.chaos.scheduler.checker import Verdict, check, interrupted, reassigned
from tests.chaos.scheduler.gangs import Pace
from tests.chaos.scheduler.outcome import Outcome
from tests.chaos.scheduler.rig import (
    CAREFUL,
    QUICK,
    ChaosNode,
    Rig,
    Variant,
    listening,
    node_agent,
    pool,
    scheduler_server,
    until,
)
from tests.chaos.store.rig import Setting

_SUPERVISOR_SECONDS = 0.05
# Long enough for a node agent to find the scheduler again, and for some to be cut off at it.
_UP_SECONDS = (1.0, 3.0)
_CALM_SECONDS = (0.1, 0.8)
_SHORT_CUT_SECONDS = 1.5
_STALE_SECONDS = 1.0
_AT_ONCE = 4
_DEATHS_AT_ONCE = 3
_SHORT_SECONDS = (0.3, 2.0)
# Longer than a lease: what is lost is the work of a gang that goes on.
_LONG = Pace(sizes=(1, 2), work_seconds=(12.0, 20.0))
_CALM = [_LONG, _LONG, Pace(sizes=(1, 2), work_seconds=_SHORT_SECONDS)]


async def kill_scheduler(
    setting: Setting, kills: int = 50, variant: Variant | None = None, num_nodes: int = 8
) -> Outcome:
    """SIGKILL the scheduler, and start it again as a supervisor does; nothing else happens."""
    recoveries = []
    paces = [Pace(sizes=tuple(range(1, 1 + min(3, num_nodes))), work_seconds=_SHORT_SECONDS)] * 3
    async with pool(
        setting, lease=CAREFUL, num_nodes=num_nodes, paces=paces, variant=variant
    ) as rig:
        for _ in _rounds(setting, kills, 1, "SIGKILL of the scheduler"):
            await asyncio.sleep(rig.random.uniform(*_UP_SECONDS))
            killed = time.monotonic()
            rig.mark("kill")
            rig.scheduler.kill()
            await asyncio.sleep(_SUPERVISOR_SECONDS)
            rig.scheduler.start()
            await rig.list_nodes()
            rig.mark("back")
            recoveries.append(time.monotonic() - killed)
        events, audit = await rig.history()
    restarts = Verdict(work_interrupted=interrupted(events, audit))
    return Outcome(
        verdict=check(events, audit) + restarts,
        figures={
            "scheduler_kills": kills,
            "recovery_scheduler_p95_s": percentile(recoveries, 0.95),
            "recovery_scheduler_max_s": max(recoveries),
        },
        raw={"recovery_scheduler_s": recoveries},
        events=events,
    )


async def freeze_agents(
    setting: Setting, freezes: int = 100, variant: Variant | None = None
) -> Outcome:
    """SIGSTOP node agents past their lease while their workers continue; then wake them."""
    async with pool(setting, lease=QUICK, paces=_CALM, variant=variant) as rig:
        for count in _rounds(setting, freezes, _AT_ONCE, "SIGSTOP of node agents past a lease"):
            frozen = await rig.in_gangs(count)
            for node in frozen:
                rig.freeze(node)
            await asyncio.sleep(rig.lease.past + rig.random.random())
            for node in frozen:
                rig.wake(node)
            await rig.settled()
        events, audit = await rig.history()
    return Outcome(verdict=check(events, audit), figures={"freezes": freezes}, events=events)


async def cut_nodes(
    setting: Setting, partitions: int = 40, variant: Variant | None = None
) -> Outcome:
    """Cut node agents off from the scheduler past their lease, while they continue."""
    async with pool(setting, lease=QUICK, paces=_CALM, variant=variant) as rig:
        for count in _rounds(setting, partitions, _AT_ONCE, "partitions of nodes"):
            cut = await rig.in_gangs(count)
            for node in cut:
                rig.mark("cut", node.name)
                node.gate.cut()
            await asyncio.sleep(rig.lease.past + 1 + rig.random.random())
            for node in cut:
                rig.mark("heal", node.name)
                node.gate.heal()
            await rig.settled()
        events, audit = await rig.history()
    return Outcome(verdict=check(events, audit), figures={"partitions": partitions}, events=events)


async def cut_store(setting: Setting, cuts: int = 8) -> Outcome:
    """Cut the scheduler off from Redis, every other time for longer than a lease."""
    async with pool(setting, lease=QUICK, paces=_CALM) as rig:
        for number, _ in enumerate(_rounds(setting, cuts, 1, "partitions of the store")):
            await asyncio.sleep(rig.random.uniform(*_CALM_SECONDS))
            rig.mark("cut")
            rig.store_gate.cut()
            await asyncio.sleep(rig.lease.past if number % 2 else _SHORT_CUT_SECONDS)
            rig.mark("heal")
            rig.store_gate.heal()
            await rig.settled()
        events, audit = await rig.history()
    return Outcome(verdict=check(events, audit), figures={"store_partitions": cuts}, events=events)


async def kill_nodes(setting: Setting, deaths: int = 20) -> Outcome:
    """SIGKILL nodes, agent and workers together; their work must continue elsewhere."""
    async with pool(setting, lease=QUICK, paces=[_LONG, _LONG]) as rig:
        for count in _rounds(setting, deaths, _DEATHS_AT_ONCE, "deaths of nodes"):
            dead = await rig.in_gangs(count)
            for node in dead:
                rig.kill_node(node)
            await asyncio.sleep(rig.lease.past + 2)
            for node in dead:
                await rig.start_node(node)
            await rig.settled()
        events, audit = await rig.history()
    seconds = reassigned(events)
    if not seconds:
        raise RuntimeError("no gang worked on a node that died: nothing was measured")
    return Outcome(
        verdict=check(events, audit),
        figures={
            "node_deaths": deaths,
            "reassignments": len(seconds),
            "reassigned_max_s": max(seconds),
            "lease_s": QUICK.seconds,
            "lease_margin_s": QUICK.margin,
        },
        raw={"reassigned_s": seconds},
        events=events,
    )


async def replace_agents(
    setting: Setting, replacements: int = 6, variant: Variant | None = None
) -> Outcome:
    """Start a second agent while the first is frozen; it wakes, cut off, and changes nothing."""
    async with pool(setting, lease=QUICK, paces=_CALM, variant=variant) as rig:
        for _ in _rounds(setting, replacements, 1, "agents that were replaced"):
            (node,) = await rig.in_gangs(1)
            await _replace(rig, node)
            await rig.settled()
        events, audit = await rig.history()
    figures = {"agents_replaced": replacements}
    return Outcome(verdict=check(events, audit), figures=figures, events=events)


async def replace_scheduler(
    setting: Setting, replacements: int = 4, variant: Variant | None = None
) -> Outcome:
    """Start a second scheduler while the first is frozen or cut off from the store."""
    async with pool(setting, lease=QUICK, paces=_CALM, variant=variant) as rig:
        rounds = _rounds(setting, replacements, 1, "schedulers that were replaced")
        for number, _ in enumerate(rounds):
            await _take_over(rig, split=number % 2 == 1)
            await rig.settled()
        events, audit = await rig.history()
    figures = {"schedulers_replaced": replacements}
    return Outcome(verdict=check(events, audit), figures=figures, events=events)


async def _replace(rig: Rig, node: ChaosNode) -> None:
    """A supervisor that takes a frozen agent for dead starts another one."""
    zombie, gate, before = node.agent, node.gate, await _epoch(rig, node)
    rig.freeze(node)
    node.gate = await rig.add_gate()
    node.agent = rig.add(node_agent(rig, node.name, node.gate, node.worker))
    node.agent.start()

    async def is_replaced() -> bool:
        return await _epoch(rig, node) > before

    await until(is_replaced, f"another agent of {node.name} has registered")
    await asyncio.sleep(rig.lease.past)
    gate.cut()
    rig.mark("wake", node.name)
    zombie.send(signal.SIGCONT)
    await asyncio.sleep(_STALE_SECONDS)
    zombie.kill()


async def _take_over(rig: Rig, *, split: bool) -> None:
    """A supervisor that takes a frozen scheduler, or one without a store, for dead.

    Half of the nodes find the old one again, or never left it.
    """
    old, store = rig.scheduler, rig.store_gate
    rig.mark("kill")
    if split:
        store.cut()
    else:
        old.send(signal.SIGSTOP)
    await _start_another(rig)
    rig.mark("back")
    rig.random.shuffle(rig.nodes)
    strays = rig.nodes[::2]
    for node in rig.nodes:
        if not split or node not in strays:
            node.gate.point_at(rig.scheduler.port)
    if not split:
        await asyncio.sleep(_STALE_SECONDS)
        for node in strays:
            node.gate.point_at(old.port)
        old.send(signal.SIGCONT)
    await asyncio.sleep(rig.lease.past + _STALE_SECONDS)
    store.heal()
    await _ended(rig, old)
    for node in strays:
        node.gate.point_at(rig.scheduler.port)


async def _start_another(rig: Rig) -> None:
    """A scheduler with a separate connection to the same Redis; gangs call it from now on."""
    rig.store_gate = await rig.add_gate(rig.redis_port)
    rig.scheduler = rig.add(
        scheduler_server(rig.setting.folder, rig.store_gate.port, rig.lease, rig.variant)
    )
    rig.scheduler.start()
    await listening(rig.scheduler)
    rig.driver_gate.point_at(rig.scheduler.port)


async def _ended(rig: Rig, old: Server) -> None:
    """Return when the old scheduler has exited; that of the control has to be killed."""

    async def is_gone() -> bool:
        return not old.running

    if rig.variant.scheduler == Variant().scheduler:
        await until(is_gone, "the scheduler that was replaced has ended")
    else:
        old.kill()


async def _epoch(rig: Rig, node: ChaosNode) -> int:
    """Epoch that the node has taken up."""
    nodes = await rig.list_nodes()
    return next(entry.reported_epoch for entry in nodes if entry.node_id == node.name)


def _rounds(setting: Setting, total: int, at_once: int, what: str) -> Iterator[int]:
    """How many to strike at a time, until there were `total`."""
    bar = setting.progress.add_task(what, total=total)
    for first in range(0, total, at_once):
        count = min(at_once, total - first)
        yield count
        setting.progress.advance(bar, count)
