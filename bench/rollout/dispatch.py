"""Generation of one batch on n instances, as events: what a dispatch policy makes of estimates.

The policy is the gateway's own: its `order`, `plan` and `choose` see the asks and candidates that
they see there. Emulated is what is behind it: an instance decodes all its turns at the pace of
`DecodeLatency` for as many as it has, with continuous batching. Prefill and memory are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.gateway.dispatch.policies import (
    Candidate,
    DispatchPolicy,
    PlanningPolicy,
    PoolSnapshot,
    TurnRequest,
)
from services.lib.decode_latency import DecodeLatency


@dataclass(slots=True)
class Instance:
    """One engine. Its turns advance together: a token each per step."""

    name: str
    """Server id."""
    slots: int
    """Turns it decodes at once."""
    latency: DecodeLatency
    """How long a step takes."""
    now: float = 0.0
    """Time up to which `steps` holds."""
    steps: float = 0.0
    """Decode steps since the start; a turn ends at a certain one."""
    ends: list[float] = field(default_factory=list)
    """Steps at which its turns end: a heap."""

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        if self.ends:
            self.steps += (now - self.now) / self.latency.seconds(len(self.ends))
        self.now = now

    def next_end(self) -> float:
        """When its next turn ends, if none comes before."""
        return self.now + (self.ends[0] - self.steps) * self.latency.seconds(len(self.ends))

    def candidate(self) -> Candidate:
        """What the policy sees."""
        return Candidate(
            server_id=self.name,
            num_turns=len(self.ends),
            max_running=self.slots,
            tokens_per_second=0.0,
        )


def generation_seconds(
    policy: DispatchPolicy,
    lengths: Sequence[float],
    expected: Sequence[float],
    *,
    num_instances: int,
    slots: int,
    latency: DecodeLatency,
) -> float:
    """Seconds from the arrival of all turns at once, in this order, to the end of the last.

    `lengths` are the tokens that they really sample, `expected` what the policy is told.
    """
    batch = _Batch(
        policy,
        [Instance(f"{number:04}", slots, latency) for number in range(num_instances)],
        latency,
    )
    batch.arrive(lengths, expected)
    return batch.run()


class _Batch:
    def __init__(
        self, policy: DispatchPolicy, instances: Sequence[Instance], latency: DecodeLatency
    ) -> None:
        self._policy = policy
        self._instances = instances
        self._latency = latency
        self._waiting: list[tuple[float, int, TurnRequest, float]] = []
        self._num_left = 0
        self._num_planned = 0

    def arrive(self, lengths: Sequence[float], expected: Sequence[float]) -> None:
        longest = int(max(lengths))
        for number, (length, guess) in enumerate(zip(lengths, expected, strict=True)):
            turn = TurnRequest(
                group=str(number),
                rollout=str(number),
                num_tokens=0,
                max_new_tokens=longest,
                expected_tokens=guess,
            )
            heapq.heappush(self._waiting, (self._policy.order(turn), number, turn, length))
        self._num_left = len(lengths)

    def run(self) -> float:
        now = 0.0
        self._assign()
        while self._num_left:
            instance = min((i for i in self._instances if i.ends), key=Instance.next_end)
            now = instance.next_end()
            instance.advance(now)
            instance.steps = heapq.heappop(instance.ends)
            self._num_left -= 1
            self._assign(now)
        return now

    def _assign(self, now: float = 0.0) -> None:
        self._plan()
        while self._waiting:
            free = {i.name: i for i in self._instances if len(i.ends) < i.slots}
            if not free:
                return
            _, _, turn, length = self._waiting[0]
            chosen = self._policy.choose(turn, [i.candidate() for i in free.values()])
            if chosen is None:
                return
            heapq.heappop(self._waiting)
            instance = free[chosen.server_id]
            instance.advance(now)
            heapq.heappush(instance.ends, instance.steps + length)

    def _plan(self) -> None:
        """As often as a gateway does."""
        if abs(self._num_left - self._num_planned) <= self._num_planned // 8:
            return
        self._num_planned = self._num_left
        if isinstance(self._policy, PlanningPolicy):
            running = [instance.candidate() for instance in self._instances]
            pool = PoolSnapshot(
                num_waiting=len(self._waiting), servers=running, latency=self._latency
            )
            self._policy.plan(pool)
