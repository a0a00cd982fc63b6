"""The Redis ledger against the in-memory one: the same random history, the same answers."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

import pytest

from services.chassis.errors import ServiceError
from tests.integration.trajectory_manager.ledger import Ledger
from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import RULES
from trajectory_manager.model.records import Durability, ReplayStrategy, StalenessPolicy
from trajectory_manager.model.runs import Replay, RunConfig, StepLease
from trajectory_manager.store.redis.connect import redis_store

_ACTIONS = ("admit", "admit", "finish", "finish", "finish", "finish", "lease", "lease") * 2
_RARE = ("commit", "commit", "restart", "requeue", "reject", "reject", "awaits")


def rules_of(dice: random.Random) -> RunConfig:
    """Rules at random."""
    groups_per_step = dice.randint(1, 3)
    replay = Replay(
        strategy=dice.choice(list(ReplayStrategy)),
        capacity_groups=dice.randint(2, 5),
        groups_per_step=dice.randint(1, 2),
        reward_name="reward",
        temperature=dice.choice((0.1, 1.0)),
    )
    return replace(
        RULES,
        group_size=dice.randint(1, 2),
        num_extra_samples=dice.randint(0, 1),
        groups_per_step=groups_per_step,
        max_staleness=dice.randint(0, 3),
        staleness_policy=dice.choice(list(StalenessPolicy)),
        fifo_window=dice.choice((0, groups_per_step, groups_per_step + 2)),
        max_deliveries=dice.randint(0, 2),
        replay=dice.choice((None, replay)),
    )


class Pair:
    """One trainer and its agents, on two stores at once."""

    def __init__(self, dice: random.Random, rules: RunConfig, ledgers: list[Ledger]) -> None:
        self.dice, self.rules, self.ledgers = dice, rules, ledgers
        self.tasks = self.trainers = self.step = self.committed = 0
        self.young = False
        self.settled: set[tuple[str, int]] = set()
        self.fresh: dict[int, tuple[str, ...]] = {}
        self.open = 0
        self.consumed: set[str] = set()

    async def both(self, call: str, *args: Any, **facts: Any) -> Any:
        """The answer of both stores, which must be the same."""
        answers = []
        for ledger in self.ledgers:
            try:
                answers.append(await getattr(ledger, call)(*args, **facts))
            except ServiceError as error:
                answers.append((error.reason, error.message.split("epoch")[0]))
        first, second = answers
        assert call == "lead" or first == second, (call, args)
        return first

    async def admit(self) -> None:
        self.tasks += 1
        await self.both("admit", f"task-{self.tasks}")

    async def finish(self) -> None:
        running = self.ledgers[0].running
        open_slots = [(name, n) for name, made in running.items() for n in range(len(made))]
        left = sorted(set(open_slots) - self.settled)
        if not left:
            return
        task_id, slot = self.dice.choice(left[:6])
        self.settled.add((task_id, slot))
        rewards = {"reward": [self.dice.random() for _ in running[task_id]]}
        facts: dict[str, Any] = {"version": self.version()}
        if self.dice.random() < 0.8:
            facts["rewards"] = rewards
        await self.both("finish_slots", task_id, [slot], **facts)

    def version(self) -> int:
        return self.step if self.young else max(0, self.step - self.dice.randint(0, 3))

    async def awaits(self) -> None:
        """Of the next step, or one that is leased already."""
        await self.both("awaits", self.dice.randint(max(1, self.step), self.step + 1), self.step)

    async def lease(self) -> None:
        pending = self.dice.random() < 0.3 and self.step > self.committed
        step = self.dice.randint(self.committed + 1, self.step) if pending else self.step + 1
        if self.open:
            assert type(await self.both("attempt", self.open + 1)) is tuple, "passed an open step"
            step = self.open
        least = self.dice.choice((0, 0, 1, self.rules.groups_per_step))
        streaming = self.dice.random() < 0.4
        attempt = await self.both(
            "attempt", step, base=step - 1, min_groups=least, streaming=streaming
        )
        if attempt.lease is None:
            return
        self.step = max(self.step, step)
        self.check(attempt.lease)

    def check(self, lease: StepLease) -> None:
        known = self.fresh.get(lease.step, lease.sample_ids)
        may_grow = lease.step == self.open
        now = lease.sample_ids[: len(known)] if may_grow else lease.sample_ids
        assert now == known, "a repeated step changed"
        assert not self.consumed & set(lease.sample_ids), "trained twice"
        self.fresh[lease.step] = lease.sample_ids
        if lease.is_open or lease.step == self.open:
            self.open = lease.step if lease.is_open else 0

    async def reject(self) -> None:
        """A group of a step, fresh or replayed, or one that it has not."""
        if self.step == self.committed:
            return
        step = self.dice.randint(self.committed + 1, self.step)
        trained = sorted(self.consumed) if self.dice.random() < 0.3 else []
        names = trained or self.fresh[step] or (f"task-{self.tasks}/0/1#t",)
        bad = {self.dice.choice(names).rsplit("/", 2)[0]: "bad"}
        rejected = await self.both("reject", step, bad)
        if isinstance(rejected, tuple) or not rejected.open or not rejected.num_rejected:
            return
        self.open = self.step = step
        self.fresh = {n: names for n, names in self.fresh.items() if n <= step}
        self.fresh[step] = tuple(n for n in names if n.rsplit("/", 2)[0] not in bad)

    async def commit(self) -> None:
        step = self.dice.randint(self.committed, self.step)
        if step:
            refused = type(await self.both("commit", step)) is tuple
            assert refused == (step == self.open), "only an open step is not committed"
            if not refused:
                self.consume(step)

    def consume(self, step: int) -> None:
        self.committed = max(self.committed, step)
        for past in [past for past in self.fresh if past <= step]:
            self.consumed |= set(self.fresh.pop(past))

    async def requeue(self) -> None:
        letters = await self.ledgers[0].store.runs.dead_letters(self.ledgers[0].run_id, 0, 1)
        for ledger in self.ledgers:
            names = [letter.task.task_id for letter in letters]
            await ledger.store.runs.requeue(ledger.run_id, names)

    async def restart(self) -> None:
        self.trainers += self.dice.random() < 0.8
        step = self.dice.randint(max(0, self.committed - 1), self.step)
        await self.both("lead", f"trainer-{self.trainers}", step)
        first, second = self.ledgers
        assert first.pending == second.pending
        self.consume(step)
        self.committed = step
        self.step = max((step, *first.pending))
        self.fresh = {step: ids for step, ids in self.fresh.items() if step in first.pending}
        self.open = self.open if self.open in first.pending else 0

    async def bring_next_step(self) -> None:
        """Agents that only work bring the next step, whatever happened before."""
        wanted = self.step + 1
        for _ in range(200):
            await self.admit()
            self.young = True
            await self.finish()
            await self.finish()
            await self.lease()
            if self.step >= wanted and not self.open:
                return
        raise AssertionError(f"step {wanted} never came: {self.rules}")

    async def compare(self) -> None:
        """All that callers can see."""
        seen = []
        for ledger in self.ledgers:
            runs, run_id = ledger.store.runs, ledger.run_id
            letters = await runs.dead_letters(run_id, 0, 999)
            rollouts = [
                f"task-{n}/{s}/{a}"
                for n in range(1, self.tasks + 1)
                for s in range(3)
                for a in (1, 2)
            ]
            counts = await runs.run_counts(run_id)
            seen.append(
                (
                    counts,
                    [replace(letter, time=0.0) for letter in letters],
                    await ledger.store.ledger.committed_steps(run_id, rollouts),
                    replace(await ledger.publish(self.step), seconds=0.0),
                )
            )
        assert seen[0] == seen[1]


@pytest.mark.parametrize("seed", range(12))
async def test_both_ledgers_agree(redis_url: str, seed: int) -> None:
    """Leases, commits, takeovers and restores, under random rules."""
    dice = random.Random(seed)
    rules, run_id = rules_of(dice), uuid.uuid4().hex
    async with redis_store(redis_url, Durability.FAST, 5.0) as redis:
        ledgers = [
            Ledger(store, run_id, num_samples=rules.group_size) for store in (memory_store(), redis)
        ]
        for ledger in ledgers:
            await ledger.store.runs.create_run(run_id, rules)
        pair = Pair(dice, rules, ledgers)
        await pair.both("lead", "trainer-0")
        for _ in range(80):
            await getattr(pair, dice.choice(_ACTIONS + _RARE))()
            await pair.compare()
        await pair.bring_next_step()
