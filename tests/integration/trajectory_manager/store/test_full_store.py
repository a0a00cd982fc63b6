"""Agents that wait for tasks while the store is full: over real gRPC, many at once."""

from __future__ import annotations

import asyncio
import uuid

from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.trajectory_pb2 import EMPTY_REASON_STORE_FULL

from tests.lib.trajectory_manager.client import RULES, Client
from trajectory_manager.store.redis.connect import Store


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


async def test_all_waiting_calls_learn_that_the_store_is_full(
    store: Store, replicas: tuple[Client, Client]
) -> None:
    """Also those so far behind in line that they attempt only once."""
    client = await full_run(store, replicas[0])
    answers = await asyncio.gather(*(client.ask(wait=1) for _ in range(30)))
    assert {answer.empty_reason for answer in answers} == {EMPTY_REASON_STORE_FULL}
    assert not any(answer.leases for answer in answers)
    await store.runs.add_stored_tokens(client.run_id, -100)
    assert (await client.lease(wait=1)).HasField("task")
