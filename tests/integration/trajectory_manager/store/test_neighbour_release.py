"""Records that the release after this one wrote: fields that are not known are ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.lib.trajectory_manager.support import RULES, Run, other_run, rewarded
from trajectory_manager.model.records import Durability, Purpose, Reward, Task
from trajectory_manager.model.tokens import Turn
from trajectory_manager.store.redis import codec, keys, record_json
from trajectory_manager.store.redis.connect import redis_store


def newer(text: bytes) -> str:
    """The JSON object with a field that this release does not know."""
    return json.dumps({**json.loads(text), "field_of_2027": {"a": [1]}})


async def test_newer_records_are_read(redis_url: str) -> None:
    """Config, task, header, turn and outcome."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await other_run(store)
        await run.submit("a")
        lease = await run.play(outcome=rewarded(0.5))
        assert lease is not None
        redis: Any = Redis.from_url(redis_url)
        config, _, tasks, *_ = keys.run_keys(run.run_id)
        await redis.set(config, newer(await redis.get(config)))
        await redis.hset(tasks, "a", newer(await redis.hget(tasks, "a")))
        header = keys.rollout_keys(run.run_id, lease.rollout_id)[0]
        stored = await redis.hgetall(header)
        number, digest, begin = stored[b"turn:t1"].split(b" ", 2)
        turn = b" ".join([number, digest, newer(begin).encode()])
        identity = json.dumps([*json.loads(stored[b"identity"]), "more"])
        fields = {
            "turn:t1": turn,
            "outcome": newer(stored[b"outcome"]),
            "identity": identity,
            "field_of_2027": "x",
        }
        await redis.hset(header, mapping=fields)
        await redis.aclose()
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        assert await store.runs.config(run.run_id) == RULES
        (found,) = await store.tokens.read(run.run_id, [lease.rollout_id])
        assert found is not None
        assert found[0].outcome == rewarded(0.5)
        assert [record.turn_id for record in found[1]] == ["t1"]
        again = await Run(store, run.run_id).lease()
        assert again is not None
        assert again.task.num_samples == 2


def test_records_of_the_release_before_have_defaults() -> None:
    """What it did not write yet is at its default, and what is unused is not written."""
    begin = Turn(turn_id="t", attempt_id="a", prompt_digest="d")
    text = codec.begin_text(begin)
    assert json.loads(text) == {"attempt_id": "a"}
    old = codec.turn("t", b'1 d {"attempt_id": "a"}', b"0 1 1 a -")
    assert old == replace(begin, epoch=1 << 32 | 1)
    task = Task(task_id="a", payload_json="{}", num_samples=1, purpose=Purpose.TRAIN)
    assert "labels" not in record_json.encode(task)
    assert "own" not in record_json.encode(task)


def test_without_the_filter_a_newer_record_is_an_error() -> None:
    """Negative control."""
    text = newer(record_json.encode(Reward(name="r", value=1.0)).encode())
    assert record_json.decode(Reward, text) == Reward(name="r", value=1.0)
    with pytest.raises(TypeError):
        Reward(**json.loads(text))
