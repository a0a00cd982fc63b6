"""The queue of turns that wait for a rollout server, in the order of the dispatch policy.

A server gets a turn only while it has capacity. The others wait here, where their order can still
change and cancelling one is free. When something changes, `assign` matches servers with turns one
by one and wakes only the turns that got a server.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from rollout.gateway.dispatch.policies import (
    DispatchPolicy,
    PlanningPolicy,
    PoolSnapshot,
    TurnRequest,
)
from services.chassis import metrics
from services.chassis.errors import Reason, exhausted
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from rollout.gateway.dispatch.server_state import Server
    from services.lib.decode_latency import DecodeLatency

_log = get_logger()
_RETRY_SECONDS = 1.0
_PLAN_SECONDS = 1.0
_WAITING = metrics.gauge("rollout_gateway", "waiting_turns", "Turns without a rollout server.")
_SECONDS = metrics.histogram(
    "rollout_gateway", "wait_seconds", "Time that a turn waited for a rollout server."
)

WithRoom = Callable[[int | None, int, frozenset[str]], "Sequence[Server]"]
"""The servers that can take one more turn: of the pinned version (first argument), else of any
allowed version that is at least the required one (second argument); those at the addresses of the
third only if no other serves."""

_Needs = tuple[int | None, int, frozenset[str]]  # as WithRoom has them

_Key = tuple[float, int]  # the policy's order, arrival
_Entry = tuple[_Key, TurnRequest, "asyncio.Future[Server]"]


class WaitingTurns:
    """Assigns turns to servers and counts them there, from `acquire` until `release`."""

    def __init__(
        self,
        policy: DispatchPolicy,
        with_room: WithRoom,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        weights_timeout: float | None = None,
        serving: Callable[[], Sequence[Server]] = tuple,
        latency: DecodeLatency | None = None,
    ) -> None:
        """`serving` and `latency` are the input of planning policies.

        A turn waits `weights_timeout` seconds for its required weight version, then takes any
        allowed one; None: it waits without a limit.
        """
        self._policy = policy
        self._planner = policy if isinstance(policy, PlanningPolicy) else None
        self._with_room = with_room
        self._max_waiting = max_waiting
        self._clock = clock
        self._weights_timeout = weights_timeout
        self._serving = serving
        self._latency = latency
        self._num_taken = 0
        self._num_planned = 0
        self._num_arrived = 0
        # One sorted queue for turns with equal needs.
        self._queues: dict[_Needs, list[_Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    async def acquire(self, turn: TurnRequest) -> Server:
        """Wait for a server with an allowed version and count the turn there.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, the queue is full.
        """
        self._check_capacity(turn)
        try:
            async with asyncio.timeout(
                self._weights_timeout if turn.required_weight_version else None
            ):
                return await self._server(turn)
        except TimeoutError:
            _log.warning("required_weights_timeout", weight_version=turn.required_weight_version)
            return await self._server(replace(turn, required_weight_version=0))

    async def _server(self, turn: TurnRequest) -> Server:
        turn = replace(turn, arrived=self._clock())
        self._num_arrived += 1
        key = (self._policy.order(turn), self._num_arrived)
        server: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        needs = (turn.pinned_weight_version, turn.required_weight_version, turn.avoided)
        queue = self._queues.setdefault(needs, [])
        insort(queue, (key, turn, server), key=itemgetter(0))
        _WAITING.inc()
        # A turn behind others changes nothing, except for a planning policy.
        if queue[0][0] is key or self._planner is not None:
            self.assign()
        try:
            return await server
        except asyncio.CancelledError:
            self._cancelled(needs, key, server)
            raise
        finally:
            _SECONDS.observe(self._clock() - turn.arrived)

    def release(self, server: Server) -> None:
        server.num_turns -= 1
        self._num_taken -= 1
        self.assign()

    async def keep_planning(self) -> None:
        """Call a planning policy every second; runs until cancelled."""
        while self._planner is not None:
            self._plan(self._planner)
            self.assign()
            await asyncio.sleep(_PLAN_SECONDS)

    def assign(self) -> None:
        if self._planner is not None:
            num_turns = len(self) + self._num_taken
            if 8 * abs(num_turns - self._num_planned) > self._num_planned:
                self._plan(self._planner)
        held: set[_Needs] = set()
        while self._assign_one(held):
            pass

    def _assign_one(self, held: set[_Needs]) -> bool:
        """Assign the first turn that a server has capacity for, skipping the queues in `held`."""
        for needs in sorted(self._queues.keys() - held, key=lambda one: self._queues[one][0][0]):
            if servers := self._with_room(*needs):
                if not self._serve_first(needs, servers):
                    held.add(needs)
                return True
        return False

    def _serve_first(self, needs: _Needs, servers: Sequence[Server]) -> bool:
        """Assign or drop the first turn of a queue; False: the policy keeps it waiting."""
        _, turn, waiting = self._queues[needs][0]
        if not waiting.cancelled():
            try:
                taken = self._taken(turn, servers)
            except Exception as error:  # a plug-in failed: only this turn fails
                waiting.set_exception(error)
            else:
                if taken is None:
                    return False
                waiting.set_result(taken)
        self._delete(needs, 0)
        return True

    def _taken(self, turn: TurnRequest, servers: Sequence[Server]) -> Server | None:
        candidates = [server.candidate() for server in servers]
        choice = self._policy.choose(turn, candidates)
        if choice is None:
            return None
        chosen = servers[candidates.index(choice)]
        chosen.num_turns += 1
        self._num_taken += 1
        return chosen

    def _plan(self, planner: PlanningPolicy) -> None:
        servers = [server.candidate() for server in self._serving()]
        self._num_planned = len(self) + self._num_taken
        planner.plan(PoolSnapshot(num_waiting=len(self), servers=servers, latency=self._latency))

    def _check_capacity(self, turn: TurnRequest) -> None:
        if len(self) >= self._max_waiting and not turn.continues:
            raise exhausted(
                Reason.TOO_MANY_REQUESTS,
                f"{len(self)} turns wait for a rollout server, the limit max_waiting_turns of "
                "[rollout_gateway]: retry later, add rollout servers, or raise it",
                _RETRY_SECONDS,
            )

    def _cancelled(self, needs: _Needs, key: _Key, server: asyncio.Future[Server]) -> None:
        if server.cancelled():
            self._remove(needs, key)
            self.assign()  # it may have held back the turns after it
        elif server.exception() is None:  # assigned just before it was cancelled
            self.release(server.result())

    def _remove(self, needs: _Needs, key: _Key) -> None:
        queue = self._queues.get(needs, [])
        index = bisect_left(queue, key, key=itemgetter(0))
        if index < len(queue) and queue[index][0] == key:
            self._delete(needs, index)

    def _delete(self, needs: _Needs, index: int) -> None:
        del self._queues[needs][index]
        _WAITING.dec()
        if not self._queues[needs]:
            del self._queues[needs]
