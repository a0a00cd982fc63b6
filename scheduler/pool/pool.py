"""The pool of nodes: one change at a time, committed before it is visible."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import (
    AllocationEvent,
    EventKind,
    Gang,
    GangKey,
    Node,
    NodeState,
    State,
    Tail,
)
from scheduler.model.stage_balance import SplitAdvice
from scheduler.policy.allocation_policy import AllocationPolicy
from scheduler.policy.tail_migration import MeasuredBatch
from scheduler.policy.training_nodes import SplitRule
from scheduler.pool.gang_measurements import Allocation, GenerationLoad
from scheduler.pool.node_leases import NodeLeases
from scheduler.pool.state_transaction import StateTransaction
from scheduler.pool.tail_starts import TailStarts
from scheduler.store.redis_store import RedisStore, SupersededError
from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable, Reason, ServiceError, unavailable
from services.chassis.log import get_logger

Change = Callable[[StateTransaction], object]

_EVENTS_AT_ONCE = 1000


class Pool:
    """Serves reads from its copy of the state, which is valid until another scheduler takes over.

    Args:
        store: persists the state; opened by `open`.
        policy: decides assignments.
        leases: of the nodes.
        clock: seconds since 1970, that never jump.
        leave_seconds: time for a node to leave its old work after it was assigned to a gang.
        split_rule: when nodes move between training and generation; None: never.
    """

    def __init__(
        self,
        *,
        store: RedisStore,
        policy: AllocationPolicy,
        leases: NodeLeases,
        clock: Callable[[], float],
        leave_seconds: float,
        split_rule: SplitRule | None = None,
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
        self._tails, self._load = TailStarts(), GenerationLoad()
        self._allocation = (
            None if split_rule is None else Allocation(rule=split_rule, load=self._load.share)
        )
        self._assigned = metrics.counter(
            "scheduler", "assignments_total", "Assignments given out, by activity tag.", ("tag",)
        )
        self._lost = metrics.counter("scheduler", "lost_nodes_total", "Leases that ran out.")
        self._overdue = metrics.counter(
            "scheduler", "overdue_nodes_total", "Nodes that did not leave their old work in time."
        )
        self._nodes_gauge = metrics.gauge(
            "scheduler", "nodes", "Nodes by activity tag and reported state.", ("tag", "state")
        )
        self._waiting_gangs = metrics.gauge(
            "scheduler",
            "waiting_gangs",
            "Gangs that have no nodes, by what they wait for.",
            ("on",),
        )
        self._advised = metrics.gauge(
            "scheduler",
            "advised_generation_nodes",
            "1: one more node should generate for the gang, 0 for none; absent: not measured yet.",
            ("run_id", "gang_id"),
        )
        self._stage_seconds = metrics.gauge(
            "scheduler",
            "stage_seconds",
            "Mean seconds that the gang's newest batches took in each stage.",
            ("run_id", "gang_id", "stage"),
        )

    async def open(self) -> None:
        """Take over the state of an earlier scheduler; running assignments stay."""
        self._incarnation = await self._store.open()
        self._state = await self._store.load()
        get_logger().info(
            "pool_opened", incarnation=self._incarnation, nodes=len(self._state.nodes)
        )
        self._report([])

    async def close(self) -> None:
        """Answer every long poll now."""
        self._closing = True
        self._wake()

    @property
    def state(self) -> State:
        return self._state

    def heartbeat_time(self, node_id: str) -> float | None:
        """Unix time of a node's last heartbeat; None if there was none since this start."""
        return self._heartbeat_times.get(node_id)

    def transaction(self) -> StateTransaction:
        return self._transaction(self._state)

    async def register(self, node: Node) -> Node:
        """Register a node; returns it with its new assignment."""
        self._heard(node.node_id)
        await self._apply(lambda tx: tx.register(node))
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
        """Apply a node's report, and renew its lease if it is of the newest node agent.

        See `StateTransaction.report`. Returns False if the report changed nothing (a retry).

        Raises:
            ServiceError: NOT_FOUND, or ABORTED / STALE_EPOCH: the node agent must register again.
        """
        if not self._leases.trusted:
            raise unavailable(Reason.STORE_UNAVAILABLE, "the store does not confirm this scheduler")
        if known > self._state.last_epoch:
            await self._apply(lambda tx: tx.see_epoch(known))
        events = await self._apply(
            lambda tx: tx.report(
                node_id, state, reported, known, switch_seconds=switch_seconds, report=report
            )
        )
        self._heard(node_id)
        if report is not None:
            self._tails.observe(self._state.nodes[node_id])
            self._load.observe(self._state.nodes[node_id], self._clock())
        return bool(events)

    async def change(self, change: Change) -> None:
        await self._apply(change)

    async def request(self, gang: Gang) -> None:
        """Request nodes for a gang, which leaves its run's tail to as many others as are enough."""
        known = replace(gang, tail_nodes=self._tails.num_nodes(gang.key, self._state))
        await self._apply(lambda tx: tx.request(known))

    async def release(
        self,
        key: GangKey,
        forecast: BatchForecast | None,
        batch: int,
        measured: MeasuredBatch | None,
    ) -> Tail | None:
        """Release a gang's nodes until `batch`; when it begins with it, None if not known.

        See `StateTransaction.release`. `measured` is what the gang measured of its newest batch.
        """
        before = self._state
        await self._apply(lambda tx: tx.release(key, forecast, batch))
        if measured is None:
            if not batch:
                self._tails.forget(key)
            return None
        tail = await self._tails.after_release(before, self._state, key, batch, measured)
        if tail is not None and tail is not before.tails.get(key):
            await self._apply(lambda tx: tx.set_tail(key, tail, measured.num_rollouts))
        return tail

    def advised_nodes(self, key: GangKey) -> int:
        """Nodes that a gang should train on; 0: no advice, or its size is fixed."""
        balance = self._state.balances.get(key)
        return balance.advised_nodes if balance is not None and self._allocation else 0

    async def until(self, condition: Callable[[State], bool], seconds: float) -> State:
        """Wait until `condition` holds, at most `seconds`; returns the state at that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._closing or condition(self._state)):
                    await self._changed.wait()
        return self._state

    async def next_events(self, after: int) -> list[AllocationEvent]:
        """The events after sequence `after`, as soon as there is one; empty when closing.

        A watcher ahead of the log (the store was lost) restarts at the oldest kept event.
        """
        async with self._one_at_a_time:  # a commit in flight may have written to the log
            if after > self._state.last_sequence:
                after = 0
        while not (self._closing or self._state.last_sequence > after):
            await self._changed.wait()
        if self._closing:
            return []
        return await self._store.events(after, _EVENTS_AT_ONCE)

    async def sweep(self) -> None:
        """Lose nodes with expired leases, and apply changes that are due by time.

        Raises:
            DependencyUnavailable: a newer scheduler has taken over; this one must end.
        """
        query_time = self._leases.now()
        try:
            superseded = not await self._store.is_newest(self._incarnation)
            if not superseded:
                self._leases.confirm(query_time)
                await self._apply(self._by_time)
        except ServiceError as error:
            get_logger().warning("sweep_failed", reason=error.reason, error=error.message)
            return
        if superseded:
            raise DependencyUnavailable("store", "another scheduler has taken over")

    def _by_time(self, tx: StateTransaction) -> None:
        nodes = tx.state.nodes.values()
        held = [node.node_id for node in nodes if node.state is not NodeState.LOST]
        tx.lose(self._leases.expired(held))
        # While the scheduler was down, no node could get its new assignment.
        if self._clock() - self._opened >= self._leave_seconds:
            tx.mark_overdue(self._leave_seconds)
        tx.replan("time passed")

    async def _apply(self, change: Change) -> list[AllocationEvent]:
        """Commit a change, even if its caller is cancelled; returns its events.

        An abandoned commit could arrive after a later change that was made without it.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(change)))

    async def _commit(self, change: Change) -> list[AllocationEvent]:
        async with self._one_at_a_time:
            before = await self._load_if_in_doubt()
            tx = self._transaction(before)
            change(tx)
            after = tx.state
            if after == before:
                self._state = after  # reports of nodes are not stored
                return []
            self._in_doubt = True
            try:
                await self._store.commit(self._incarnation, before, after, tx.events)
            except SupersededError as error:
                message = "another scheduler has taken over"
                raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
            self._in_doubt = False
            self._state = after
        self._report(tx.events)
        self._wake()
        return tx.events

    def _transaction(self, state: State) -> StateTransaction:
        return StateTransaction(state, self._policy, self._clock(), self._allocation)

    async def _load_if_in_doubt(self) -> State:
        """The state; read again if the outcome of the last commit is unknown."""
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

    def _report(self, events: list[AllocationEvent]) -> None:
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
        self._nodes_gauge.clear()
        standing = Counter((node.assignment.tag, node.state) for node in self._state.nodes.values())
        for labels, number in standing.items():
            self._nodes_gauge.labels(*labels).set(number)
        self._waiting_gangs.clear()
        for gang in self._state.waiting():
            self._waiting_gangs.labels(gang.waits_for.partition(":")[0]).inc()
        self._report_balances()

    def _report_balances(self) -> None:
        self._advised.clear()
        self._stage_seconds.clear()
        for key, balance in self._state.balances.items():
            if balance.advice is not SplitAdvice.UNKNOWN:
                self._advised.labels(*key).set(balance.advice is SplitAdvice.ADD_GENERATION)
                self._stage_seconds.labels(*key, "generation").set(balance.generation_seconds)
                self._stage_seconds.labels(*key, "training").set(balance.training_seconds)


def gang_granted(key: GangKey) -> Callable[[State], bool]:
    """Holds when all nodes of the gang are active for it, or when the gang was released."""

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
