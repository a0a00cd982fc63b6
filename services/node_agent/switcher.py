"""Moves a node from one activity to the next, in order: the old one ends before the new one begins.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> ACTIVATING ...    one order at a time, the newest wins
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
from services.node_agent.activities import Activity

__all__ = ["Order", "Standing", "Switcher"]

Step = Callable[[int], Awaitable[None]]

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    """What the node shall do."""

    tag: str
    """Activity tag; empty: nothing."""
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
        activities: by capability tag.
        may_activate: asked before each activation; False while the lease is in doubt.
        clock: monotonic seconds.
        recheck_seconds: how often the workers are made sure of: one may have been restarted.
    """

    def __init__(
        self,
        activities: Mapping[str, Activity],
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
        self._active_tag = ""
        self._news = asyncio.Event()
        self.standing = Standing(pb.NODE_STATE_IDLE, 0)
        """What to report."""
        self.moved = asyncio.Event()
        """Set whenever `standing` changed."""
        self._switches = metrics.histogram(
            "node_agent", "switch_seconds", "Seconds a switch took, by new activity tag.", ("tag",)
        )

    def follow(self, order: Order) -> None:
        """From now on, do this."""
        if order != self._wanted:
            self._wanted = order
            self._news.set()

    async def run(self) -> None:
        """Carry out orders, forever."""
        while True:
            await self._wait_for_news(self._recheck_seconds)
            self._news.clear()
            order = self._wanted
            if order is None:
                continue
            if order != self._done:
                await self._switch(order)
            else:
                await self._hold(order)

    async def hand_over(self) -> None:
        """Let work in flight go on elsewhere, as far as the worker answers."""
        if self._active_tag:
            with suppress(grpc.aio.AioRpcError):
                await self._activities[self._active_tag].hand_over()

    async def _hold(self, order: Order) -> None:
        """Stay as ordered, whatever a worker that was restarted meanwhile takes for its part."""
        if await self._end_others(order) and order.tag and await self._is_off(order.tag):
            get_logger().warning("worker_restarted", tag=order.tag, epoch=order.epoch)
            await self._switch(order)

    async def _is_off(self, tag: str) -> bool:
        try:
            return await self._activities[tag].is_off()
        except grpc.aio.AioRpcError as error:
            get_logger().warning("worker_unreachable", tag=tag, code=error.code().name)
            return False  # asked again at the next recheck

    async def _switch(self, order: Order) -> None:
        began, before = self._clock(), self._active_tag
        if before not in ("", order.tag):
            self._stand(Standing(pb.NODE_STATE_DRAINING, self.standing.epoch))
        if not await self._end_others(order):
            return
        ended = self._clock()
        if order.tag and not await self._begin(order):
            return
        self._done = order
        seconds = self._clock() - began
        state = pb.NODE_STATE_ACTIVE if order.tag else pb.NODE_STATE_IDLE
        self._stand(Standing(state, order.epoch, seconds))
        self._switches.labels(order.tag).observe(seconds)
        get_logger().info(
            "switched",
            from_tag=before,
            to_tag=order.tag,
            epoch=order.epoch,
            deactivate_seconds=ended - began,
            activate_seconds=began + seconds - ended,
            switch_seconds=seconds,
        )

    async def _end_others(self, order: Order) -> bool:
        """End every activity but the ordered one; False if a newer order came first."""
        for tag, activity in self._activities.items():
            if tag != order.tag and not await self._insist(activity.deactivate, order, tag):
                return False
        if self._active_tag != order.tag:
            self._active_tag = ""
        return True

    async def _begin(self, order: Order) -> bool:
        """Begin the ordered activity; False if a newer order came first."""
        self._stand(Standing(pb.NODE_STATE_ACTIVATING, order.epoch))
        self._active_tag = order.tag

        async def activate(epoch: int) -> None:
            while not self._may_activate() and self._wanted == order:
                await self._wait_for_news(_FIRST_PAUSE_SECONDS)
            if self._wanted == order:
                await self._activities[order.tag].activate(epoch)

        return await self._insist(activate, order, order.tag)

    async def _insist(self, step: Step, order: Order, tag: str) -> bool:
        """Repeat `step` until the worker has done it; False if a newer order came first."""
        for pause in _pauses():
            try:
                await step(order.epoch)
            except grpc.aio.AioRpcError as error:
                get_logger().warning(
                    "worker_refused", tag=tag, epoch=order.epoch, code=error.code().name
                )
            else:
                return self._wanted == order
            if self._wanted != order:
                return False
            await self._wait_for_news(pause)
        raise AssertionError("the pauses never end")

    async def _wait_for_news(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _stand(self, standing: Standing) -> None:
        self.standing = standing
        self.moved.set()


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
