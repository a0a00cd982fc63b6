"""SearchRollouts and the newest dead letters, over real gRPC, with the index and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from bench.harness.store_calls import send_async
from tests.integration.trajectory_manager.api.test_trained_samples import record, trained
from tests.lib.trajectory_manager.client import CREDENTIAL, Client, running_manager
from tests.lib.trajectory_manager.support import Run, failed, other_run, rewarded
from trajectory_manager.service import rollout_index
from trajectory_manager.service.sweeper import Retention
from trajectory_manager.store.redis.connect import Store

TRAIN, EVAL = tokens_pb2.PURPOSE_TRAIN, tokens_pb2.PURPOSE_EVAL


async def search(client: Client, **wanted: Any) -> pb.SearchRolloutsResponse:
    """One page."""
    request = pb.SearchRolloutsRequest(run_id=client.run_id, **wanted)
    return await client.trajectories.SearchRollouts(request)


async def found(client: Client, **wanted: Any) -> list[str]:
    """The names of all pages."""
    names, token = [], ""
    while True:
        page = await search(client, page_token=token, **wanted)
        names += [each.rollout_id for each in page.rollouts]
        if not (token := page.next_page_token):
            return names


@asynccontextmanager
async def serving(store: Store, run_id: str, **settings: Any) -> AsyncIterator[Client]:
    """A manager on `store`."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(running_manager(store, **settings))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        yield Client(await stack.enter_async_context(channel), run_id)


async def history(run: Run) -> None:
    """Groups a (rewards 0 and 1) and b (a failure, then 0.5; one runs), and an evaluation."""
    await run.submit("a", "b")
    for reward in (0.0, 1.0):
        await run.play(version=2, outcome=rewarded(reward))
    await run.play(outcome=failed())
    await run.play(version=3, outcome=rewarded(0.5))
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    await run.start("eval")
    await run.turn("eval", "t1", [1], [2])
    await run.turn("eval", "t2", [1, 2, 3], [4, 5, 6])
    await run.finish("eval", rewarded(0.25))


NEWEST = ["eval", "b/1/1", "b/0/2", "b/0/1", "a/1/1", "a/0/1"]
RULES_OF_RUN = {"groups_per_step": 2}


@pytest.mark.parametrize("indexed", [100, 0])
async def test_every_filter_finds_what_it_says(store: Store, indexed: int) -> None:
    """Newest first; without an index from the headers, with the same answers."""
    run = await other_run(store, **RULES_OF_RUN)
    await history(run)
    async with serving(store, run.run_id, max_indexed_rollouts=indexed) as client:
        assert await found(client) == NEWEST
        assert await found(client, page_size=2) == NEWEST
        assert await found(client, purpose=EVAL) == ["eval"]
        running = trajectory_pb2.ROLLOUT_STATE_RUNNING
        assert await found(client, state=running) == ["b/1/1"]
        environment = tokens_pb2.FAILURE_CLASS_ENVIRONMENT
        assert await found(client, failure_class=environment) == ["b/0/1"]
        assert await found(client, group_id="b") == ["b/1/1", "b/0/2", "b/0/1"]
        assert await found(client, group_id="nobody") == []
        assert await found(client, min_reward=0.5) == ["b/0/2", "a/1/1"]
        assert await found(client, min_reward=0.0, max_reward=0.5, page_size=1) == [
            *("eval", "b/0/2", "a/0/1")
        ]
        assert await found(client, min_turns=2) == ["eval"]
        assert await found(client, max_tokens=5, purpose=TRAIN) == NEWEST[1:]
        assert await found(client, min_tokens=6) == ["eval"]
        assert await found(client, rollout_ids=["a/1/1", "x", "eval"]) == ["a/1/1", "eval"]
        assert await found(client, rollout_ids=["a/1/1", "eval"], group_id="a") == ["a/1/1"]


async def test_a_row_says_what_its_trajectory_says(store: Store) -> None:
    """Reward, lengths, versions and times, read from the index alone."""
    run = await other_run(store, **RULES_OF_RUN)
    await history(run)
    async with serving(store, run.run_id) as client:
        page = await search(client)
        assert (page.num_started, page.num_searched, page.num_unindexed) == (6, 6, 0)
        for row in page.rollouts:
            whole = await client.get(row.rollout_id)
            assert (row.group_id, row.purpose, row.state) == (
                *(whole.group_id, whole.purpose, whole.state),
            )
            spans = [span for turn in whole.turns for span in turn.tokens.spans]
            sampled = [span for span in spans if span.origin == tokens_pb2.ORIGIN_POLICY]
            assert row.num_tokens == sum(span.num_tokens for span in spans)
            assert row.num_policy_tokens == sum(span.num_tokens for span in sampled)
            assert row.num_turns == len(whole.turns)
            assert row.HasField("min_weight_version") == bool(sampled)
            assert {row.min_weight_version, row.max_weight_version} == {
                span.weight_version for span in sampled
            } | ({0} if not sampled else set())
            rewards = [reward.value for reward in whole.rewards.rewards]
            assert [row.reward] * row.HasField("reward") == rewards
            assert (row.create_time, row.finish_time) == (whole.create_time, whole.finish_time)
            assert row.failure_class == whole.failure.failure_class


