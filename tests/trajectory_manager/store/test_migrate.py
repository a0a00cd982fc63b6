"""What release 0.1 stored is read and continued by this one."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.trajectory_manager.support import CREDENTIAL, RULES, Run, policy, tokens
from trajectory_manager.model.records import Durability
from trajectory_manager.model.token_bytes import pack_ids, pack_logprobs, unpack_ids
from trajectory_manager.store.interface import Store
from trajectory_manager.store.redis.connect import redis_store

OPENING = {
    "turn_id": "t",
    "attempt_id": "a",
    "prompt_digest": "d" * 64,
    "parent_turn_id": "",
    "prefix_length": 0,
    "num_matched_messages": 0,
    "message_keys": ["k1", "k2"],
    "template_fingerprint": "f",
    "temperature": 0.7,
}


async def store_as_0_1(redis: Redis, run_id: str, *, ended: bool) -> None:
    """A rollout "r" with one turn of 5 tokens, written as release 0.1 wrote it."""
    key = f"sf:{{{run_id}:r}}:"
    info = await redis.info("server")
    identity = json.dumps([2, "", None])
    header = {"identity": identity, "credential": CREDENTIAL, "traceparent": "", "state": 1}
    header |= {"created": "1.5", "incarnation": "17", "server": info["run_id"]}
    await redis.hset(f"{key}header", mapping=header)
    await redis.rpush(f"{key}order", "t")
    await redis.hset(f"{key}turns", "t", json.dumps(OPENING))
    await redis.hset(f"{key}writers", "t", f"17:2:{info['run_id']}:a")
    if ended:
        await redis.hset(f"{key}ends", "t", "1 answer")
    await redis.set(f"{key}ids:t", pack_ids([1, 2, 3, 4, 5]))
    await redis.set(f"{key}logprobs:t", pack_logprobs([0.0, 0.0, -0.1, -0.2, -0.3]))
    await redis.rpush(f"{key}spans:t", "2 1 0 0 ", "1 2 4 1 server-1", "2 2 5 1 server-1")


@pytest.fixture
async def opened(redis_url: str) -> AsyncIterator[tuple[Store, Redis, Run]]:
    """A Redis store, its server, and a run."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        redis = Redis.from_url(redis_url)
        run_id = uuid.uuid4().hex
        await store.runs.create_run(run_id, RULES)
        yield store, redis, Run(store, run_id)
        await redis.aclose()


async def test_an_old_record_reads_as_it_was(opened: tuple[Store, Redis, Run]) -> None:
    """Tokens, spans, the end and the message keys; its old keys are gone."""
    store, redis, run = opened
    await store_as_0_1(redis, run.run_id, ended=True)
    ((rollout, turns),) = await store.tokens.read(run.run_id, ["r"])  # type: ignore[misc]
    assert rollout.create_time == 1.5
    (record,) = turns
    assert list(unpack_ids(record.tokens.ids)) == [1, 2, 3, 4, 5]
    assert [(s.num_tokens, s.weight_version) for s in record.tokens.spans] == [
        (2, 0),
        (1, 4),
        (2, 5),
    ]
    assert (record.turn.finish_reason, record.turn.answer_key) == (1, "answer")
    assert record.turn.opening.temperature == 0.7
    left = {key.decode().rpartition(":")[0] for key in await redis.keys(f"sf:{{{run.run_id}:r}}:*")}
    assert not any(part in name for name in left for part in ("writers", "ids", "logprobs"))


async def test_an_old_turn_goes_on_where_it_was(opened: tuple[Store, Redis, Run]) -> None:
    """Its writer keeps its epoch, and the offset is that of the old tokens."""
    store, redis, run = opened
    await store_as_0_1(redis, run.run_id, ended=False)
    epoch = 17 << 32 | 2
    assert await run.append("r", "t", epoch, 5, tokens([6], policy(5))) == 6
    (stored,) = await store.tokens.tokens(run.run_id, "r", ["t"])
    assert list(unpack_ids(stored.ids)) == [1, 2, 3, 4, 5, 6]
    await run.end("r", "t", epoch)
    assert (await store.tokens.turns(run.run_id, "r"))[0].finish_reason == 1
