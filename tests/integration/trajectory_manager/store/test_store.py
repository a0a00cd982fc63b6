"""The store suite: every promise of `TokenStore` and `RunStore`, on both implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import Reason
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.support import (
    CREDENTIAL,
    RULES,
    Run,
    failed,
    other_run,
    policy,
    refused,
    rewarded,
    token_append,
    tokens,
)
from trajectory_manager.model.records import (
    MAX_REPLACEMENTS,
    FailureClass,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Task,
)
from trajectory_manager.model.tokens import Appended, Tokens, VersionSource
from trajectory_manager.service.rollouts import EXPIRED, STOPPED, Rollouts
from trajectory_manager.store.redis.connect import Store


async def test_tokens_grow_and_come_back_as_they_were(run: Run) -> None:
    """Appended chunks are one sequence with merged spans."""
    await run.start("r")
    epoch = (await run.begin("r", "t", [1, 2])).epoch
    assert await run.append("r", "t", epoch, 0, tokens([1, 2])) == 2
    assert await run.append("r", "t", epoch, 2, tokens([3, 4], policy(7))) == 4
    assert await run.append("r", "t", epoch, 4, tokens([5], policy(7))) == 5
    assert await run.append("r", "t", epoch, 5, tokens([6], policy(8))) == 6
    (stored,) = await run.store.tokens.tokens(run.run_id, "r", ["t"])
    whole = tokens([1, 2]).joined(tokens([3, 4, 5], policy(7))).joined(tokens([6], policy(8)))
    assert stored == whole
    (found,) = await run.store.tokens.read(run.run_id, ["r"], spans_only=True)
    assert found is not None
    assert [record.tokens for record in found[1]] == [Tokens(spans=whole.spans)]


async def test_a_repeated_append_stores_only_what_is_new(run: Run) -> None:
    """An identical overlap is acknowledged, a different one is rejected."""
    await run.start("r")
    epoch = (await run.begin("r", "t", [1])).epoch
    await run.append("r", "t", epoch, 0, tokens([1, 2, 3]))
    append = token_append(run.run_id, "r", "t", epoch, 1, tokens([2, 3]))
    assert await run.do(append) == Appended(num_tokens=3, num_new=0)
    longer = token_append(run.run_id, "r", "t", epoch, 2, tokens([3, 4, 5]))
    assert await run.do(longer) == Appended(num_tokens=5, num_new=2)
    await refused(Reason.ALREADY_EXISTS, run.append("r", "t", epoch, 1, tokens([9, 3])))
    (stored,) = await run.store.tokens.tokens(run.run_id, "r", ["t"])
    assert stored == tokens([1, 2, 3, 4, 5])


async def test_a_gap_fails_the_rollout(run: Run) -> None:
    """Tokens that would leave a hole are not stored, and the rollout is INFRASTRUCTURE's fault."""
    await run.start("r")
    epoch = (await run.begin("r", "t", [1])).epoch
    await run.append("r", "t", epoch, 0, tokens([1]))
    await refused(Reason.OFFSET_GAP, run.append("r", "t", epoch, 2, tokens([3])))
    rollout = await run.store.tokens.rollout(run.run_id, "r")
    assert rollout is not None
    assert rollout.state is RolloutState.FAILED
    assert rollout.outcome.failure_class is FailureClass.INFRASTRUCTURE
    await refused(Reason.ROLLOUT_FINISHED, run.append("r", "t", epoch, 1, tokens([2])))


async def test_another_attempt_fences_the_first(run: Run) -> None:
    """The same attempt keeps its epoch, another one gets the next and what is stored."""
    await run.start("r")
    first = (await run.begin("r", "t", [1], "a")).epoch
    assert (await run.begin("r", "t", [1], "a")).epoch == first
    await run.append("r", "t", first, 0, tokens([1, 2]))
    second = await run.begin("r", "t", [1], "b")
    assert second.epoch == first + 1
    assert second.tokens == tokens([1, 2]).fill(tokens_pb2.PackedTokens())
    await refused(Reason.STALE_EPOCH, run.append("r", "t", first, 2, tokens([3])))
    await refused(Reason.STALE_EPOCH, run.end("r", "t", first))
    assert await run.append("r", "t", second.epoch, 2, tokens([3])) == 3


