"""The latency model of one engine in time: wakes whoever waits for a sequence when it has ended."""

from __future__ import annotations

import asyncio
import math

from bench.sim.costs import EngineCosts
from bench.sim.simulator.decoding import Busy, Decoding, Work
from bench.sim.simulator.virtual_time import Clock


class EngineLoop:
    """Sequences come and end; all of them can be held and go on, or be given up."""

    def __init__(self, costs: EngineCosts, slots: int, clock: Clock) -> None:
        self._clock = clock
        self._decoding = Decoding(costs=costs, slots=slots, now=clock.now())
        self._ends: dict[Work, asyncio.Future[bool]] = {}
        self._held: list[Work] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def holding(self) -> bool:
        """Whether sequences wait for `go_on`."""
        return self._held is not None

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._decoding.running)

    @property
    def num_queued(self) -> int:
        """Sequences without one."""
        return len(self._decoding.queue) + len(self._held or ())

    @property
    def tokens_per_second(self) -> float:
        """Present rate of all sequences with a slot."""
        return self._decoding.tokens_per_second

    def submit(self, work: Work) -> asyncio.Future[bool]:
        """Sample the rest of a sequence; gives True when it has ended, False if it was given up."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ends[work] = ended
        if self._held is not None:
            self._held.append(work)
        else:
            self._tick()
            self._decoding.submit(work)
            self._schedule()
        return ended

    def hold(self) -> None:
        """Take every sequence off the engine; what they had cached is lost."""
        if self._held is None:
            self._tick()
            self._held = self._decoding.clear()
            self._schedule()

    def go_on(self) -> None:
        """Submit what was held again, in the same order."""
        held, self._held = self._held or (), None
        self._tick()
        for work in held:
            self._decoding.submit(work)
        self._schedule()

    def give_up(self) -> None:
        """End every sequence where it stands."""
        self.hold()
        for work in self._held or ():
            self._ends.pop(work).set_result(False)
        self._held = []

    def update(self) -> Busy:
        """Bring `sampled` of every sequence up to date; how the time was spent up to now."""
        self._tick()
        self._decoding.settle()
        self._schedule()
        return self._decoding.spent()

    def _tick(self) -> None:
        now = self._clock.now()
        if now == self._decoding.now:
            return  # thousands of things happen at the same time
        for work in self._decoding.advance(now):
            self._ends.pop(work).set_result(True)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        when = self._decoding.next_event()
        self._timer = None if math.isinf(when) else self._clock.call_at(when, self._event)

    def _event(self) -> None:
        self._tick()
        self._schedule()
