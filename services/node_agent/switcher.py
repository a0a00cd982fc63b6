"""Switches a node between activities: the old one ends before the new one begins.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> ACTIVATING ...    one order at a time, the newest wins
                 ACTIVE -> ACTIVATING -> ACTIVE               its worker was restarted
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis import metrics
from services.chassis.log import get_logger
from services.node_agent.worker_clients import Activity, Role

Step = Callable[[int], Awaitable[None]]

_FIRST_RETRY_SECONDS = 0.05
_LONGEST_RETRY_SECONDS = 2.0
_SLOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """The activity the node is assigned to."""

    role: Role | None
    """Role of the worker that gets the device; None: no worker."""
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Status that the node reports."""

    state: pb.NodeState.ValueType
    epoch: int
    switch_seconds: float | None = None
    """Duration of the switch that ended with this status; None: no switch ended."""


class Switcher:
    """Carries out the newest order.

    Calls to a worker that does not answer are retried: nothing else may take the device until the
    old owner has certainly released it. A newer order takes effect between two calls; a call in
    flight is never cancelled, because the worker's state would be unknown.

    Args:
        activities: by role.
        may_activate: checked before each activation; False while the lease is expired.
        clock: monotonic seconds.
        recheck_seconds: interval of checks for restarted workers.
    """

    def __init__(
        self,
        activities: Mapping[Role, Activity],
        may_activate: Callable[[], bool],
        clock: Callable[[], float],
        recheck_seconds: float,
    ) -> None:
        self._activities = activities
        self._may_activate = may_activate
        self._clock = clock
        self._recheck_seconds = recheck_seconds
        self._target: Order | None = None
        self._completed: Order | None = None
        self._active: Role | None = None
        self._is_draining = False
        self._changed = asyncio.Event()
        self.status = NodeStatus(pb.NODE_STATE_IDLE, 0)
        self.status_changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds = {
            name: metrics.histogram("node_agent", f"{name}_seconds", text, ("tag",))
            for name, text in (
                ("switch", "Seconds a switch took, by new activity tag."),
                ("deactivate", "Of those, seconds to end the old activity, by its tag."),
                ("activate", "Of those, seconds to begin the new activity, by its tag."),
            )
        }

    def set_order(self, order: Order) -> None:
        """Set the newest order; stale epochs are ignored, an unknown role counts as none."""
        if self._target is not None and order.epoch < self._target.epoch:
            return
        if order.role is not None and order.role not in self._activities:
            get_logger().error("unknown_worker", **_labels(order.role), epoch=order.epoch)
            order = Order(None, order.epoch)
        if order != self._target:
            self._target = order
            self._changed.set()

    async def drain(self, epoch: int) -> None:
        """Hand work in flight over to other nodes and deactivate every worker, without retries.

        Returns when each has released the device, or failed to answer.
        """
        if self._active is not None:
            with suppress(grpc.aio.AioRpcError):
                await self._activities[self._active].hand_over()
        self._is_draining = True
        self.set_order(Order(None, epoch))
        await self._idle.wait()

    def recheck(self) -> None:
        """Check the workers now, as one has started or ended."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            if self._target == self._completed:
                await self._wait_for_change(self._recheck_seconds)
            order = self._target
            if order != self._completed and order is not None:
                await self._switch(order)
            elif order is not None:
                await self._enforce(order)

    async def _switch(self, order: Order) -> None:
        began, before = self._clock(), self._active
        if before not in (None, order.role):
            self._set_status(NodeStatus(pb.NODE_STATE_DRAINING, self.status.epoch))
        if not await self._deactivate_others(order):
            return
        ended = self._clock()
        if not await self._activate(order):
            return
        self._completed = order
        now = self._clock()
        state = pb.NODE_STATE_IDLE if order.role is None else pb.NODE_STATE_ACTIVE
        if before == order.role:  # only a new epoch
            self._set_status(NodeStatus(state, order.epoch))
        else:
            self._set_status(NodeStatus(state, order.epoch, now - began))
            self._measure(before, order, ended - began, now - ended)

    async def _enforce(self, order: Order) -> None:
        """Restore the ordered state if a worker was restarted."""
        # Concurrently: a frozen worker must not delay the check of another.
        found = await asyncio.gather(*map(self._is_on, self._activities))
        for role, is_on in zip(self._activities, found, strict=True):
            if self._target != order:
                return
            if role == order.role and not is_on:
                get_logger().warning("worker_lost", **_labels(role), epoch=order.epoch)
                if await self._activate(order):
                    self._set_status(NodeStatus(pb.NODE_STATE_ACTIVE, order.epoch))
            elif role != order.role and is_on:
                get_logger().warning("unassigned_worker_active", **_labels(role), epoch=order.epoch)
                await self._attempt(self._activities[role].deactivate, order, role)

    async def _is_on(self, role: Role) -> bool:
        """Whether a worker is known to hold the device."""
        try:
            return not (await self._activities[role].status()).is_off
        except grpc.aio.AioRpcError as error:
            get_logger().warning("worker_unreachable", **_labels(role), code=error.code().name)
            return False  # checked again at the next recheck

    async def _deactivate_others(self, order: Order) -> bool:
        """Deactivate every other activity; False if a newer order arrived."""
        for role, activity in self._activities.items():
            if role != order.role and not await self._retry(activity.deactivate, order, role):
                return False
        if self._active != order.role:
            self._active = None
        return True

    async def _activate(self, order: Order) -> bool:
        """Activate the ordered activity; False if a newer order arrived."""
        role = order.role
        if role is None:
            return True
        self._set_status(NodeStatus(pb.NODE_STATE_ACTIVATING, order.epoch))
        self._active = role

        async def activate(epoch: int) -> None:
            while not self._may_activate() and self._target == order:
                await self._wait_for_change(_FIRST_RETRY_SECONDS)
            if self._target == order:
                await self._activities[role].activate(epoch)

        return await self._retry(activate, order, role)

    async def _retry(self, step: Step, order: Order, role: Role) -> bool:
        """Retry `step` until it succeeds; False if a newer order arrived."""
        for pause in _pauses():
            done = await self._attempt(step, order, role)
            if done or self._target != order or self._is_draining:
                return self._target == order
            await self._wait_for_change(pause)
        raise AssertionError("unreachable: the pauses are infinite")

    async def _attempt(self, step: Step, order: Order, role: Role) -> bool:
        log = get_logger().bind(**_labels(role), epoch=order.epoch)
        slow = asyncio.get_running_loop().call_later(
            _SLOW_SECONDS, lambda: log.warning("worker_slow", seconds=_SLOW_SECONDS)
        )
        try:
            await step(order.epoch)
        except grpc.aio.AioRpcError as error:
            log.warning("worker_call_failed", code=error.code().name, error=error.details())
            return False
        finally:
            slow.cancel()
        return True

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _set_status(self, status: NodeStatus) -> None:
        self.status = status
        self.status_changed.set()
        if status.state == pb.NODE_STATE_IDLE:
            self._idle.set()
        else:
            self._idle.clear()

    def _measure(self, before: Role | None, order: Order, ending: float, beginning: float) -> None:
        old, new = (role.tag if role else "" for role in (before, order.role))
        for name, tag, seconds in (
            ("switch", new, ending + beginning),
            ("deactivate", old, ending),
            ("activate", new, beginning),
        ):
            self._seconds[name].labels(tag).observe(seconds)
        get_logger().info(
            "switched",
            from_tag=old,
            to_tag=new,
            epoch=order.epoch,
            deactivate_seconds=ending,
            activate_seconds=beginning,
        )


def _labels(role: Role) -> dict[str, str]:
    return {"tag": role.tag, "run_id": role.run_id}


def _pauses() -> Iterator[float]:
    pause = _FIRST_RETRY_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
