"""Agents that wait for tasks while the store is full: over real gRPC, many at once."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import Any

import grpc.aio
import pytest
from seamflow.trajectory.v1 import trajectory_pb2

from tests.trajectory_manager.client import RULES, Client, reason_of
from trajectory_manager.store.interface import Store


async def full_run(store: Store, replica: Client) -> Client:
    """A run with a task, which stores more tokens than it may."""
    client = Client(replica.channel, uuid.uuid4().hex)
    rules = trajectory_pb2.RunConfig()
    rules.CopyFrom(RULES)
    rules.max_stored_tokens = 1
    await client.create_run(rules)
    await client.submit("a")
    await store.runs.add_stored_tokens(client.run_id, 100)
    return client


async def test_all_waiting_calls_get_store_full(
    store: Store, replicas: tuple[Client, Client]
) -> None:
    """Also those so far behind in line that they never ask."""
    client = await full_run(store, replicas[0])
    waiting = [client.lease(wait=1) for _ in range(30)]
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, grpc.aio.AioRpcError)
        assert reason_of(error) == "STORE_FULL"
    await store.runs.add_stored_tokens(client.run_id, -100)
    assert (await client.lease(wait=1)).HasField("task")


async def test_the_store_is_full_until_another_answer_came(
    store: Store, replicas: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued call that times out gets the last result of those at the head."""
    client = await full_run(store, replicas[0])
    ask, asked_again, answer = store.runs.lease_task, asyncio.Event(), asyncio.Event()
    calls = itertools.count()

    async def quick_once(*arguments: Any) -> Any:
        if next(calls) >= len(first):
            asked_again.set()
            await answer.wait()
        return await ask(*arguments)

    monkeypatch.setattr(store.runs, "lease_task", quick_once)
    first = [asyncio.ensure_future(client.lease(wait=2)) for _ in range(8)]
    await asked_again.wait()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.lease(wait=1)
    assert reason_of(caught.value) == "STORE_FULL"
    answer.set()
    await asyncio.gather(*first, return_exceptions=True)