async def test_a_turn_keeps_its_prompt_and_its_end(run: Run) -> None:
    """Another prompt or another end under the same name is rejected; a repetition is not."""
    await run.start("r")
    opened = await run.turn("r", "t", [1], [2])
    await refused(Reason.ALREADY_EXISTS, run.begin("r", "t", [9]))
    await run.end("r", "t", opened.epoch)
    await refused(Reason.ALREADY_EXISTS, run.end("r", "t", opened.epoch, "key"))
    again = await run.begin("r", "t", [1], "b")
    assert (again.finish_reason, again.epoch) == (1, opened.epoch)
    assert len(again.tokens.token_ids) == 8
    await refused(Reason.TURN_FINISHED, run.append("r", "t", opened.epoch, 2, tokens([3])))


async def test_the_longest_stored_prefix_is_matched(run: Run) -> None:
    """A longer conversation continues its turn; a rewritten one forks where it leaves it."""
    await run.start("r")
    await run.turn("r", "t1", [1, 2], [3, 4])
    second = await run.begin("r", "t2", [1, 2, 3, 4, 5])
    assert second.prefix_turn_id == "t1"
    assert list(unpack_ids(second.prefix_token_ids)) == [1, 2, 3, 4]
    await run.append("r", "t2", second.epoch, 0, tokens([5]))
    await run.append("r", "t2", second.epoch, 1, tokens([6], policy()))
    fork = await run.begin("r", "t3", [1, 2, 3, 8])
    assert (fork.prefix_turn_id, len(fork.prefix_token_ids)) == ("t1", 12)
    third = await run.begin("r", "t4", [1, 2, 3, 4, 5, 6, 7])
    assert third.prefix_turn_id == "t2"
    assert list(unpack_ids(third.prefix_token_ids)) == [1, 2, 3, 4, 5, 6]
    bound = await run.begin("r", "t5", [1, 2, 3, 4, 5, 6, 7], parent="t1")
    assert (bound.prefix_turn_id, len(bound.prefix_token_ids)) == ("t1", 16)
    root = await run.begin("r", "t6", [9, 9])
    assert (root.prefix_turn_id, root.prefix_token_ids) == ("", b"")
    await refused(Reason.NOT_FOUND, run.begin("r", "t7", [1], parent="nobody"))


async def test_messages_match_whole_turns_of_the_same_template(run: Run) -> None:
    """With message keys the prefix is the whole sequence of the turn they continue."""
    await run.start("r")
    first = await run.begin("r", "t1", ["system", "user"], fingerprint="f")
    assert first.prefix_turn_id == ""
    await run.append("r", "t1", first.epoch, 0, tokens([1, 2, 3]))
    early = await run.begin("r", "t2", ["system", "user", "answer"], fingerprint="f")
    assert early.prefix_turn_id == ""
    await run.end("r", "t1", first.epoch, "answer")
    second = await run.begin("r", "t3", ["system", "user", "answer", "tool"], fingerprint="f")
    assert second.prefix_turn_id == "t1"
    assert second.num_matched_messages == 3
    assert list(unpack_ids(second.prefix_token_ids)) == [1, 2, 3]
    other = await run.begin("r", "t4", ["system", "user", "answer", "tool"], fingerprint="g")
    assert other.prefix_turn_id == ""
    rewritten = await run.begin("r", "t5", ["system", "other", "answer"], fingerprint="f")
    assert rewritten.prefix_turn_id == ""


async def test_only_the_credential_opens_and_closes(run: Run) -> None:
    """A foreign credential neither begins a turn nor finishes the rollout."""
    await run.start("r")
    stranger = "0" * 64
    await run.begin("r", "t", [1])
    tokens_store = run.store.tokens
    (turn,) = await tokens_store.turns(run.run_id, "r")
    await refused(
        Reason.PERMISSION_DENIED, tokens_store.begin_turn(run.run_id, "r", stranger, turn)
    )
    await refused(Reason.PERMISSION_DENIED, run.finish("r", credential=stranger))
    await refused(Reason.PERMISSION_DENIED, run.close("r", credential=stranger))


