"""The engine as arithmetic, against one that looks at every sequence at every event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from bench.sim.costs import EngineCosts, load_costs
from bench.sim.simulator.decoding import Busy, Decoding, Work

COSTS = replace(load_costs().engine, prefill_tokens_per_second=2000.0)
PLAIN = replace(COSTS, decode_seconds_per_cached_token=0.0)
INSTANCES = 150


@dataclass(slots=True)
class Naive:
    """Says of every sequence how much of it is left, and moves all of them at every event."""

    costs: EngineCosts
    slots: int
    now: float = 0.0
    prefill: float = 0.0
    running: list[list[float]] = field(default_factory=list)  # [index, left, cached]
    queue: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)  # (rollout, tokens), oldest first
    busy: Busy = field(default_factory=Busy)

    def ends(self, arrivals: list[tuple[float, Work]]) -> dict[int, float]:
        """Index -> when it ended."""
        ends: dict[int, float] = {}
        coming = list(enumerate(arrivals))
        works = [work for _, work in arrivals]
        while coming or self.running:
            next_arrival = coming[0][1][0] if coming else math.inf
            step = self.costs.step_seconds(len(self.running), sum(c for _, _, c in self.running))
            left = min((left for _, left, _ in self.running), default=math.inf)
            until = min(next_arrival, self.now + self.prefill + left * step)
            self._pass(until, step)
            for entry in [entry for entry in self.running if entry[1] <= 1e-6]:
                self.running.remove(entry)
                work = works[int(entry[0])]
                ends[int(entry[0])] = self.now
                self._forget(work.rollout)
                self.kept.append((work.rollout, work.context + work.tokens))
                self._evict(0)
            self._admit(works)
            while coming and coming[0][1][0] <= self.now:
                self.queue.append(coming.pop(0)[0])
                self._admit(works)
        return ends

    def _pass(self, until: float, step: float) -> None:
        elapsed = until - self.now
        waited = min(self.prefill, elapsed)
        self.prefill -= waited
        self.now = until
        if self.running:
            self.busy.decode += elapsed - waited
            for entry in self.running:
                entry[1] -= (elapsed - waited) / step
                entry[2] += (elapsed - waited) / step

    def _admit(self, works: list[Work]) -> None:
        while self.queue:
            work = works[self.queue[0]]
            cached = sum(c for _, _, c in self.running)
            full = len(self.running) >= self.slots
            full |= cached + work.context > self.costs.cached_tokens
            if self.running and full:
                return
            index = self.queue.pop(0)
            there = sum(tokens for rollout, tokens in self.kept if rollout == work.rollout)
            self._forget(work.rollout)
            self._evict(work.context)
            missing = work.context - there
            fresh = min(work.fresh, missing)
            self.busy.prefill += fresh / self.costs.prefill_tokens_per_second
            self.busy.repeated_prefill += (missing - fresh) / self.costs.prefill_tokens_per_second
            self.prefill += missing / self.costs.prefill_tokens_per_second
            self.running.append([index, work.tokens, work.context])

    def _forget(self, rollout: int) -> None:
        self.kept = [entry for entry in self.kept if entry[0] != rollout]

    def _evict(self, tokens: int) -> None:
        room = self.costs.cached_tokens - sum(c for _, _, c in self.running) - tokens
        while self.kept and sum(tokens for _, tokens in self.kept) > room:
            self.kept.pop(0)


def ends(engine: Decoding, arrivals: list[tuple[float, Work]]) -> dict[int, float]:
    """Index -> when it ended, by the engine's own events."""
    found: dict[int, float] = {}
    coming = list(enumerate(arrivals))
    index = {id(work): number for number, (_, work) in coming}
    while coming or engine.running:
        until = min(coming[0][1][0] if coming else math.inf, engine.next_event())
        found |= {index[id(work)]: until for work in engine.advance(until)}
        while coming and coming[0][1][0] <= until:
            engine.submit(coming.pop(0)[1][1])
    return found


def arrivals(random: Random) -> list[tuple[float, Work]]:
    """Some requests, many of them later turns of the same rollouts."""
    contexts = [random.randint(5, 60) for _ in range(random.randint(1, 5))]
    now, requests = 0.0, []
    for _ in range(random.randint(1, 15)):
        now += random.choice((0.0, random.uniform(0.0, 1.0), random.uniform(0.0, 8.0)))
        rollout, new = random.randrange(len(contexts)), random.randint(1, 50)
        contexts[rollout] += new
        tokens = random.randint(1, 200)
        context = contexts[rollout]
        work = Work(rollout=rollout, context=context, tokens=tokens, fresh=new)
        requests.append((now, work))
        contexts[rollout] += tokens
    return requests