async def test_steps_are_known_before_they_are_committed(store: Store) -> None:
    """From the record of the trainer, or from the ledger; afterwards from the commit."""
    run = await other_run(store, groups_per_step=1)
    await run.submit("a", "b")
    await run.fill()
    async with serving(store, run.run_id) as client:
        epoch = await client.reconcile()
        for step in (1, 2):
            assert (await client.lease_samples(epoch, step)).lease_token
        assert sorted(await found(client, step=1)) == ["a/0/1", "a/1/1"]
        await record(client, epoch, 1, [trained("a/0/1"), trained("a/1/1")])
        steps = {row.rollout_id: row.step for row in (await search(client)).rollouts}
        assert steps == {"a/0/1": 1, "a/1/1": 1, "b/0/1": 0, "b/1/1": 0}
        await store.ledger.commit(run.run_id, epoch, 2)
        steps = {row.rollout_id: row.step for row in (await search(client)).rollouts}
        assert steps == {"a/0/1": 1, "a/1/1": 1, "b/0/1": 2, "b/1/1": 2}
        assert sorted(await found(client, step=2)) == ["b/0/1", "b/1/1"]
        assert await found(client, step=3) == []


async def test_rows_that_are_missing_are_added_by_a_search(store: Store) -> None:
    """As of a run from before there was an index; what still runs gets none."""
    run = await other_run(store)
    for name in ("closed", "running"):
        await run.start(name)
        await run.turn(name, "t1", [1], [2])
    await run.close("closed")
    names = ["closed", "running"]
    assert [row.summary for row in await store.inspection.rows(run.run_id, names)] == [None, None]
    async with serving(store, run.run_id) as client:
        assert await found(client) == ["running", "closed"]
    closed, running = await store.inspection.rows(run.run_id, names)
    assert closed.summary is not None
    assert closed.summary.num_tokens == 2
    assert running.summary is None


async def test_the_index_is_bounded(store: Store) -> None:
    """The oldest rollouts leave it, and a search says how many."""
    run = await other_run(store)
    for number in range(8):
        await run.start(f"r{number}")
        await run.finish(f"r{number}")
    async with serving(store, run.run_id, max_indexed_rollouts=3) as client:
        while (page := await search(client)).num_unindexed < 5:
            pass
        assert [row.rollout_id for row in page.rollouts] == ["r7", "r6", "r5"]
        assert (page.num_started, page.num_unindexed, page.next_page_token) == (8, 5, "")


async def test_deleted_rollouts_are_not_found(store: Store) -> None:
    """Neither one that had a row nor one that had none."""
    run = await other_run(store, **RULES_OF_RUN)
    await history(run)
    await run.start("closed")
    await run.close("closed")
    await store.retention.delete(run.run_id, ["closed"])
    await Retention(store).delete(run.run_id, ["eval"])
    async with serving(store, run.run_id) as client:
        assert await found(client) == NEWEST[1:]


async def test_a_call_looks_at_a_bounded_number_of_rollouts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may be empty, and the next ones find what there is."""
    monkeypatch.setattr(rollout_index, "_MAX_HEADERS", 2)
    monkeypatch.setattr(rollout_index, "_MAX_ROWS", 4)
    run = await other_run(store)
    for number in range(9):
        await run.start(f"r{number}")
        await run.close(f"r{number}", rewarded(float(number == 0)))
    async with serving(store, run.run_id) as client:
        first = await search(client, min_reward=1.0)
        assert (list(first.rollouts), first.num_searched) == ([], 2)
        assert await found(client, min_reward=1.0) == ["r0"]
        assert await found(client, rollout_ids=[f"r{n}" for n in range(9)]) == [
            f"r{n}" for n in range(9)
        ]


async def test_dead_letters_are_read_from_the_newest(replicas: tuple[Client, Client]) -> None:
    """Page by page."""
    client = replicas[0]
    await client.submit("a", "b", "c")
    for _ in range(3):
        for _ in range(11):
            lease = await client.lease()
            await client.start(lease.rollout_id, lease.lease_token)
            request = pb.RolloutFinish(
                run_id=client.run_id,
                rollout_id=lease.rollout_id,
                credential_digest=CREDENTIAL,
                failure=tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT),
            )
            await send_async(client.trajectories, request)
    names, token = [], ""
    while True:
        page = await client.tasks.ListDeadLetters(
            task_service_pb2.ListDeadLettersRequest(
                run_id=client.run_id, page_size=2, page_token=token, newest_first=True
            )
        )
        names += [letter.task.task_id for letter in page.dead_letters]
        if not (token := page.next_page_token):
            break
    oldest = [letter.task.task_id for letter in await client.dead_letters()]
    assert names == oldest[::-1]
    assert len(names) > 1


@pytest.mark.parametrize(
    "wanted",
    [
        {"min_tokens": -1},
        {"step": -1},
        {"min_reward": float("nan")},
        {"group_id": "{"},
        {"page_token": "x"},
        {"rollout_ids": ["x"] * 1001},
    ],
)
async def test_a_search_that_makes_no_sense_is_refused(
    replicas: tuple[Client, Client], wanted: dict[str, Any]
) -> None:
    """With the field's name."""
    (field,) = wanted
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await search(replicas[0], **wanted)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
