"""Dead letters: no group leaves without a trace, and each can be given another life."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.trajectory_service_pb2 import RolloutFinish

from bench.harness.store_calls import send_async
from services.chassis.errors import Reason
from tests.lib.trajectory_manager.client import CREDENTIAL, RULES, Client, running_manager
from tests.lib.trajectory_manager.memory import run_state
from tests.lib.trajectory_manager.support import Run, failed, other_run, refused, rewarded
from trajectory_manager.model.records import MAX_REPLACEMENTS, DeadLetter, DeadLetterReason, Purpose
from trajectory_manager.service.sweeper import Retention
from trajectory_manager.store.redis import run_store
from trajectory_manager.store.redis.connect import Store


async def kill(run: Run, task_id: str, purpose: Purpose = Purpose.TRAIN) -> DeadLetter:
    """Fail a task until it is given up; return its letter, the newest."""
    await run.submit(task_id, num_samples=1, purpose=purpose)
    for _ in range(MAX_REPLACEMENTS + 1):
        lease = await run.play(outcome=failed())
        assert lease is not None
        assert lease.task.task_id == task_id
    return (await run.store.runs.dead_letters(run.run_id, 0, 1000))[-1]


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_a_group_that_keeps_failing_leaves_a_letter(run: Run, purpose: Purpose) -> None:
    """It has the last failure and all rollouts of the group, for either purpose."""
    letter = await kill(run, "a", purpose)
    assert letter.task.task_id == "a"
    assert letter.reason is DeadLetterReason.FAILURES
    assert letter.message == f"ENVIRONMENT: {failed().failure_message}"
    assert abs(letter.time - time.time()) < 60
    assert letter.rollout_ids == [f"a/0/{n}" for n in range(1, MAX_REPLACEMENTS + 2)]
    counts = await run.store.runs.run_counts(run.run_id)
    assert counts.num_dead_letters == 1
    for rollout_id in letter.rollout_ids:
        assert await run.store.tokens.rollout(run.run_id, rollout_id) is not None


async def test_a_group_without_variance_leaves_a_letter(store: Store) -> None:
    """It has the reward that all samples had."""
    run = await other_run(store, zero_variance_reward="reward")
    await run.submit("a")
    for _ in range(2):
        await run.play(outcome=rewarded(-0.0))
    (letter,) = await store.runs.dead_letters(run.run_id, 0, 10)
    assert letter.reason is DeadLetterReason.ZERO_VARIANCE
    assert letter.message == "all rewards are 0.0"
    assert letter.rollout_ids == ["a/0/1", "a/1/1"]


async def test_letters_come_in_pages_oldest_first(run: Run) -> None:
    """A page begins at a position, as of the list at that time."""
    for name in "abc":
        await kill(run, name)
    pages = [await run.store.runs.dead_letters(run.run_id, start, 2) for start in (0, 2, 4)]
    names = [[letter.task.task_id for letter in page] for page in pages]
    assert names == [["a", "b"], ["c"], []]
    await refused(Reason.NOT_FOUND, run.store.runs.dead_letters("nowhere", 0, 1))


async def test_a_requeued_task_gets_new_rollout_names(store: Store) -> None:
    """Attempts continue, under admission like new tasks, and no rollout_id is given out twice."""
    run = await other_run(store, num_extra_samples=1)
    names = list[str]()
    await run.submit("a")
    for life in (1, 2):
        for _ in range(MAX_REPLACEMENTS + 1):
            lease = await run.play(outcome=failed())
            assert lease is not None
            names.append(lease.rollout_id)
        (letter,) = await store.runs.dead_letters(run.run_id, 0, 10)
        assert set(names) <= set(letter.rollout_ids)
        assert letter.attempts == (life * (MAX_REPLACEMENTS + 1), 0, 0)
        assert await store.runs.requeue(run.run_id, ["a", "a", "nobody"]) == 1
        assert await store.runs.requeue(run.run_id, ["a"]) == 0
        assert await store.runs.dead_letters(run.run_id, 0, 10) == []
        assert (await store.runs.run_counts(run.run_id)).num_queued_tasks == 1
    while lease := await run.play():
        names.append(lease.rollout_id)
    assert len(set(names)) == len(names)
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_admitted_groups) == (1, 3)


async def test_a_late_failure_before_the_requeue_changes_nothing(run: Run) -> None:
    """A rollout that outlived its group's first life is no sample of the second."""
    await run.submit("a")
    outlived = await run.lease()
    assert outlived is not None
    await run.start(outlived.rollout_id, outlived.nonce)
    for _ in range(MAX_REPLACEMENTS + 1):
        await run.play(outcome=failed())
    await run.store.runs.requeue(run.run_id, ["a"])
    again = await run.lease()
    assert again is not None
    assert again.rollout_id == "a/0/2"
    replaced = (await run.store.runs.run_counts(run.run_id)).num_replaced_samples
    await run.finish(outlived.rollout_id, failed())
    assert (await run.store.runs.run_counts(run.run_id)).num_replaced_samples == replaced
    assert await run.fill() == 1
    assert (await run.store.runs.run_counts(run.run_id)).num_ready_groups == 0


