"""Admission and staleness over random interleavings: no caller waits for what admission forbids."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seamflow.trajectory.v1.sample_service_pb2 import Readiness

from services.chassis.errors import Reason
from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import (
    RULES,
    Run,
    failed,
    other_run,
    policy,
    refused,
    rewarded,
)
from trajectory_manager.model.records import (
    DeadLetterReason,
    Durability,
    EmptyReason,
    Purpose,
    StalenessPolicy,
    TaskLease,
)
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.service.rollouts import EXPIRED
from trajectory_manager.store.redis.connect import Store, redis_store

TOKENS_OF_A_ROLLOUT = 2


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Unix seconds."""
        return self.now


class Job:
    """A run with agents and a trainer that act at random."""

    def __init__(
        self, seed: int, rules: RunConfig, store: Store | None = None, run_id: str = "run"
    ) -> None:
        """Without a store, in memory under a clock of the job's own."""
        self.dice = random.Random(seed)
        self.clock = Clock() if store is None else None
        self.rules = rules
        self.run = Run(store or memory_store(self.clock or Clock(), 1), run_id)
        self.runs, self.ledger = self.run.store.runs, self.run.store.ledger
        self.working: list[TaskLease] = []
        self.names = set[str]()
        self.history: list[Readiness] = []
        self.step = 0
        self.training = False
        self.served = 0
        self.committed = 0
        self.epoch = 0
        self.trainers = 0
        self.tasks = 0
        self.trained: dict[int, tuple[str, ...]] = {}

    async def start(self) -> None:
        await self.runs.create_run(self.run.run_id, self.rules)
        await self.restart_trainer()

    async def submit(self) -> None:
        self.tasks += 1
        await self.run.submit(f"task-{self.tasks}", num_samples=self.rules.group_size)

    async def requeue(self) -> None:
        letters = await self.runs.dead_letters(self.run.run_id, 0, 10)
        names = [letter.task.task_id for letter in letters]
        assert await self.runs.requeue(self.run.run_id, names) == len(letters)

    async def lease(self) -> None:
        lease = await self.run.ask()
        if lease is EmptyReason.STORE_FULL:
            counts = await self.counts()
            assert counts.num_admissible_groups == 0
            assert counts.num_stored_tokens > self.rules.max_stored_tokens > 0
        if not isinstance(lease, TaskLease):
            return
        assert lease.rollout_id not in self.names, "named twice"
        self.names.add(lease.rollout_id)
        await self.run.start(lease.rollout_id, lease.nonce)
        await self.run.turn(lease.rollout_id, "t", [1], [2], policy(await self.version(lease)))
        await self.runs.add_stored_tokens(self.run.run_id, TOKENS_OF_A_ROLLOUT)
        self.working.append(lease)

    async def version(self, lease: TaskLease) -> int:
        """Servers sample with what they have, but wait for what the group needs: that must come."""
        rollout = await self.run.store.tokens.rollout(self.run.run_id, lease.rollout_id)
        assert rollout is not None
        assert rollout.required_weight_version <= self.published
        return max(self.served, rollout.required_weight_version)

    @property
    def published(self) -> int:
        """Newest weights that there are: a step that is trained has made none yet."""
        return self.step - self.training

    async def serve(self) -> None:
        """The servers have the newest weights."""
        self.served = self.published

    async def finish(self, failures: float = 0.2) -> None:
        if self.working:
            reward = rewarded(self.dice.choice([0.0, 1.0]))
            outcome = failed() if self.dice.random() < failures else reward
            position = self.dice.randrange(len(self.working))
            await self.run.finish(self.working.pop(position).rollout_id, outcome)

    async def sweep(self) -> None:
        """Agents whose leases are gone stop, and the sweeper closes what they left."""
        proofs = [(lease.rollout_id, lease.nonce) for lease in self.working]
        held = await self.runs.extend_tasks(self.run.run_id, proofs)
        self.working = [lease for lease, ok in zip(self.working, held, strict=True) if ok]
        await self.run.rollouts.sweep(self.run.run_id)

    async def lose_agents(self) -> None:
        if self.clock is not None:
            self.clock.now += self.rules.lease_seconds + 1
        else:
            names = [lease.rollout_id for lease in self.working]
            await self.run.rollouts.fail(self.run.run_id, names, EXPIRED)
        self.working.clear()
        await self.run.rollouts.sweep(self.run.run_id)

    async def train(self) -> bool:
        step, base = self.step + 1, self.step
        await self.ledger.await_step(self.run.run_id, self.epoch, step, base)
        attempt = await self.ledger.lease_samples(self.run.run_id, self.epoch, step, base, 0)
        self.training = attempt.lease is not None
        if attempt.lease is None:
            return False
        self.step += 1
        self.check(attempt.lease.sample_ids)
        self.trained[self.step] = attempt.lease.sample_ids
        return True

    def check(self, sample_ids: tuple[str, ...]) -> None:
        assert len(sample_ids) == self.rules.groups_per_step * self.rules.group_size
        others = [name for step, ids in self.trained.items() if step != self.step for name in ids]
        assert not set(sample_ids) & set(others), "trained twice"

    async def commit(self) -> None:
        if self.committed < self.step:
            self.committed += 1
            await self.ledger.commit(self.run.run_id, self.epoch, self.committed)
            if freed := self.trained.get(self.committed - self.rules.retention_steps):
                freed_tokens = TOKENS_OF_A_ROLLOUT * len(freed)
                await self.runs.add_stored_tokens(self.run.run_id, -freed_tokens)

    async def restart_trainer(self) -> None:
        self.trainers += 1
        reconciled = await self.ledger.reconcile(
            self.run.run_id, self.committed, f"trainer-{self.trainers}"
        )
        self.epoch, self.training = reconciled.epoch, False
        assert list(reconciled.pending_steps) == list(range(self.committed + 1, self.step + 1))
        for step in reconciled.pending_steps:
            again = await self.ledger.lease_samples(self.run.run_id, self.epoch, step, 99, 0)
            assert again.lease is not None
            assert again.lease.sample_ids == self.trained[step]

    async def counts(self) -> Readiness:
        return await self.runs.run_counts(self.run.run_id)

    async def num_dropped(self) -> int:
        """How many groups grew too old."""
        letters = await self.runs.dead_letters(self.run.run_id, 0, 1000)
        return sum(letter.reason is DeadLetterReason.DROPPED for letter in letters)

    async def act(self, times: int) -> None:
        """Act at random; whatever happens, admission holds its bound and keeps its promise."""
        actions = [self.submit, self.lease, self.lease, self.finish, self.finish, self.sweep]
        rare = [self.lose_agents, self.restart_trainer, self.requeue]
        for _ in range(times):
            action = self.dice.choice([*actions, self.train, self.commit, self.serve])
            await (self.dice.choice(rare) if self.dice.random() < 0.05 else action)()
            self.history.append(await self.counts())
            self.check_admission(self.history[-1])

    def check_admission(self, counts: Readiness) -> None:
        """What is not there yet may start, all that fits or at least what the next step needs."""
        outstanding = counts.num_ready_groups + counts.num_running_groups
        bound = self.rules.max_outstanding_groups(training=self.training)
        assert 0 <= outstanding <= bound
        if 0 < self.rules.max_stored_tokens < counts.num_stored_tokens:
            bound = max(outstanding, min(bound, self.rules.groups_per_step))
        assert outstanding + counts.num_admissible_groups == bound

    async def drive_to_next_step(self) -> None:
        """Agents that only work must bring the next step, whatever happened before."""
        wanted = self.step + 1
        for _ in range(400):
            if await self.train():
                break
            await self.submit()
            await self.lease()
            await self.sweep()
            await self.finish(failures=0.0)
        assert self.step == wanted


