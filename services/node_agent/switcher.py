"""Moves a node from one activity to the next, in order: the old one ends before the new one begins.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> ACTIVATING ...    one order at a time, the newest wins
                 ACTIVE -> ACTIVATING -> ACTIVE               its worker was lost and came back
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
from services.node_agent.activities import Activity, Role

__all__ = ["Order", "Standing", "Switcher"]

Step = Callable[[int], Awaitable[None]]

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_SLOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Order:
    """What the node shall do."""

    role: Role | None
    """Whose worker shall have the device; None: nobody's."""
    epoch: int
    """Assignment it comes from."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the node reports."""

    state: pb.NodeState.ValueType
    """Where it stands."""
    epoch: int
    """Assignment epoch it has taken up."""
    switch_seconds: float | None = None
    """How long the switch to this took; None: it is not the end of a switch."""


class Switcher:
    """Carries out the newest order.

    A worker that does not answer is asked again and again: nothing else may take the device while
    it is unknown whether the old owner has let go. A newer order is taken up between two calls; one
    in flight is never cut short, for a worker stopped halfway holds nobody knows what.

    Args:
        activities: by role.
        may_activate: asked before each activation; False while the lease is in doubt.
        clock: monotonic seconds.
        recheck_seconds: how often the workers are made sure of: one may have been restarted.
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
        self._wanted: Order | None = None
        self._done: Order | None = None
        self._active: Role | None = None
        self._is_leaving = False
        self._news = asyncio.Event()
        self.standing = Standing(pb.NODE_STATE_IDLE, 0)
        """What to report."""
        self.moved = asyncio.Event()
        """Set whenever `standing` changed."""
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

    def follow(self, order: Order) -> None:
        """From now on, do this; what no worker can do is as good as nothing."""
        if self._wanted is not None and order.epoch < self._wanted.epoch:
            return
        if order.role is not None and order.role not in self._activities:
            get_logger().error("no_such_worker", **_labels(order.role), epoch=order.epoch)
            order = Order(None, order.epoch)
        if order != self._wanted:
            self._wanted = order
            self._news.set()

    async def leave(self, epoch: int) -> None:
        """Let work in flight go on elsewhere, and end all; every worker is told once, not more.

        Returns when all have given the device back, or did not answer.
        """
        if self._active is not None:
            with suppress(grpc.aio.AioRpcError):
                await self._activities[self._active].hand_over()
        self._is_leaving = True
        self.follow(Order(None, epoch))
        await self._idle.wait()

    def recheck(self) -> None:
        """Make sure of the workers now: one has started or ended."""
        self._news.set()

    async def run(self) -> None:
        """Carry out orders, forever."""
        while True:
            if self._wanted == self._done:
                await self._wait_for_news(self._recheck_seconds)
            order = self._wanted
            if order != self._done and order is not None:
                await self._switch(order)
            elif order is not None:
                await self._hold(order)

    async def _switch(self, order: Order) -> None:
        began, before = self._clock(), self._active
        if before not in (None, order.role):
            self._stand(Standing(pb.NODE_STATE_DRAINING, self.standing.epoch))
        if not await self._end_others(order):
            return
        ended = self._clock()
        if not await self._begin(order):
            return
        self._done = order
        now = self._clock()
        state = pb.NODE_STATE_IDLE if order.role is None else pb.NODE_STATE_ACTIVE
        if before == order.role:  # a new epoch for what it does anyway
            self._stand(Standing(state, order.epoch))
        else:
            self._stand(Standing(state, order.epoch, now - began))
            self._measure(before, order, ended - began, now - ended)

    async def _hold(self, order: Order) -> None:
        """Stay as ordered, whatever a worker that was restarted meanwhile takes for its part."""
        # All at once: one that is frozen must not hide another's end.
        found = await asyncio.gather(*map(self._is_on, self._activities))
        for role, is_on in zip(self._activities, found, strict=True):
            if self._wanted != order:
                return
            if role == order.role and not is_on:
                get_logger().warning("worker_lost", **_labels(role), epoch=order.epoch)
                if await self._begin(order):
                    self._stand(Standing(pb.NODE_STATE_ACTIVE, order.epoch))
            elif role != order.role and is_on:
                get_logger().warning("worker_intrudes", **_labels(role), epoch=order.epoch)
                await self._try(self._activities[role].deactivate, order, role)

    async def _is_on(self, role: Role) -> bool:
        """Whether a worker is known to have the device."""
        try:
            return not (await self._activities[role].status()).is_off
        except grpc.aio.AioRpcError as error:
            get_logger().warning("worker_unreachable", **_labels(role), code=error.code().name)
            return False  # asked again at the next recheck

    async def _end_others(self, order: Order) -> bool:
        """End every activity but the ordered one; False if a newer order came first."""
        for role, activity in self._activities.items():
            if role != order.role and not await self._insist(activity.deactivate, order, role):
                return False
        if self._active != order.role:
            self._active = None
        return True

    async def _begin(self, order: Order) -> bool:
        """Begin the ordered activity; False if a newer order came first."""
        role = order.role
        if role is None:
            return True
        self._stand(Standing(pb.NODE_STATE_ACTIVATING, order.epoch))
        self._active = role

        async def activate(epoch: int) -> None:
            while not self._may_activate() and self._wanted == order:
                await self._wait_for_news(_FIRST_PAUSE_SECONDS)
            if self._wanted == order:
                await self._activities[role].activate(epoch)

        return await self._insist(activate, order, role)

    async def _insist(self, step: Step, order: Order, role: Role) -> bool:
        """Repeat `step` until the worker has done it; False if a newer order came first."""
        for pause in _pauses():
            done = await self._try(step, order, role)
            if done or self._wanted != order or self._is_leaving:
                return self._wanted == order
            await self._wait_for_news(pause)
        raise AssertionError("the pauses never end")

    async def _try(self, step: Step, order: Order, role: Role) -> bool:
        log = get_logger().bind(**_labels(role), epoch=order.epoch)
        slow = asyncio.get_running_loop().call_later(
            _SLOW_SECONDS, lambda: log.warning("worker_slow", seconds=_SLOW_SECONDS)
        )
        try:
            await step(order.epoch)
        except grpc.aio.AioRpcError as error:
            log.warning("worker_refused", code=error.code().name)
            return False
        finally:
            slow.cancel()
        return True

    async def _wait_for_news(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    def _stand(self, standing: Standing) -> None:
        self.standing = standing
        self.moved.set()
        if standing.state == pb.NODE_STATE_IDLE:
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
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
