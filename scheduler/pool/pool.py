"""The pool of nodes: one change at a time, committed before it is told to anyone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from scheduler.model.records import (
    AllocationEvent,
    EventKind,
    GangKey,
    Node,
    NodeReport,
    NodeState,
    State,
)
from scheduler.model.split_advice import Advice
from scheduler.policy.allocation_policy import AllocationPolicy
from scheduler.pool.heartbeats import Leases
from scheduler.pool.state_transaction import Draft
from scheduler.store.interface import Store, SupersededError
from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable, Reason, ServiceError, unavailable
from services.chassis.log import get_logger

__all__ = ["Pool", "assignment_differs", "gang_granted"]

Change = Callable[[Draft], object]

_EVENTS_AT_ONCE = 1000


class Pool:
    """Serves reads from its copy of the state, which is true while no other scheduler took over.

    Args:
        store: what survives; opened by `open`.
        policy: decides who does what.
        leases: who was heard of lately.
        clock: seconds since 1970.
        leave_seconds: a node that was given to a gang leaves its old work within this.
    """

    def __init__(
        self,
        *,
        store: Store,
        policy: AllocationPolicy,
        leases: Leases,
        clock: Callable[[], float],
        leave_seconds: float,
    ) -> None:
        self._store = store
        self._policy = policy
        self._leases = leases
        self._clock = clock
        self._leave_seconds = leave_seconds
        self._opened = clock()
        self._incarnation = 0
        self._state = State()
        self._in_doubt = False
        self._closing = False
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._heartbeat_times: dict[str, float] = {}
        self._assigned = metrics.counter(
            "scheduler", "assignments_total", "Assignments given out, by activity tag.", ("tag",)
        )
        self._lost = metrics.counter("scheduler", "lost_nodes_total", "Leases that ran out.")
        self._overdue = metrics.counter(
            "scheduler", "overdue_nodes_total", "Nodes that did not leave their old work in time."
        )
        self._standing = metrics.gauge(
            "scheduler", "nodes", "Nodes by activity tag and reported state.", ("tag", "state")
        )
        self._waiting = metrics.gauge(
            "scheduler",
            "waiting_gangs",
            "Gangs that have no nodes, by what they wait for.",
            ("on",),
        )
        self._advised = metrics.gauge(
            "scheduler",
            "advised_generation_nodes",
            "1: one more node should generate for the gang, 0: none; absent: not measured yet.",
            ("run_id", "gang_id"),
        )
        self._stage_seconds = metrics.gauge(
            "scheduler",
            "stage_seconds",
            "Mean seconds that the gang's newest batches took in each stage.",
            ("run_id", "gang_id", "stage"),
        )

    async def open(self) -> None:
        """Take over what an earlier scheduler left; what runs is not touched."""
        self._incarnation = await self._store.open()
        self._state = await self._store.load()
        get_logger().info(
            "pool_opened", incarnation=self._incarnation, nodes=len(self._state.nodes)
        )
        self._tell([])

    async def close(self) -> None:
        """Answer every long-poll now."""
        self._closing = True
        self._wake()

    @property
    def state(self) -> State:
        """What holds now."""
        return self._state

    def heartbeat_time(self, node_id: str) -> float | None:
        """When a node was last heard of, seconds since 1970; None: not since this start."""
        return self._heartbeat_times.get(node_id)

    def draft(self) -> Draft:
        """A copy to try changes on."""
        return Draft(self._state, self._policy, self._clock())

    async def register(self, node: Node) -> Node:
        """Let a node join or come back; returns it with its new assignment."""
        self._heard(node.node_id)
        await self._apply(lambda draft: draft.register(node))
        return self._state.nodes[node.node_id]

    async def heartbeat(
        self,
        node_id: str,
        state: NodeState,
        reported: int,
        known: int,
        *,
        switch_seconds: float | None = None,
        report: NodeReport | None = None,
    ) -> bool:
        """Take a node's report, and renew its lease if it is the node agent's newest life.

        See `Draft.report`. False: the same was reported before, its answer was lost.

        Raises:
            ServiceError: NOT_FOUND, or ABORTED / STALE_EPOCH: the node agent must register again.
        """
        if not self._leases.trusted:
            raise unavailable(Reason.STORE_UNAVAILABLE, "the store does not confirm this scheduler")
        if known > self._state.last_epoch:
            await self._apply(lambda draft: draft.see_epoch(known))
        events = await self._apply(
            lambda draft: draft.report(
                node_id, state, reported, known, switch_seconds=switch_seconds, report=report
            )
        )
        self._heard(node_id)
        return bool(events)

    async def change(self, change: Change) -> None:
        """Commit any other change."""
        await self._apply(change)

    async def until(self, condition: Callable[[State], bool], seconds: float) -> State:
        """Wait until `condition` holds, at most `seconds`; returns what holds then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._closing or condition(self._state)):
                    await self._changed.wait()
        return self._state

    async def next_events(self, after: int) -> list[AllocationEvent]:
        """The events after sequence `after`, as soon as there is one; empty when closing.

        A watcher that is ahead of the log (its store was lost) starts again at the oldest kept.
        """
        async with self._one_at_a_time:  # what is being committed is in the log already
            if after > self._state.last_sequence:
                after = 0
        while not (self._closing or self._state.last_sequence > after):
            await self._changed.wait()
        if self._closing:
            return []
        return await self._store.events(after, _EVENTS_AT_ONCE)

    async def sweep(self) -> None:
        """Let go of silent nodes, and do what has become due by time alone.

        Raises:
            DependencyUnavailable: a newer scheduler has taken over; this one must end.
        """
        asked = self._leases.now()
        try:
            superseded = not await self._store.is_newest(self._incarnation)
            if not superseded:
                self._leases.confirm(asked)
                await self._apply(self._by_time)
        except ServiceError as error:
            get_logger().warning("sweep_failed", reason=error.reason, error=error.message)
            return
        if superseded:
            raise DependencyUnavailable("store", "another scheduler has taken it over")

    def _by_time(self, draft: Draft) -> None:
        nodes = draft.state.nodes.values()
        held = [node.node_id for node in nodes if node.state is not NodeState.LOST]
        draft.lose(self._leases.expired(held))
        # While the scheduler was away no node could learn of its new work.
        if self._clock() - self._opened >= self._leave_seconds:
            draft.give_up(self._leave_seconds)
        draft.replan("time passed")

    async def _apply(self, change: Change) -> list[AllocationEvent]:
        """Commit a change, also when its caller goes away meanwhile; what it put into the log.

        A commit that nobody waits for could land after the next one was drafted without it.
        """
        return await asyncio.shield(asyncio.ensure_future(self._committed(change)))

    async def _committed(self, change: Change) -> list[AllocationEvent]:
        async with self._one_at_a_time:
            before = await self._settled()
            draft = Draft(before, self._policy, self._clock())
            change(draft)
            after = draft.state
            if after == before:
                self._state = after  # reports of nodes are not stored
                return []
            self._in_doubt = True
            try:
                await self._store.commit(self._incarnation, before, after, draft.events)
            except SupersededError as error:
                message = "another scheduler has taken over"
                raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
            self._in_doubt = False
            self._state = after
        self._tell(draft.events)
        self._wake()
        return draft.events

    async def _settled(self) -> State:
        """The state, read again if the last commit's outcome is unknown."""
        if self._in_doubt:
            self._state = await self._store.load()
            self._in_doubt = False
        return self._state

    def _heard(self, node_id: str) -> None:
        self._leases.renew(node_id)
        self._heartbeat_times[node_id] = self._clock()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _tell(self, events: list[AllocationEvent]) -> None:
        for event in events:
            node = event.node
            if node is None:
                get_logger().info(f"run_{event.kind}", run_id=event.run_id, cause=event.cause)
                continue
            if event.kind is EventKind.ASSIGNED:
                self._assigned.labels(node.assignment.tag).inc()
            elif event.kind is EventKind.LOST:
                self._lost.inc()
            elif event.kind is EventKind.OVERDUE:
                self._overdue.inc()
            get_logger().info(
                f"node_{event.kind}",
                node_id=node.node_id,
                tag=node.assignment.tag,
                gang_id=node.assignment.gang_id,
                epoch=node.assignment.epoch,
                reported_epoch=node.reported_epoch,
                state=node.state,
                lent=node.assignment.lent,
                cause=event.cause,
            )
        self._standing.clear()
        standing = Counter((node.assignment.tag, node.state) for node in self._state.nodes.values())
        for labels, number in standing.items():
            self._standing.labels(*labels).set(number)
        self._waiting.clear()
        for gang in self._state.waiting():
            self._waiting.labels(gang.waits_for.partition(":")[0]).inc()
        self._tell_balances()

    def _tell_balances(self) -> None:
        self._advised.clear()
        self._stage_seconds.clear()
        for key, balance in self._state.balances.items():
            if balance.advice is not Advice.UNKNOWN:
                self._advised.labels(*key).set(balance.advice is Advice.ADD_GENERATION)
                self._stage_seconds.labels(*key, "generation").set(balance.generation_seconds)
                self._stage_seconds.labels(*key, "training").set(balance.training_seconds)


def gang_granted(key: GangKey) -> Callable[[State], bool]:
    """Holds when all nodes of the gang do its work, or when the gang was released meanwhile."""

    def granted(state: State) -> bool:
        gang = state.gangs.get(key)
        return gang is None or state.granted(gang)

    return granted


def assignment_differs(node_id: str, epoch: int) -> Callable[[State], bool]:
    """Holds when the node's assignment is not the one of `epoch`."""

    def differs(state: State) -> bool:
        node = state.nodes.get(node_id)
        return node is None or node.assignment.epoch != epoch

    return differs