async def steps(run: Run, first: int, last: int) -> None:
    """Commit steps of one group each."""
    ledger = run.store.ledger
    epoch = (await ledger.reconcile(run.run_id, first - 1, f"trainer-{first}")).epoch
    for step in range(first, last + 1):
        await run.submit(f"step-{step}")
        await run.fill(version=step)
        assert (await ledger.lease_samples(run.run_id, epoch, step, step, 0)).lease is not None
        await ledger.commit(run.run_id, epoch, step)


async def test_retention_deletes_the_rollouts_of_dead_letters(store: Store) -> None:
    """A filter that discards half of all groups must not fill the store; the letter stays."""
    run = await other_run(store, retention_steps=1)
    retention = Retention(store)
    letter = await kill(run, "a")
    await steps(run, 1, 1)
    assert await retention.sweep(run.run_id) == 0
    await steps(run, 2, 2)
    assert await retention.sweep(run.run_id) == 1
    for rollout_id in letter.rollout_ids:
        assert await store.tokens.rollout(run.run_id, rollout_id) is None
    assert await store.runs.dead_letters(run.run_id, 0, 10) == [letter]
    assert await store.runs.requeue(run.run_id, ["a"]) == 1
    again = await run.lease()
    assert again is not None
    assert again.rollout_id == f"a/0/{MAX_REPLACEMENTS + 2}"


async def test_a_requeued_task_keeps_its_earlier_rollouts(store: Store) -> None:
    """Retention counts from the end of its last life, and then deletes the rollouts of all."""
    run = await other_run(store, retention_steps=1)
    retention = Retention(store)
    letter = await kill(run, "a")
    await store.runs.requeue(run.run_id, ["a"])
    lease = await run.play()
    assert lease is not None
    await steps(run, 1, 2)
    assert await retention.sweep(run.run_id) == 0
    await steps(run, 3, 3)
    assert await retention.sweep(run.run_id) == 1
    for rollout_id in (*letter.rollout_ids, lease.rollout_id):
        assert await store.tokens.rollout(run.run_id, rollout_id) is None


async def test_requeued_evaluations_stay_evaluations(run: Run) -> None:
    """They go back to their own queue, which admission does not bound."""
    await kill(run, "a", Purpose.EVAL)
    assert await run.store.runs.requeue(run.run_id, ["a"]) == 1
    lease = await run.play()
    assert lease is not None
    assert lease.task.purpose is Purpose.EVAL
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_admitted_groups, counts.num_ready_groups) == (0, 0)