def test_random_instances_end_when_the_naive_engine_says() -> None:
    """Arrivals, slots, prefill, and keys and values that do not all fit."""
    tight = 0
    for seed in range(INSTANCES):
        random = Random(seed)
        requests = arrivals(random)
        costs = replace(random.choice((COSTS, PLAIN)), cached_tokens=random.randint(100, 4000))
        slots = random.randint(1, 6)
        naive, engine = Naive(costs, slots), Decoding(costs=costs, slots=slots)
        expected = naive.ends([(at, replace(work)) for at, work in requests])
        assert ends(engine, requests) == pytest.approx(expected, abs=1e-4), seed
        assert engine.spent().decode == pytest.approx(naive.busy.decode, abs=1e-4)
        assert engine.spent().prefill == pytest.approx(naive.busy.prefill)
        repeated = engine.spent().repeated_prefill
        assert repeated == pytest.approx(naive.busy.repeated_prefill)
        tight += repeated > 0
    assert tight > INSTANCES // 10


def test_a_batch_takes_the_sum_of_its_decode_steps() -> None:
    """Step by step: as many tokens as sequences, each step as long as its batch makes it."""
    lengths = [int(Random(1).lognormvariate(4, 0.7)) + 1 for _ in range(40)]
    engine = Decoding(costs=PLAIN, slots=8)
    found = ends(engine, [(0.0, Work(n, 0, length, 0)) for n, length in enumerate(lengths)])
    queue, running, now = list(enumerate(lengths)), dict[int, int](), 0.0
    expected = {}
    while queue or running:
        while queue and len(running) < 8:
            index, length = queue.pop(0)
            running[index] = length
        now += PLAIN.decode_seconds.seconds(len(running))
        for index in list(running):
            running[index] -= 1
            if not running[index]:
                del running[index]
                expected[index] = now
    assert found == pytest.approx(expected)


def test_busy_seconds_are_the_time_that_passed() -> None:
    """Whenever one asks an engine that never ran dry; also while it prefills."""
    random = Random(2)
    engine = Decoding(costs=COSTS, slots=4)
    works = [Work(n, 400, random.randint(50, 400), 400) for n in range(12)]
    for work in works:
        engine.submit(work)
    for now in (0.01, 0.1, 0.5, 1.0, 2.0):
        engine.advance(min(now, engine.next_event()))
        spent = engine.spent()
        assert spent.decode + spent.prefill + spent.repeated_prefill == pytest.approx(engine.now)
    while engine.running:
        engine.advance(engine.next_event())
    assert all(work.sampled == work.tokens for work in works)


def test_what_is_taken_out_goes_on_where_it_was() -> None:
    """No token twice and none left out; what is prefilled again is booked so."""
    engine = Decoding(costs=COSTS, slots=2)
    works = [Work(n, 100, 50, 100) for n in range(3)]
    for work in works:
        engine.submit(work)
    engine.advance(0.5)
    held = engine.clear()
    assert held == works
    assert [work.sampled > 0 for work in works] == [True, True, False]
    assert engine.spent().repeated_prefill == 0
    came_to = [work.sampled for work in works]
    for work in held:
        engine.submit(work)
    while engine.running:
        engine.advance(engine.next_event())
    spent = engine.spent()
    again = COSTS.prefill_tokens_per_second * spent.repeated_prefill
    assert again == pytest.approx(2 * 100 + sum(came_to))
    assert spent.decode + spent.prefill + spent.repeated_prefill == pytest.approx(engine.now)


def test_prefill_that_does_not_happen_is_not_charged() -> None:
    """Cleared in the middle of it."""
    engine = Decoding(costs=COSTS, slots=2)
    engine.submit(Work(0, 2000, 50, 2000))
    engine.advance(0.25)
    engine.clear()
    assert engine.spent().prefill == pytest.approx(0.25)
    assert replace(engine.spent(), prefill=0.0) == Busy()


def test_a_removed_sequence_makes_room() -> None:
    """The next one in the queue is admitted; one that only waited leaves no trace."""
    engine = Decoding(costs=COSTS, slots=1)
    works = [Work(n, 10, 50, 10) for n in range(3)]
    for work in works:
        engine.submit(work)
    engine.remove(works[1])
    assert list(engine.queue) == [works[2]]
    engine.remove(works[0])
    assert list(engine.running) == [works[2]]


def test_a_sequence_too_long_for_the_cache_runs_alone() -> None:
    """Rather than never."""
    engine = Decoding(costs=replace(COSTS, cached_tokens=100), slots=4)
    works = [Work(0, 300, 5, 300), Work(1, 10, 5, 10)]
    for work in works:
        engine.submit(work)
    assert list(engine.running) == [works[0]]
    engine.advance(engine.next_event())
    assert list(engine.running) == [works[1]]