async def test_unknown_names_are_reported(run: Run, store: Store) -> None:
    """Unknown runs, rollouts and turns are NOT_FOUND, and the run's message names the cure."""
    error = await refused(Reason.NOT_FOUND, Run(store, "nowhere").lease())
    assert "'nowhere'" in error.message
    assert "CreateRun" in error.message
    await refused(Reason.NOT_FOUND, store.runs.config("nowhere"))
    await refused(Reason.NOT_FOUND, run.begin("nobody", "t", [1]))
    await refused(Reason.NOT_FOUND, run.finish("nobody"))
    await run.start("r")
    await refused(Reason.NOT_FOUND, run.append("r", "nothing", 1, 0, tokens([1])))


async def test_a_rollout_closes_once(run: Run) -> None:
    """The same end is idempotent, another one is rejected."""
    await run.start("r")
    await run.finish("r")
    await run.finish("r")
    await refused(Reason.ALREADY_EXISTS, run.finish("r", rewarded(0.5)))
    await refused(Reason.ROLLOUT_FINISHED, run.begin("r", "t", [1]))
    await refused(Reason.ROLLOUT_FINISHED, run.start("r"))


async def test_a_run_keeps_its_rules(store: Store, run: Run) -> None:
    """Creating it again answers the rules that are there."""
    assert await store.runs.create_run(run.run_id, replace(RULES, group_size=9)) == RULES
    assert await store.runs.config(run.run_id) == RULES
    assert run.run_id in await store.runs.run_ids()


async def test_a_task_is_queued_once(run: Run) -> None:
    """Known tasks are not queued again, a changed one is rejected, and the queue is bounded."""
    await run.submit("a", "b", "a")
    await run.submit("a")
    assert (await run.store.runs.run_counts(run.run_id)).num_queued_tasks == 2
    await refused(Reason.ALREADY_EXISTS, run.submit("a", num_samples=3))
    full = run.store.runs.submit(run.run_id, [], 2)
    assert (await full).num_free == 0
    await run.fill()
    await run.submit("a")
    assert (await run.store.runs.run_counts(run.run_id)).num_queued_tasks == 0


async def test_a_full_queue_pushes_back(run: Run) -> None:
    """All of a batch is queued or none of it, and the error has a retry time."""
    task = two_samples("x")
    error = await refused(
        Reason.TOO_MANY_REQUESTS,
        run.store.runs.submit(run.run_id, [task, replace(task, task_id="y")], 1),
    )
    assert error.retry_after
    submitted = await run.store.runs.submit(run.run_id, [task], 1)
    assert (submitted.num_accepted, submitted.num_free) == (1, 0)


async def test_tasks_to_train_on_never_keep_evaluations_out(run: Run) -> None:
    """Each purpose has its own queue and bound."""
    await run.store.runs.submit(run.run_id, [two_samples("x")], 1)
    evaluation = replace(two_samples("y"), purpose=Purpose.EVAL)
    submitted = await run.store.runs.submit(run.run_id, [evaluation], 1)
    assert (submitted.num_accepted, submitted.num_free) == (1, 0)


def two_samples(task_id: str) -> Task:
    """A task of two samples."""
    return Task(task_id=task_id, payload_json="{}", num_samples=2, purpose=Purpose.TRAIN)


