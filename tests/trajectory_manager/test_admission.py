"""Admission and staleness over random interleavings: nobody waits for what admission forbids."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory_manager.support import RULES, Run, failed, policy
from trajectory_manager.memory_store import memory_store
from trajectory_manager.records import RunConfig, StalenessPolicy, TaskLease


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Unix seconds."""
        return self.now


class Job:
    """A run with agents and a trainer that act at random."""

    def __init__(self, seed: int, rules: RunConfig) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.rules = rules
        self.run = Run(memory_store(self.clock, 1), "run")
        self.working: list[TaskLease] = []
        self.step = 0
        self.committed = 0
        self.epoch = 0
        self.trainers = 0
        self.tasks = 0
        self.trained: dict[int, tuple[str, ...]] = {}

    async def start(self) -> None:
        await self.run.store.runs.create_run("run", self.rules)
        await self.restart_trainer()

    async def submit(self) -> None:
        self.tasks += 1
        await self.run.submit(f"task-{self.tasks}", num_samples=self.rules.group_size)

    async def lease(self) -> None:
        lease = await self.run.lease()
        if lease is not None:
            await self.run.start(lease.rollout_id, lease.nonce)
            await self.run.turn(lease.rollout_id, "t", [1], [2], policy(self.step))
            self.working.append(lease)

    async def finish(self) -> None:
        if self.working:
            lease = self.working.pop(self.dice.randrange(len(self.working)))
            outcome = failed() if self.dice.random() < 0.2 else None
            await self.run.finish(lease.rollout_id, outcome)

    async def lose_agents(self) -> None:
        self.clock.now += self.rules.lease_seconds + 1
        self.working.clear()
        await self.run.rollouts.sweep("run")

    async def train(self) -> bool:
        runs = self.run.store.runs
        attempt = await runs.lease_samples("run", self.epoch, self.step + 1, self.step, 0)
        if attempt.lease is None:
            return False
        self.step += 1
        self.check(attempt.lease.sample_ids)
        self.trained[self.step] = attempt.lease.sample_ids
        return True

    def check(self, sample_ids: tuple[str, ...]) -> None:
        others = [name for step, ids in self.trained.items() if step != self.step for name in ids]
        assert not set(sample_ids) & set(others), "trained twice"

    async def commit(self) -> None:
        if self.committed < self.step:
            self.committed += 1
            await self.run.store.runs.commit("run", self.epoch, self.committed)

    async def restart_trainer(self) -> None:
        self.trainers += 1
        reconciled = await self.run.store.runs.reconcile(
            "run", self.committed, f"trainer-{self.trainers}"
        )
        self.epoch = reconciled.epoch
        assert reconciled.pending_steps == tuple(range(self.committed + 1, self.step + 1))
        for step in reconciled.pending_steps:
            again = await self.run.store.runs.lease_samples("run", self.epoch, step, 99, 0)
            assert again.lease is not None
            assert again.lease.sample_ids == self.trained[step]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
async def test_a_waiting_trainer_always_has_something_to_wait_for(
    seed: int, group_size: int, groups_per_step: int, max_staleness: int
) -> None:
    """With tasks queued, a trainer that cannot lease has something running, ready or admissible."""
    rules = replace(
        RULES,
        group_size=group_size,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
    )
    job = Job(seed, rules)
    await job.start()
    actions = [job.submit, job.lease, job.lease, job.finish, job.finish, job.train, job.commit]
    rare = [job.lose_agents, job.restart_trainer]
    for _ in range(150):
        await job.dice.choice(rare if job.dice.random() < 0.05 else actions)()
        counts = await job.run.store.runs.readiness("run")
        outstanding = counts.num_ready_groups + counts.num_running_groups
        assert 0 <= outstanding <= rules.max_outstanding_groups
        assert outstanding + counts.num_admissible_groups == rules.max_outstanding_groups
    await _drive_to_next_step(job)


async def _drive_to_next_step(job: Job) -> None:
    """Agents that only work must bring the next step, whatever happened before."""
    wanted = job.step + 1
    for _ in range(400):
        if await job.train():
            break
        await job.submit()
        await job.lease()
        if job.working:
            await job.run.finish(job.working.pop(0).rollout_id)
    assert job.step == wanted


@pytest.mark.parametrize("staleness_policy", [StalenessPolicy.DROP, StalenessPolicy.WITHHOLD])
async def test_no_leased_sample_is_beyond_the_bound(staleness_policy: StalenessPolicy) -> None:
    """Even when slow rollouts are overtaken for many steps."""
    for seed in range(10):
        job = Job(seed, replace(RULES, staleness_policy=staleness_policy))
        await job.start()
        for _ in range(200):
            actions = [job.submit, job.lease, job.finish, job.train]
            await job.dice.choice(actions)()
        for step, sample_ids in job.trained.items():
            for name in sample_ids:
                turns = await job.run.store.tokens.spans("run", name.rpartition("#")[0], ["t"])
                oldest = min(span.weight_version for span in turns[0] if span.trainable)
                assert step - 1 - oldest <= RULES.max_staleness
