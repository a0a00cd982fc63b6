"""Tail migration: when a gang begins with a batch while few instances generate its last rollouts
(RLHFuse, arXiv 2409.13221, inter-stage fusion).

Generation ends with a few long rollouts on every instance: small batches that leave the devices
mostly idle. Once R_t rollouts remain, those on the gang's instances migrate to the others, and the
gang begins with the groups that are complete. R_t is chosen by simulation on measured lengths.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.model.records import Tail
from services.lib.decode_latency import DecodeLatency


class Instance:
    """Decodes its samples in one batch, one token each per step.

    Between two changes of the batch all steps take equally long, so the simulation goes from one
    finish to the next instead of step by step.

    Args:
        samples: number and tokens of each, in the order of admission.
        latency: seconds of a step by batch size.
        slots: samples in the batch at most; the others wait.
    """

    def __init__(
        self, samples: Iterable[tuple[int, int]], latency: DecodeLatency, slots: int
    ) -> None:
        self._latency = latency
        self._slots = slots
        self._steps = 0
        # Heap of (step after which it ends, step at which it began, number).
        self._running: list[tuple[int, int, int]] = []
        self._waiting = deque(samples)
        self.clock = 0.0
        """When its last step ended."""

    @property
    def num_samples(self) -> int:
        return len(self._running) + len(self._waiting)

    def samples(self) -> list[tuple[int, int, int]]:
        """Number, tokens decoded and tokens left of each sample that has not ended."""
        running = [
            (number, self._steps - begun, end - self._steps)
            for end, begun, number in sorted(self._running)
        ]
        return running + [(number, 0, tokens) for number, tokens in self._waiting]

    def receive(self, number: int, left: int, seconds: float) -> None:
        """Take a sample with `left` tokens to go from elsewhere; its prefill takes `seconds`."""
        self._waiting.append((number, left))
        self.clock += seconds

    def run(self, until: float = math.inf) -> dict[int, float]:
        """Decode as long as a step ends no later than `until`; ends of samples, by number."""
        ends: dict[int, float] = {}
        while self._admitted():
            step_seconds = self._latency.seconds(len(self._running))
            steps = self._running[0][0] - self._steps
            if self.clock + steps * step_seconds > until:
                steps = math.floor((until - self.clock) / step_seconds)
            self.clock += steps * step_seconds
            self._steps += steps
            ended = self._ended()
            ends |= dict.fromkeys(ended, self.clock)
            if not ended:
                break
        return ends

    def _admitted(self) -> bool:
        """Fill the batch; whether there is one."""
        while self._waiting and len(self._running) < self._slots:
            number, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, self._steps, number))
        return bool(self._running)

    def _ended(self) -> list[int]:
        ended = []
        while self._running and self._running[0][0] == self._steps:
            ended.append(heapq.heappop(self._running)[2])
        return ended


Groups = Sequence[Sequence[int]]
"""Tokens that each rollout of each group samples."""

_SHARES = tuple(range(5, 100, 5))
"""Tried shares of complete groups, in percent of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    groups: tuple[tuple[int, ...], ...]
    """Tokens that each rollout of each group sampled, at least 1."""
    training_seconds: float
    """Time that the gang computed on it, without waits."""
    prompt_tokens: float = 0.0
    """Mean tokens of a rollout that it did not sample."""

    @property
    def num_rollouts(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The instances that generate while the gang waits, and their costs.

    Raises:
        ValueError: a field out of range.
    """

    num_instances: int
    """n, all equal."""
    latency: DecodeLatency
    """Seconds of a decode step by batch size."""
    slots: int
    """Rollouts that an instance decodes at once: C / M of RLHFuse, as its cache holds so many."""
    flat_factor: float = 1.2
    """BS_max is the largest batch whose step takes at most this factor of the fastest step."""
    prompt_tokens: float = 0.0
    """Tokens of a rollout before those it samples, prefilled again when it migrates."""
    prefill_seconds: float = 0.0
    """Seconds of prefilling one token."""

    def __post_init__(self) -> None:
        for field in ("num_instances", "slots"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least 1")
        _check_not_negative(self, "prompt_tokens", "prefill_seconds")
        self.latency.saturation(self.flat_factor)

    @property
    def flat_batch(self) -> int:
        """BS_max: the batch size up to which a step takes no longer."""
        return self.latency.saturation(self.flat_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangCosts:
    """What the gang takes from generation, and the time of its work.

    Raises:
        ValueError: a field out of range.
    """

    num_instances: int
    """Instances that stop generating for it; 0: its nodes do not generate."""
    switch_seconds: float
    """Seconds from there to its work."""
    token_seconds: float
    """Seconds of its work for each sampled token."""

    def __post_init__(self) -> None:
        _check_not_negative(self, "num_instances", "switch_seconds", "token_seconds")


def num_kept(remaining: int, engines: Engines) -> int:
    """m = max(⌈R_t / BS_max⌉, ⌈R_t * M / C⌉), at most n: the fewest that neither slow down nor
    overflow their cache."""
    fewest = -(-remaining // min(engines.flat_batch, engines.slots))
    return min(fewest, engines.num_instances)


def best_tail(batches: Sequence[Groups], engines: Engines, gang: GangCosts) -> Tail:
    """The begin with the least predicted time, of 5, 10 … 95 % complete groups or all of them.

    Among equally fast ones the latest; but the first group, if the gang takes no instance, as then
    it only wins time. The time is the mean of `batches`, which have equally many groups; R_t and m
    are those of the last of them.

    Raises:
        ValueError: no batch, or one that `tail_at` rejects.
    """
    if not batches:
        raise ValueError("batches must hold at least one")
    if gang.num_instances >= engines.num_instances:
        return tail_at(batches[-1], engines, gang, len(batches[-1]))  # none would be left
    if not gang.num_instances:
        return tail_at(batches[-1], engines, gang, 1)
    timelines = [_undisturbed(groups, engines) for groups in batches]

    def seconds(start: int) -> float:
        pairs = zip(batches, timelines, strict=True)
        return sum(_seconds(each, engines, gang, start, ends) for each, ends in pairs)

    start = min(reversed(starts(len(batches[-1]))), key=seconds)
    tail = tail_at(batches[-1], engines, gang, start)
    return replace(tail, seconds=seconds(start) / len(batches))


def starts(num_groups: int) -> list[int]:
    """Tried numbers of complete groups at which the gang begins, ascending; the last is all."""
    return sorted({max(num_groups * share // 100, 1) for share in (*_SHARES, 100)})


def tail_at(groups: Groups, engines: Engines, gang: GangCosts, start: int) -> Tail:
    """Simulate a batch whose gang begins at `start` complete groups; exact under these rules.

    Rollout i, counted group by group, starts on instance i mod n, and an instance admits its own in
    order as slots become free. When `start` groups are complete, all instances stop and the decode
    step in flight is lost; the gang takes those with fewest rollouts left, and each of their
    rollouts goes to the instance with fewest and is prefilled again there. The gang then works on
    the groups in the order of their completion. If it begins with the whole batch, or takes no
    instance, nothing stops.

    Raises:
        ValueError: no groups, one without rollouts or tokens, or `start` not within 1 .. all.
    """
    if not groups or not all(group and min(group) >= 1 for group in groups):
        raise ValueError("each group must hold at least one rollout, each of at least 1 token")
    if not 1 <= start <= len(groups):
        raise ValueError(f"start is {start}: it must be within 1..{len(groups)}")
    ends = _undisturbed(groups, engines)
    seconds = _seconds(groups, engines, gang, start, ends)
    ready = _completions(groups, ends)
    late = sorted(range(len(groups)), key=ready.__getitem__)[start:]
    remaining = sum(len(groups[index]) for index in late)
    left = max(engines.num_instances - gang.num_instances, 0)
    kept = min(num_kept(remaining, engines), left) if remaining else engines.num_instances
    begin = sorted(ready)[start - 1]
    return Tail(remaining=remaining, num_kept=kept, seconds=seconds, gang_seconds=seconds - begin)


def _undisturbed(groups: Groups, engines: Engines) -> Mapping[int, float]:
    """Ends of rollouts, by number, if nothing migrates."""
    ends: dict[int, float] = {}
    for instance in _started(groups, engines):
        ends |= instance.run()
    return ends


def _seconds(
    groups: Groups, engines: Engines, gang: GangCosts, start: int, ends: Mapping[int, float]
) -> float:
    """When the gang has worked on all groups; `ends` if nothing migrates."""
    begin = sorted(_completions(groups, ends))[start - 1]
    if gang.num_instances and start < len(groups):
        ends = _migrated(groups, engines, gang, begin)
    ready = _completions(groups, ends)
    clock = begin + gang.switch_seconds
    for index in sorted(range(len(groups)), key=ready.__getitem__):
        clock = max(clock, ready[index]) + sum(groups[index]) * gang.token_seconds
    return clock


def _migrated(
    groups: Groups, engines: Engines, gang: GangCosts, moment: float
) -> Mapping[int, float]:
    """Ends of rollouts if those of the gang's instances migrate at `moment`."""
    instances = _started(groups, engines)
    ends: dict[int, float] = {}
    for instance in instances:
        ends |= instance.run(until=moment)
    order = sorted(instances, key=lambda instance: -instance.num_samples)
    num_left = engines.num_instances - gang.num_instances
    stay, leave = order[:num_left], order[num_left:]
    for instance in stay:
        instance.clock = moment
    for instance in leave:
        _hand_over(instance, stay, engines)
    for instance in stay:
        ends |= instance.run()
    return ends


def _hand_over(leaving: Instance, stay: Sequence[Instance], engines: Engines) -> None:
    for number, done, left in leaving.samples():
        target = min(stay, key=lambda instance: instance.num_samples)
        # A rollout that has not begun costs what it would have cost where it was.
        again = (engines.prompt_tokens + done) * engines.prefill_seconds if done else 0.0
        target.receive(number, left, again)


def _started(groups: Groups, engines: Engines) -> list[Instance]:
    samples = list(enumerate(tokens for group in groups for tokens in group))
    return [
        Instance(samples[index :: engines.num_instances], engines.latency, engines.slots)
        for index in range(engines.num_instances)
    ]


def _completions(groups: Groups, ends: Mapping[int, float]) -> list[float]:
    """When each group is complete."""
    completions, first = [], 0
    for group in groups:
        completions.append(max(ends[first + index] for index in range(len(group))))
        first += len(group)
    return completions


def _check_not_negative(record: object, *fields: str) -> None:
    for field in fields:
        if not 0 <= getattr(record, field) < math.inf:
            raise ValueError(f"{field} is {getattr(record, field)}: it must be at least 0")