async def test_a_group_completes_and_is_leased_as_a_whole(run: Run) -> None:
    """The trainer gets the samples of one group, adjacent, in slot order."""
    await run.submit("a", "b")
    assert await run.fill() == 4
    epoch = (await run.store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    attempt = await run.store.ledger.lease_samples(run.run_id, epoch, 1, 0, 0)
    assert attempt.lease is not None
    assert attempt.lease.sample_ids == ("a/0/1#t1", "a/1/1#t1")


async def test_eval_comes_first_and_never_reaches_the_trainer(run: Run) -> None:
    """EVAL tasks are leased before TRAIN ones, outside admission, and are not made ready."""
    await run.submit("train")
    await run.submit("eval-1", "eval-2", "eval-3", num_samples=1, purpose=Purpose.EVAL)
    leases = [await run.lease() for _ in range(4)]
    names = [lease.task.task_id for lease in leases if lease is not None]
    assert names == ["eval-1", "eval-2", "eval-3", "train"]
    for lease in leases[:3]:
        assert lease is not None
        await run.start(lease.rollout_id, lease.nonce)
        await run.finish(lease.rollout_id)
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_running_rollouts) == (0, 1)
    assert counts.num_admitted_groups == 1


async def test_a_failed_sample_is_replaced_outside_admission(run: Run) -> None:
    """Its slot is leased again under the next attempt; the group stays admitted."""
    await run.submit("a", "b", "c", "d")
    lease = await run.play(outcome=failed())
    assert lease is not None
    assert lease.rollout_id == "a/0/1"
    again = await run.lease()
    assert again is not None
    assert again.rollout_id == "a/0/2"
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_admitted_groups, counts.num_replaced_samples) == (1, 1)


@pytest.mark.parametrize(
    ("outcome", "replaced"),
    [
        (replace(rewarded(0.0), failure_class=FailureClass.POLICY), 0),
        (replace(rewarded(0.0), failure_class=FailureClass.TIMEOUT), 1),
    ],
)
async def test_only_a_policy_failure_counts(run: Run, outcome: Outcome, replaced: int) -> None:
    """There the reward stands; every other failure replaces the sample."""
    await run.submit("a")
    await run.play(outcome=outcome)
    counts = await run.store.runs.run_counts(run.run_id)
    assert counts.num_replaced_samples == replaced


async def test_tokens_of_unknown_version_are_not_trained(run: Run) -> None:
    """A rollout that has no others yields no sample and is replaced."""
    await run.submit("a")
    await run.play(span=policy(source=VersionSource.UNKNOWN))
    assert (await run.store.runs.run_counts(run.run_id)).num_replaced_samples == 1


async def test_a_group_that_keeps_failing_is_given_up(run: Run) -> None:
    """After MAX_REPLACEMENTS its capacity returns and its other leases end."""
    await run.submit("a")
    other = await run.lease()
    assert other is not None
    for _ in range(MAX_REPLACEMENTS + 1):
        assert await run.play(outcome=failed())
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_discarded_groups, counts.num_running_groups) == (1, 0)
    assert counts.num_running_rollouts == 0
    held = await run.store.runs.extend_tasks(run.run_id, [(other.rollout_id, other.nonce)])
    assert held == [False]
    await refused(Reason.LEASE_EXPIRED, run.start(other.rollout_id, other.nonce))


async def test_groups_without_variance_are_filtered(store: Store) -> None:
    """Equal rewards teach nothing: the group is discarded and its capacity returned."""
    run = await other_run(store, zero_variance_reward="reward")
    await run.submit("a", "b")
    for value in (1.0, 1.0, 0.0, 1.0):
        await run.play(outcome=rewarded(value))
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_discarded_groups) == (1, 1)
    assert counts.num_admissible_groups == 1


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (0.1 + 0.2, 0.3, True),
        (0.99999994, 1.0, True),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (-2.0, -2.0000001, True),
        (1.0, 0.9999, False),
        (1e-6, 0.0, False),
        (1e-6, 2e-6, False),
        (-1.0, 1.0, False),
        (1e30, 1.00001e30, False),
    ],
)
async def test_rounding_is_no_variance(
    store: Store, one: float, other: float, are_equal: bool
) -> None:
    """Sums of the rewards of turns, and rewards in float32, differ in their last digits."""
    run = await other_run(store, zero_variance_reward="reward")
    await run.submit("a")
    for value in (one, other):
        await run.play(outcome=rewarded(value))
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_discarded_groups, counts.num_ready_groups) == (are_equal, not are_equal)


