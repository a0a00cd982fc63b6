"""An emulated inference engine as arithmetic: continuous batching by a latency model, no tokens.

All running sequences take every decode step together, so the engine counts steps, and a sequence
is done when the count reaches what it was at its admission plus its tokens. Work between two events
is thus one division, however long it takes. A prefill holds decoding up.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bench.sim.costs import EngineCosts

_ROUNDING = 1e-6  # of a step: sums of floats must not cost a whole token


@dataclass(slots=True, eq=False)
class Work:
    """One request to the engine."""

    rollout: int
    """Whose turn it is: keys and values of its earlier turns may still be here."""
    context: int
    """Tokens before the first one to sample."""
    tokens: int
    """To sample."""
    fresh: int
    """Of `context`, those that no engine has ever prefilled."""
    sampled: int = 0
    """Tokens so far."""
    running: bool = False
    """Whether it holds a slot."""
    begun_at: float = 0.0
    """Steps counted when it was admitted, less the tokens it had then."""


@dataclass(slots=True)
class Busy:
    """What an engine did with its time, in seconds."""

    decode: float = 0.0
    prefill: float = 0.0
    """First prefill of tokens."""
    repeated_prefill: float = 0.0
    """Prefill of tokens whose keys and values were given up."""


@dataclass(slots=True)
class Decoding:
    """The engine of one node."""

    costs: EngineCosts
    slots: int
    """Most sequences at once; fewer where their keys and values do not fit."""
    now: float = 0.0
    """The time up to which everything is accounted for."""
    busy: Busy = field(default_factory=Busy)
    """How the time was spent; prefill is charged when it begins, see `spent`."""
    running: dict[Work, None] = field(default_factory=dict)
    """Holding a slot, in the order of admission."""
    queue: deque[Work] = field(default_factory=deque)
    """Waiting for one."""
    _steps: float = 0.0
    _prefilled_at: float = 0.0
    _running_tokens: float = 0.0
    _kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _kept_tokens: int = 0
    _ends: list[tuple[float, int, Work]] = field(default_factory=list)
    _submitted: int = 0

    def submit(self, work: Work) -> None:
        """Let it wait for a slot; call `advance` first."""
        self.queue.append(work)
        self._admit()

    def next_event(self) -> float:
        """When a sequence ends if nothing else happens; infinite if none runs."""
        while self._ends and not _stands(*self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        steps = max(self._ends[0][0] - self._steps, 0.0)
        return max(self.now, self._prefilled_at) + steps * self._step_seconds()

    def advance(self, now: float) -> list[Work]:
        """Let time pass, at most to the next event; returns the sequences that have ended."""
        start = max(self.now, min(now, self._prefilled_at))
        if self.running and now > start:
            seconds = now - start
            steps = seconds / self._step_seconds()
            self._steps += steps
            self._running_tokens += steps * len(self.running)
            self.busy.decode += seconds
        self.now = max(self.now, now)
        ended = self._ended()
        self._admit()
        return ended

    def remove(self, work: Work) -> None:
        """Take a sequence out, wherever it is; `sampled` says how far it came."""
        if work.running:
            self._settle(work)
            self._leave(work)
            self._admit()
        elif work in self.queue:
            self.queue.remove(work)

    def clear(self) -> list[Work]:
        """Take all sequences out, in the order in which they would go on."""
        held = [*self.running, *self.queue]
        for work in list(self.running):
            self._settle(work)
            self._leave(work)
        self.queue.clear()
        self._kept.clear()
        self._kept_tokens = 0
        self._stop_prefill()
        return held

    def settle(self) -> None:
        """Bring every running sequence's `sampled` up to date."""
        for work in self.running:
            self._settle(work)

    def spent(self) -> Busy:
        """`busy` without what is charged for prefill that is still to come."""
        left = max(self._prefilled_at - self.now, 0.0)
        repeated = min(left, self.busy.repeated_prefill)
        return Busy(
            decode=self.busy.decode,
            prefill=self.busy.prefill - (left - repeated),
            repeated_prefill=self.busy.repeated_prefill - repeated,
        )

    @property
    def tokens_per_second(self) -> float:
        """Sampled by all running sequences, while no prefill holds them up."""
        return len(self.running) / self._step_seconds() if self.running else 0.0

    def _step_seconds(self) -> float:
        return self.costs.step_seconds(len(self.running), self._running_tokens)

    def _admit(self) -> None:
        while self.queue and self._fits(self.queue[0]):
            work = self.queue.popleft()
            self._prefill(work)
            work.running = True
            work.begun_at = self._steps - work.sampled
            self._submitted += 1
            self.running[work] = None
            self._running_tokens += work.context + work.sampled
            end = work.begun_at + work.tokens
            heapq.heappush(self._ends, (end, self._submitted, work))

    def _fits(self, work: Work) -> bool:
        room = self.costs.cached_tokens - self._running_tokens - work.context - work.sampled
        return not self.running or (len(self.running) < self.slots and room >= 0)

    def _prefill(self, work: Work) -> None:
        length, kept = work.context + work.sampled, self._kept.pop(work.rollout, 0)
        self._kept_tokens -= kept
        self._evict(length)
        rate = self.costs.prefill_tokens_per_second
        fresh = min(work.fresh, length - kept) / rate
        repeated = (length - kept) / rate - fresh
        self._prefilled_at = max(self._prefilled_at, self.now) + fresh + repeated
        self.busy.prefill += fresh
        self.busy.repeated_prefill += repeated
        work.fresh = 0

    def _keep(self, work: Work) -> None:
        """Keep what a turn has cached for the next one, while there is room."""
        self._kept_tokens += work.context + work.tokens - self._kept.pop(work.rollout, 0)
        self._kept[work.rollout] = work.context + work.tokens
        self._evict(0)

    def _evict(self, tokens: int) -> None:
        """Give up what was kept longest, until `tokens` fit."""
        room = self.costs.cached_tokens - self._running_tokens - tokens
        while self._kept and self._kept_tokens > room:
            self._kept_tokens -= self._kept.popitem(last=False)[1]

    def _stop_prefill(self) -> None:
        """Take back what was charged for prefill that does not happen."""
        self.busy = self.spent()
        self._prefilled_at = self.now

    def _ended(self) -> list[Work]:
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + _ROUNDING:
            entry = heapq.heappop(self._ends)
            if _stands(*entry):
                work = entry[2]
                self._settle(work)
                work.sampled = work.tokens
                self._leave(work)
                self._keep(work)
                ended.append(work)
        return ended

    def _settle(self, work: Work) -> None:
        done = math.floor(self._steps - work.begun_at + _ROUNDING)
        work.sampled = min(max(done, work.sampled), work.tokens)

    def _leave(self, work: Work) -> None:
        work.running = False
        del self.running[work]
        self._running_tokens -= work.context + (self._steps - work.begun_at)
        if not self.running:
            self._running_tokens = 0.0


def _stands(end: float, _number: int, work: Work) -> bool:
    """Whether an entry of the heap is of the work's present admission."""
    return work.running and end == work.begun_at + work.tokens
