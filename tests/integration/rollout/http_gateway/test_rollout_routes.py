"""Agents with HTTP alone: lease, extend, finish, and groups of their own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from openai import AsyncOpenAI

from tests.lib.rollout.http_gateway.support import World, world

ASK: Any = [{"role": "user", "content": "say"}]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A system with a rollout."""
    async with world(tmp_path) as found:
        yield found


async def work(gateway: World, rollout: dict[str, Any]) -> None:
    """One turn, then its reward."""
    gateway.say("hello")
    async with AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["credential"]) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK)
    turn_id = (reply.model_extra or {})["seamflow"]["turn_id"]
    body = {"rewards": {"reward": 1.0}, "turn_rewards": {turn_id: {"format": 0.5}}}
    assert await act(gateway, rollout, "finish", body) == (200, {})


async def act(gateway: World, rollout: dict[str, Any], what: str, body: Any = None) -> Any:
    """A POST that the rollout's credential opens; its status and answer."""
    path = rollout["anthropic_base_url"].removeprefix(gateway.url)
    key = {"x-api-key": rollout["credential"]}
    return await gateway.post(f"{path}/{what}", {} if body is None else body, headers=key)


async def test_leased_tasks_are_trained(gateway: World) -> None:
    """Both rollouts of a task, whose names have slashes; then its group is ready."""
    await gateway.submit("task")
    _, answer = await gateway.post("/rollouts/lease", {"max_rollouts": 8})
    assert [r["rollout_id"] for r in answer["rollouts"]] == ["task/0/1", "task/1/1"]
    assert answer["empty_reason"] is None
    for rollout in answer["rollouts"]:
        assert rollout["task"] == {"task_id": "task", "payload": {"x": 1}, "train": True}
        assert rollout["lease_seconds"] == 60.0
        assert await act(gateway, rollout, "extend") == (200, {"lease_seconds": 60.0})
        await work(gateway, rollout)
    assert (await gateway.store.runs.run_counts("run")).num_ready_groups == 1


async def test_a_group_of_own_tasks_is_trained(gateway: World) -> None:
    """Two members make the group complete."""
    for _ in range(2):
        rollout = await gateway.start(group={"group_id": "mine", "size": 2})
        assert rollout["task"] is None
        await work(gateway, rollout)
    assert (await gateway.store.runs.run_counts("run")).num_ready_groups == 1


async def test_an_empty_lease_says_why(gateway: World) -> None:
    """A body is not needed."""
    status, answer = await gateway.post("/rollouts/lease", {"wait_seconds": 0})
    assert (status, answer) == (200, {"rollouts": [], "empty_reason": "nothing_queued"})


async def test_a_failed_rollout_is_replaced(gateway: World) -> None:
    """It gets another attempt and no reward."""
    await gateway.submit("task")
    _, answer = await gateway.post("/rollouts/lease", {"max_rollouts": 1})
    failure = {"failure": {"class": "environment", "message": "the sandbox is gone"}}
    assert (await act(gateway, answer["rollouts"][0], "finish", failure))[0] == 200
    _, again = await gateway.post("/rollouts/lease", {"max_rollouts": 8})
    assert sorted(r["rollout_id"] for r in again["rollouts"]) == ["task/0/2", "task/1/1"]


async def test_wrong_outcomes_are_named(gateway: World) -> None:
    """By their field."""
    rollout = gateway.rollout
    both = {"rewards": 1, "failure": {"class": "timeout"}}
    status, answer = await act(gateway, rollout, "finish", both)
    assert (status, answer["error"]["param"]) == (400, "failure")
    status, answer = await act(gateway, rollout, "finish", {"failure": {"class": "policy"}})
    assert (status, answer["error"]["param"]) == (400, "failure.class")
    status, answer = await act(gateway, rollout, "finish", {"rewards": {"reward": "1"}})
    assert (status, answer["error"]["param"]) == (400, "rewards.reward")


async def test_a_lost_lease_is_a_conflict(gateway: World) -> None:
    """Here of an evaluation, which never had one; wrong credentials have none either."""
    status, answer = await act(gateway, gateway.rollout, "extend")
    assert (status, answer["error"]["code"]) == (409, "lease_expired")


@pytest.mark.parametrize(("idle", "status"), [(60.0, 200), (0.0, 409)], ids=["kept", "not kept"])
async def test_leases_are_kept_between_calls(tmp_path: Path, idle: float, status: int) -> None:
    """An agent that leases and works for itself loses nothing within the idle time."""
    lease = Duration(nanos=600_000_000)
    async with world(tmp_path, lease=lease, idle_lease_seconds=idle) as gateway:
        await gateway.submit("task")
        _, answer = await gateway.post("/rollouts/lease", {"max_rollouts": 1})
        await asyncio.sleep(2.5 * 0.6)
        assert (await act(gateway, answer["rollouts"][0], "extend"))[0] == status


@pytest.mark.parametrize("shown", [{}, {"authorization": "Bearer wrong"}])
async def test_a_deployment_with_tokens(tmp_path: Path, shown: dict[str, str]) -> None:
    """Leases need the agents' token, never lent by the gateway; calls need the credential."""
    token = {"token": "inner", "agent_token": "agents"}
    async with world(tmp_path, tokens=token) as gateway:
        right = {"authorization": "Bearer agents"}
        status, answer = await gateway.post("/rollouts/lease", {"wait_seconds": 0}, headers=right)
        assert (status, answer["empty_reason"]) == (200, "nothing_queued")
        status, answer = await gateway.post("/rollouts/lease", {"wait_seconds": 0}, headers=shown)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        gateway.say("hello")
        async with gateway.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=ASK)
        assert reply.choices[0].message.content == "hello"
        path = gateway.rollout["base_url"].removeprefix(gateway.url)
        body = {"messages": ASK}
        status, _ = await gateway.post(f"{path}/chat/completions", body, headers=shown)
        assert status == 401