async def test_the_variance_is_that_of_the_sums_over_turns(store: Store) -> None:
    """A rollout's reward is its own and those of its turns together."""
    run = await other_run(store, zero_variance_reward="reward")
    await run.submit("same", "other")
    half = Reward(name="reward", value=0.5)
    split = Outcome(rewards=(half, replace(half, turn_id="t1")))
    for outcome in (rewarded(1.0), split, rewarded(0.5), split):
        await run.play(outcome=outcome)
    letters = await store.runs.dead_letters(run.run_id, 0, 10)
    assert [letter.task.task_id for letter in letters] == ["same"]


async def test_an_expired_lease_fails_its_rollout(store: Store) -> None:
    """The sweep fails it as INFRASTRUCTURE and reopens its slot; it cannot start any more."""
    run, rollouts = await other_run(store, lease_seconds=0.0005), Rollouts(store)
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    while not await rollouts.sweep(run.run_id):
        pass
    rollout = await store.tokens.rollout(run.run_id, lease.rollout_id)
    assert rollout is not None
    assert rollout.outcome == EXPIRED
    again = await run.lease()
    assert again is not None
    assert again.rollout_id == "a/0/2"
    await refused(Reason.LEASE_EXPIRED, run.start(lease.rollout_id, lease.nonce))


@pytest.mark.parametrize("way", ["manager was restarted", "run ended"])
async def test_a_lease_that_a_stop_cut_is_no_failure(store: Store, way: str) -> None:
    """Nobody could extend it: its rollout is cancelled, and no replacement is counted.

    *Control*: `test_an_expired_lease_fails_its_rollout`, of an agent that was silent.
    """
    run = await other_run(store, lease_seconds=0.0005)
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    rollouts = run.rollouts
    if way == "run ended":
        await store.runs.end_run(run.run_id)
    else:
        rollouts = Rollouts(store)
    while not await rollouts.sweep(run.run_id):
        pass
    rollout = await store.tokens.rollout(run.run_id, lease.rollout_id)
    assert rollout is not None
    assert rollout.outcome == STOPPED
    assert (await store.runs.run_counts(run.run_id)).num_replaced_samples == 0


async def test_a_lease_is_proved_by_its_nonce(run: Run) -> None:
    """A guessed token neither extends nor starts."""
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    leases = [(lease.rollout_id, "guess"), (lease.rollout_id, lease.nonce)]
    assert await run.store.runs.extend_tasks(run.run_id, leases) == [False, True]
    await refused(Reason.LEASE_EXPIRED, run.start(lease.rollout_id, "guess"))
    await run.start(lease.rollout_id, lease.nonce)


async def test_a_lost_answer_to_start_does_not_lose_the_rollout(run: Run) -> None:
    """A lease holder may start again with a new credential, until tokens depend on the first."""
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    rollout = await run.store.tokens.rollout(run.run_id, lease.rollout_id)
    assert rollout is not None
    other = replace(rollout, credential_digest="1" * 64)
    await run.rollouts.start(other, lease.nonce)
    await run.rollouts.start(rollout, lease.nonce)
    await run.begin(lease.rollout_id, "t", [1])
    await refused(Reason.ALREADY_EXISTS, run.rollouts.start(other, lease.nonce))
    assert rollout.credential_digest == CREDENTIAL


async def test_a_training_rollout_is_not_pinned(run: Run) -> None:
    """The lease determines the purpose of the rollout, not the caller."""
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    rollout = Rollout(
        run_id=run.run_id,
        rollout_id=lease.rollout_id,
        purpose=Purpose.EVAL,
        credential_digest=CREDENTIAL,
        pinned_weight_version=3,
    )
    await refused(Reason.INVALID_FIELD, run.rollouts.start(rollout, lease.nonce))


async def test_rollouts_are_listed_in_order(run: Run) -> None:
    """Pages follow the order of starting, once each."""
    for name in ("c", "a", "b", "a"):
        await run.start(name)
    assert await run.store.runs.listed(run.run_id, 0, 2) == ["c", "a"]
    assert await run.store.runs.listed(run.run_id, 2, 2) == ["b"]
