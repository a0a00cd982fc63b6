"""A batch of emulated rollouts on a real store: each is recorded when its tokens would be there.

Lengths are those of bench/workloads/lengths.toml, divided by `THINNED`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from seamflow.common.v1.tokens_pb2 import FINISH_REASON_STOP
from seamflow.trajectory.v1.trajectory_service_pb2 import NewTurn, TokenAppend

from services.lib.token_bytes import pack_ids, pack_logprobs
from trajectory_manager.model.records import (
    Durability,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    StalenessPolicy,
    Task,
    TaskLease,
)
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import (
    Origin,
    RolloutFinish,
    Span,
    Tokens,
    VersionSource,
)
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import Store

RUN_ID = "scoring"
GROUPS, GROUP_SIZE = 16, 8
THINNED = 16
PROMPT_TOKENS = 64
TOKENS_PER_SECOND = 128.0
"""Of each rollout: the longest takes 10 s."""
VOCABULARY = 512
_TURN = "turn"
_CREDENTIAL = hashlib.sha256(b"bench").hexdigest()
_WORKLOAD = Path(__file__).parents[1] / "workloads" / "lengths.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """When the rollouts of a batch ended, in monotonic seconds."""

    begin: float
    """Begin of all."""
    ends: dict[str, float]
    """By sample, before its rollout was reported as finished."""


def lengths(seed: int) -> list[int]:
    """Tokens of the answers of a batch."""
    given = tomllib.loads(_WORKLOAD.read_text())["lengths"]
    dice = np.random.default_rng(seed)
    drawn = dice.lognormal(np.log(given["median"]), given["sd_log"], GROUPS * GROUP_SIZE)
    return [max(int(min(each, given["max"])) // THINNED, 1) for each in drawn]


async def create_run(store: Store, columns: Sequence[str], batches: int) -> None:
    """A run with room for all batches, of which nothing is leased."""
    config = RunConfig(
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS,
        max_staleness=batches,
        staleness_policy=StalenessPolicy.MASK,
        lease_seconds=120.0,
        zero_variance_reward="",
        durability=Durability.FAST,
        required_columns=tuple(columns),
    )
    await store.runs.create_run(RUN_ID, config)


async def generate(store: Store, seed: int) -> Batch:
    """Run a batch to its end; groups have a prompt each."""
    rollouts, dice = Rollouts(store), np.random.default_rng(seed)
    tasks = [
        Task(
            task_id=f"batch-{seed}-{number}",
            payload_json="{}",
            num_samples=GROUP_SIZE,
            purpose=Purpose.TRAIN,
        )
        for number in range(GROUPS)
    ]
    await store.runs.submit(RUN_ID, tasks, len(tasks))
    prompts = {task.task_id: _ids(dice, PROMPT_TOKENS) for task in tasks}
    leases = [await _lease(store) for _ in range(GROUPS * GROUP_SIZE)]
    answers = [_ids(dice, length) for length in lengths(seed)]
    begin, ends = time.monotonic(), dict[str, float]()

    async def play(lease: TaskLease, answer: list[int]) -> None:
        prompt = await _start(rollouts, lease, prompts[lease.task.task_id])
        await asyncio.sleep(begin + len(answer) / TOKENS_PER_SECOND - time.monotonic())
        await rollouts.append([_answer(prompt, answer)])
        ends[f"{lease.rollout_id}#{_TURN}"] = time.monotonic()
        outcome = Outcome(rewards=(Reward(name="reward", value=float(len(answer))),))
        finish = RolloutFinish(
            rollout_id=lease.rollout_id, credential_digest=_CREDENTIAL, outcome=outcome
        )
        assert await rollouts.finish(RUN_ID, [finish]) == [None]

    async with asyncio.TaskGroup() as group:
        for lease, answer in zip(leases, answers, strict=True):
            group.create_task(play(lease, answer))
    return Batch(begin=begin, ends=ends)


def _ids(dice: np.random.Generator, number: int) -> list[int]:
    found: list[int] = dice.integers(0, VOCABULARY, number).tolist()
    return found


async def _lease(store: Store) -> TaskLease:
    lease = await store.runs.lease_task(RUN_ID, (Purpose.TRAIN,), uuid.uuid4().hex)
    assert isinstance(lease, TaskLease), "admission has room for every batch"
    return lease


async def _start(rollouts: Rollouts, lease: TaskLease, prompt: list[int]) -> TokenAppend:
    rollout = Rollout(
        run_id=RUN_ID,
        rollout_id=lease.rollout_id,
        purpose=Purpose.TRAIN,
        credential_digest=_CREDENTIAL,
    )
    await rollouts.start(rollout, lease.nonce)
    new = NewTurn(
        run_id=RUN_ID,
        rollout_id=lease.rollout_id,
        turn_id=_TURN,
        attempt_id="a",
        token_ids=pack_ids(prompt),
        credential_digest=_CREDENTIAL,
    )
    begun = await rollouts.begin_turn(new)
    span = Span(num_tokens=len(prompt), origin=Origin.ENVIRONMENT)
    append = TokenAppend(
        run_id=RUN_ID, rollout_id=lease.rollout_id, turn_id=_TURN, epoch=begun.epoch
    )
    _tokens(prompt, span).fill(append.tokens)
    await rollouts.append([append])
    return append


def _answer(prompt: TokenAppend, answer: list[int]) -> TokenAppend:
    span = Span(
        num_tokens=len(answer),
        origin=Origin.POLICY,
        version_source=VersionSource.ENGINE,
        server_id="emulated",
    )
    append = TokenAppend(
        run_id=prompt.run_id,
        rollout_id=prompt.rollout_id,
        turn_id=prompt.turn_id,
        epoch=prompt.epoch,
        offset=len(prompt.tokens.token_ids) // 4,
        finish_reason=FINISH_REASON_STOP,
    )
    _tokens(answer, span).fill(append.tokens)
    return append


def _tokens(ids: list[int], span: Span) -> Tokens:
    return Tokens(ids=pack_ids(ids), logprobs=pack_logprobs([-1.0] * len(ids)), spans=(span,))
