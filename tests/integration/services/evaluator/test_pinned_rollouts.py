"""Rollouts of an evaluation, on a real trajectory manager: rewards, replacements, an early end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from bench.harness.store_calls import send_async
from services.chassis.errors import ConfigError
from services.evaluator.clients import Clients
from services.evaluator.evaluation import EvaluationSamples
from services.evaluator.pinned_rollouts import EvaluationFailed, PinnedRollouts
from services.lib.tasks.task_rows import TaskRow
from tests.lib.evaluator.agent import agent, lease, play
from tests.lib.trajectory_manager.client import CREDENTIAL, Client, running_manager

TASKS = [TaskRow("a", "{}"), TaskRow("b", "{}"), TaskRow("c", "{}")]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A caller of a manager that keeps all in memory."""
    async with (
        running_manager() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        found = Client(channel, "run")
        await found.create_run()
        yield found


class OlderManager:
    """A manager of a release that cannot search."""

    def __init__(self, stub: Any) -> None:
        self.GetTrajectory = stub.GetTrajectory

    async def SearchRollouts(self, request: Any) -> Any:
        """Refused."""
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing)


def rollouts(client: Client, **fields: Any) -> PinnedRollouts:
    """An evaluation of version 3."""
    trajectories = fields.pop("trajectories", client.trajectories)
    stubs = SimpleNamespace(run_id="run", tasks=client.tasks, trajectories=trajectories)
    given = {"samples": 2, "concurrency": 4, "metric": "reward", **fields}
    return PinnedRollouts(
        services=cast(Clients, stubs), tasks=TASKS, label="step-1", weight_version=3, **given
    )


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


async def evaluated(
    client: Client, finish: Callable[[str], Awaitable[None]], version: int = 3, **fields: Any
) -> PinnedRollouts:
    """An evaluation with an agent."""
    found = rollouts(client, **fields)
    working = asyncio.create_task(agent(client, finish, version))
    try:
        await found.run(no_progress)
    finally:
        working.cancel()
    return found


@pytest.mark.parametrize("is_older", [False, True])
async def test_every_rollout_counts_once(client: Client, is_older: bool) -> None:
    """A failed one is replaced; the policy's own failure is worth 0. With an older manager, too."""
    failed: list[str] = []

    async def finish(rollout_id: str) -> None:
        if rollout_id.startswith("b@") and not failed:
            failed.append(rollout_id)
            failure = tokens_pb2.Failure(failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
            end = pb.RolloutFinish(
                run_id="run",
                rollout_id=rollout_id,
                credential_digest=CREDENTIAL,
                failure=failure,
            )
            await send_async(client.trajectories, end)
        elif rollout_id.startswith("c@"):
            await client.fail(rollout_id)
        else:
            await client.finish(rollout_id, 1.0)

    manager = OlderManager(client.trajectories) if is_older else client.trajectories
    found = await evaluated(client, finish, trajectories=manager)
    assert found.rewards == {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0]}
    assert failed


async def test_more_rollouts_than_a_page_of_states_are_all_seen(client: Client) -> None:
    """Of running ones a call tells only of some hundreds."""
    tasks = [TaskRow(str(number), "{}") for number in range(400)]
    found = rollouts(client, samples=1, concurrency=400)
    found.tasks = tasks
    await found._submit_more(deque(tasks))
    for _ in tasks:
        given = await lease(client)
        assert given is not None
        await play(client, given, 3)
    states = await found._states()
    assert states is not None
    assert set(states) == {sample.rollout_id for sample in found._open}
    assert len(states) == 400


async def test_tokens_of_another_version_are_no_result(client: Client) -> None:
    """As from a gateway of an older release, which does not know the pin."""
    with pytest.raises(EvaluationFailed, match="version 4 instead of 3"):
        await evaluated(client, client.finish, version=4)


async def test_a_missing_reward_is_named(client: Client) -> None:
    """With those that there are, and the cure."""
    with pytest.raises(ConfigError, match=r"\['reward'\] but no 'success'"):
        await evaluated(client, client.finish, metric="success")


async def test_without_a_setting_the_metric_is_what_the_rollouts_have(client: Client) -> None:
    """Here "reward", the only one."""
    found = await evaluated(client, client.finish, metric="")
    assert found.metric == "reward"


async def test_a_reward_that_training_would_not_use_is_named(client: Client) -> None:
    """Before the trainer has seen a rollout."""
    with pytest.raises(ConfigError, match=r"has the rewards 'reward', and training would use 'x'"):
        await evaluated(client, client.finish, trained_rewards=("x",))


async def test_an_evaluation_that_no_agent_takes_is_given_up(client: Client) -> None:
    """Its tasks are taken back."""
    found = rollouts(client, start_patience=0.05)
    with pytest.raises(EvaluationFailed, match="no agent took one of its 4 rollouts"):
        await found.run(no_progress)
    assert await lease(client) is None


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_what_is_given_up_is_taken_back(
    client: Client, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """One rollout runs, the others wait: no agent gets one afterwards. Control: without, one does.

    Only as many as may be in flight were ever queued.
    """
    if not is_cancelled:
        monkeypatch.setattr("services.evaluator.pinned_rollouts.cancel", _nothing)
    found = rollouts(client)
    running = asyncio.create_task(found.run(no_progress))
    while (held := await lease(client)) is None:
        await asyncio.sleep(0.01)
    await play(client, held, 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    left = [each for each in [await lease(client) for _ in range(6)] if each is not None]
    assert len(left) == (0 if is_cancelled else 3)
    while is_cancelled:
        trajectory = await client.get(held.rollout_id)
        if trajectory.failure.failure_class == tokens_pb2.FAILURE_CLASS_CANCELLED:
            break
        await asyncio.sleep(0.02)


async def _nothing(*_: object) -> None:
    """Cancels nothing."""


async def test_the_first_rollout_of_some_tasks_is_written_for_people(
    client: Client, tmp_path: Path
) -> None:
    """Appended with its evaluation; without a tokenizer, ids."""
    found = await evaluated(client, client.finish, num_shown=2)
    samples = EvaluationSamples(tmp_path / "samples.jsonl", tmp_path)
    for label in ("before", "step-1"):
        samples.add(found.shown, label, 1)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["evaluation"] for row in rows] == ["before"] * 2 + ["step-1"] * 2
    assert sorted(row["task_id"][0] for row in rows[:2]) == ["a", "b"]
    assert (rows[0]["turns"][0]["answer"], rows[0]["rewards"]) == ("2 ", {"reward": 1.0})


async def test_nothing_is_kept_for_people_unless_asked_for(client: Client) -> None:
    """The default of a caller that shows nothing."""
    assert (await evaluated(client, client.finish)).shown == []


async def test_rewards_of_turns_are_added(client: Client) -> None:
    """As the trainer does: two for the rollout and one for its turn are three."""

    async def finish(rollout_id: str) -> None:
        given = [
            tokens_pb2.Reward(name="reward", value=2.0),
            tokens_pb2.Reward(name="reward", value=1.0, turn_id="t"),
        ]
        request = pb.RolloutFinish(
            run_id="run",
            rollout_id=rollout_id,
            credential_digest=CREDENTIAL,
            rewards=tokens_pb2.Rewards(rewards=given),
        )
        await send_async(client.trajectories, request)

    found = await evaluated(client, finish)
    assert found.rewards == {name: [3.0, 3.0] for name in "abc"}