async def test_the_oldest_letters_leave_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is bounded: a run that only fails does not fill the store."""
    monkeypatch.setattr(run_state, "MAX_DEAD_LETTERS", 2)
    monkeypatch.setattr(run_store, "MAX_DEAD_LETTERS", 2)
    run = await other_run(store)
    for name in "abc":
        await kill(run, name)
    letters = await store.runs.dead_letters(run.run_id, 0, 10)
    assert [letter.task.task_id for letter in letters] == ["b", "c"]
    assert await store.runs.requeue(run.run_id, ["a", "c"]) == 1


@pytest.fixture
async def agent(store: Store) -> AsyncIterator[Client]:
    """A client of a service on the store, with a run of groups of one sample."""
    rules = trajectory_pb2.RunConfig()
    rules.CopyFrom(RULES)
    rules.group_size, rules.max_stored_tokens = 1, 5
    async with (
        running_manager(store) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        client = Client(channel, uuid.uuid4().hex)
        await client.create_run(rules)
        yield client


async def fail(agent: Client) -> None:
    """Lease a task and fail it."""
    lease = await agent.lease(wait=10)
    await agent.start(lease.rollout_id, lease.lease_token)
    failure = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
    request = RolloutFinish(
        run_id=agent.run_id,
        rollout_id=lease.rollout_id,
        credential_digest=CREDENTIAL,
        failure=failure,
    )
    await send_async(agent.trajectories, request)


async def test_letters_are_read_and_requeued_over_grpc(agent: Client) -> None:
    """The list has pages, and what was requeued is no letter any more."""
    await agent.submit("a", "b")
    for _ in range(2 * (MAX_REPLACEMENTS + 1)):
        await fail(agent)
    request = pb.ListDeadLettersRequest(run_id=agent.run_id, page_size=1)
    first = await agent.tasks.ListDeadLetters(request)
    request.page_token = first.next_page_token
    second = await agent.tasks.ListDeadLetters(request)
    letters = [*first.dead_letters, *second.dead_letters]
    assert [letter.task.task_id for letter in letters] == ["a", "b"]
    assert letters[0].reason == pb.DEAD_LETTER_REASON_FAILURES
    assert letters[0].rollout_ids[-1] == f"a/0/{MAX_REPLACEMENTS + 1}"
    assert letters[0].discard_time.seconds > 0
    assert second.next_page_token == ""
    again = pb.RequeueDeadLettersRequest(run_id=agent.run_id, task_ids=["a", "b", "c"])
    assert (await agent.tasks.RequeueDeadLetters(again)).num_requeued == 2
    assert not (await agent.tasks.ListDeadLetters(request)).dead_letters
    assert (await agent.lease()).rollout_id == f"a/0/{MAX_REPLACEMENTS + 2}"


async def test_an_agent_learns_that_the_cap_keeps_its_tasks_out(
    agent: Client, store: Store
) -> None:
    """Each reason for an empty answer is named; deletion lets a waiting agent go on."""
    await store.runs.add_stored_tokens(agent.run_id, 6)
    assert (await agent.ask()).empty_reason == trajectory_pb2.EMPTY_REASON_NOTHING_QUEUED
    await agent.submit("a", "b", "c")
    empty = await agent.ask(wait=1)
    assert (len(empty.leases), empty.empty_reason) == (0, trajectory_pb2.EMPTY_REASON_STORE_FULL)
    waiting = asyncio.create_task(agent.ask(wait=30))
    await store.runs.add_stored_tokens(agent.run_id, -6)
    answer = await waiting
    assert [lease.rollout_id for lease in answer.leases] == ["a/0/1"]
    assert answer.empty_reason == trajectory_pb2.EMPTY_REASON_UNSPECIFIED
    assert (await agent.lease()).rollout_id == "b/0/1"
    await store.runs.add_stored_tokens(agent.run_id, 6)
    assert (await agent.ask()).empty_reason == trajectory_pb2.EMPTY_REASON_ADMISSION_CLOSED