@st.composite
def rules_of_runs(draw: st.DrawFn) -> RunConfig:
    """Rules of all sizes, with over-provisioning, windows and a cap or without."""
    groups_per_step = draw(st.integers(1, 3))
    window = draw(st.integers(0, 2))
    return replace(
        RULES,
        group_size=draw(st.integers(1, 3)),
        groups_per_step=groups_per_step,
        max_staleness=draw(st.integers(0, 2)),
        zero_variance_reward=draw(st.sampled_from(["", "reward"])),
        num_extra_samples=draw(st.integers(0, 2)),
        fifo_window=window and groups_per_step + window - 1,
        max_stored_tokens=draw(st.sampled_from([0, 1, 20])),
        retention_steps=draw(st.integers(1, 2)),
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), rules_of_runs())
async def test_a_waiting_trainer_always_has_something_to_wait_for(
    seed: int, rules: RunConfig
) -> None:
    """With tasks queued, a trainer that cannot lease has something running, ready or admissible."""
    job = Job(seed, rules)
    await job.start()
    await job.act(150)
    if rules.fifo_window == rules.groups_per_step:
        assert await job.num_dropped() == 0
    await job.drive_to_next_step()


class Careless(Job):
    """Whose servers sample with whatever weights they have."""

    async def version(self, lease: TaskLease) -> int:
        """Never mind what the group needs."""
        return self.served


async def test_without_waiting_for_new_weights_work_is_thrown_away() -> None:
    """The control: in the same order of admission some groups are too old when they are leased."""
    rules, dropped = replace(RULES, fifo_window=RULES.groups_per_step), 0
    for seed in range(10):
        job = Careless(seed, rules)
        await job.start()
        await job.act(150)
        dropped += await job.num_dropped()
    assert dropped > 0


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), rules_of_runs())
async def test_a_trainer_on_redis_always_has_something_to_wait_for(
    redis_url: str, seed: int, rules: RunConfig
) -> None:
    """The same on the scripts, which do in each case what the in-memory store does."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run_id = uuid.uuid4().hex
        jobs = [Job(seed, rules, stored, run_id) for stored in (store, memory_store())]
        for job in jobs:
            await job.start()
            await job.act(60)
            await job.drive_to_next_step()
        on_redis, in_memory = jobs
        assert on_redis.history == in_memory.history
        assert on_redis.trained == in_memory.trained
        assert on_redis.names == in_memory.names
        letters = [await job.runs.dead_letters(run_id, 0, 1000) for job in jobs]
        assert [replace(letter, time=0) for letter in letters[0]] == [
            replace(letter, time=0) for letter in letters[1]
        ]


async def test_without_retention_the_cap_would_starve_the_trainer() -> None:
    """The control: where no commit frees tokens the cap is hard, and the promise does not hold."""
    job = Job(1, replace(RULES, max_stored_tokens=1))
    await job.start()
    with pytest.raises(AssertionError):
        for _ in range(10):
            await job.drive_to_next_step()


async def test_the_cap_closes_admission_but_not_what_was_admitted(store: Store) -> None:
    """Open samples are leased and failed ones replaced; evaluations are let in; deletion opens."""
    run = await other_run(store, max_stored_tokens=1000)
    await run.submit("a", "b")
    assert await run.play(outcome=failed())
    await store.runs.add_stored_tokens(run.run_id, 1001)
    await run.submit("eval", num_samples=1, purpose=Purpose.EVAL)
    played = [await run.play() for _ in range(3)]
    names = [lease.rollout_id for lease in played if lease is not None]
    assert names == ["eval/0/1", "a/0/2", "a/1/1"]
    assert await run.ask() is EmptyReason.STORE_FULL
    counts = await store.runs.run_counts(run.run_id)
    assert counts.num_admissible_groups == 0
    await store.runs.add_stored_tokens(run.run_id, -1001)
    lease = await run.lease()
    assert lease is not None
    assert lease.rollout_id == "b/0/1"
    await refused(Reason.NOT_FOUND, store.runs.add_stored_tokens("nowhere", 1))


async def test_with_retention_the_cap_never_closes_the_next_step(store: Store) -> None:
    """Its commit is what frees tokens: groups_per_step groups are let in, the next one is not."""
    run = await other_run(store, max_stored_tokens=1, retention_steps=1, groups_per_step=2)
    await store.runs.add_stored_tokens(run.run_id, 100)
    await run.submit("a", "b", "c")
    assert (await store.runs.run_counts(run.run_id)).num_admissible_groups == 2
    for _ in range(4):
        await run.play()
    assert await run.ask() is EmptyReason.STORE_FULL
    epoch = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    assert (await store.ledger.lease_samples(run.run_id, epoch, 1, 0, 0)).lease is not None
    assert await run.lease() is not None


@pytest.mark.parametrize(("fifo_window", "dropped"), [(RULES.groups_per_step, 0), (0, 1)])
async def test_in_order_of_admission_no_work_is_thrown_away(
    store: Store, fifo_window: int, dropped: int
) -> None:
    """With a window of one step no group overtakes; the control, without it, drops a slow group."""
    run = await other_run(store, fifo_window=fifo_window)
    await run.submit("slow", *"abcdef")
    for rollout in ("slow/0/1", "slow/1/1"):
        lease = await run.lease()
        assert lease is not None
        await run.start(rollout, lease.nonce)
        await run.turn(rollout, "t", [1], [2], policy(0))
    epoch, step = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch, 0
    for _ in range(3):
        await run.play(version=step)
        await run.play(version=step)
        attempt = await store.ledger.lease_samples(run.run_id, epoch, step + 1, step, 0)
        step += attempt.lease is not None
    for rollout in ("slow/0/1", "slow/1/1"):
        await run.finish(rollout)
    await store.ledger.lease_samples(run.run_id, epoch, step + 1, step, 0)
    letters = await store.runs.dead_letters(run.run_id, 0, 10)
    reasons = [letter.reason for letter in letters]
    assert reasons == [DeadLetterReason.DROPPED] * dropped


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
                rollout_id = name.rpartition("#")[0]
                (found,) = await job.run.store.tokens.read("run", [rollout_id], spans_only=True)
                assert found is not None
                spans = found[1][0].tokens.spans
                oldest = min(span.weight_version for span in spans if span.trainable)
                assert step - 1 - oldest <= RULES.max_staleness
