"""Helpers of the store's tests: what agents and gateways do."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import pack_ids, pack_logprobs
from trajectory_manager.model import sampling as stored_sampling
from trajectory_manager.model.records import (
    Durability,
    EmptyReason,
    FailureClass,
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
    NO_TOKENS,
    Appended,
    Origin,
    RolloutFinish,
    Span,
    Tokens,
    VersionSource,
)
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import Store

CREDENTIAL = hashlib.sha256(b"credential").hexdigest()
RULES = RunConfig(
    group_size=2,
    groups_per_step=1,
    max_staleness=1,
    staleness_policy=StalenessPolicy.DROP,
    lease_seconds=60.0,
    zero_variance_reward="",
    durability=Durability.FAST,
)
ENV = Span(num_tokens=1, origin=Origin.ENVIRONMENT)


def rollout_finish(
    rollout_id: str, outcome: Outcome | None = None, credential: str | None = CREDENTIAL
) -> RolloutFinish:
    """What ends a rollout."""
    return RolloutFinish(
        rollout_id=rollout_id, credential_digest=credential, outcome=outcome or rewarded()
    )


def policy(version: int = 0, source: VersionSource = VersionSource.ENGINE) -> Span:
    """A span of sampled tokens."""
    return Span(
        num_tokens=1,
        origin=Origin.POLICY,
        weight_version=version,
        version_source=source,
        server_id="server-1",
    )


def tokens(ids: Sequence[int], span: Span = ENV) -> Tokens:
    """`ids` as one span, with log-probs that follow from the ids."""
    return Tokens(
        ids=pack_ids(ids),
        logprobs=pack_logprobs([-token / 8 for token in ids]),
        spans=(span._replace(num_tokens=len(ids)),),
    )


def rewarded(value: float = 1.0) -> Outcome:
    """An outcome with one reward."""
    return Outcome(rewards=(Reward(name="reward", value=value),))


def failed(failure_class: FailureClass = FailureClass.ENVIRONMENT) -> Outcome:
    """An outcome without a reward."""
    return Outcome(failure_class=failure_class, failure_message="it broke")


@dataclass(slots=True)
class Run:
    """A run on a store, and what agents do in it."""

    store: Store
    run_id: str
    nonces: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def rollouts(self) -> Rollouts:
        """The flows on this store."""
        return Rollouts(self.store)

    async def submit(
        self, *task_ids: str, num_samples: int = 2, purpose: Purpose = Purpose.TRAIN
    ) -> None:
        """Queue tasks."""
        tasks = [
            Task(task_id=name, payload_json="{}", num_samples=num_samples, purpose=purpose)
            for name in task_ids
        ]
        await self.store.runs.submit(self.run_id, tasks, 1000)

    async def lease(self) -> TaskLease | None:
        """Lease a task of any purpose; None if there is none."""
        answer = await self.ask()
        return answer if isinstance(answer, TaskLease) else None

    async def ask(self, nonce: str = "") -> TaskLease | EmptyReason:
        """Lease a task of any purpose."""
        purposes = (Purpose.EVAL, Purpose.TRAIN)
        nonce = nonce or f"nonce-{next(self.nonces)}"
        return await self.store.runs.lease_task(self.run_id, purposes, nonce)

    async def start(self, rollout_id: str, nonce: str | None = None) -> None:
        """Open a rollout."""
        purpose = Purpose.EVAL if nonce is None else Purpose.TRAIN
        rollout = Rollout(
            run_id=self.run_id,
            rollout_id=rollout_id,
            purpose=purpose,
            credential_digest=CREDENTIAL,
        )
        await self.rollouts.start(rollout, nonce)

    async def begin(
        self,
        rollout_id: str,
        turn_id: str,
        prompt: Sequence[int] | Sequence[str],
        attempt_id: str = "a",
        parent: str = "",
        fingerprint: str = "",
        sampling: str = "{}",
    ) -> pb.BegunTurn:
        """Open a turn with a prompt of ids or of message keys."""
        new = pb.NewTurn(
            run_id=self.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            attempt_id=attempt_id,
            parent_turn_id=parent,
            template_fingerprint=fingerprint,
            sampling=stored_sampling.message(sampling),
            credential_digest=CREDENTIAL,
        )
        if ids := [part for part in prompt if isinstance(part, int)]:
            new.token_ids = pack_ids(ids)
        else:
            new.message_keys.keys.extend(str(part) for part in prompt)
        return await self.rollouts.begin_turn(new)

    async def append(
        self, rollout_id: str, turn_id: str, epoch: int, offset: int, added: Tokens
    ) -> int:
        """Append tokens; return how many the turn has."""
        append = token_append(self.run_id, rollout_id, turn_id, epoch, offset, added)
        return (await self.do(append)).num_tokens

    async def do(self, append: pb.TokenAppend) -> Appended:
        """One append; raises its error."""
        (answer,) = await self.rollouts.append([append])
        if isinstance(answer, ServiceError):
            raise answer
        return answer

    async def end(
        self, rollout_id: str, turn_id: str, epoch: int, answer_key: str = "", reason: int = 1
    ) -> None:
        """Close a turn, by default with STOP."""
        await self.do(
            token_append(
                self.run_id,
                rollout_id,
                turn_id,
                epoch,
                0,
                finish_reason=reason,
                message_key=answer_key,
            )
        )

    async def turn(
        self,
        rollout_id: str,
        turn_id: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        span: Span | None = None,
    ) -> pb.BegunTurn:
        """A whole turn: the new part of the prompt, then the answer."""
        opened = await self.begin(rollout_id, turn_id, prompt)
        new = list(prompt[len(opened.prefix_token_ids) // 4 :])
        if new:
            await self.append(rollout_id, turn_id, opened.epoch, 0, tokens(new))
        added = tokens(answer, span or policy())
        await self.append(rollout_id, turn_id, opened.epoch, len(new), added)
        await self.end(rollout_id, turn_id, opened.epoch)
        return opened

    async def finish(
        self, rollout_id: str, outcome: Outcome | None = None, credential: str = CREDENTIAL
    ) -> None:
        """Close a rollout and settle it."""
        ending = rollout_finish(rollout_id, outcome, credential)
        (refused,) = await self.rollouts.finish(self.run_id, [ending])
        if refused is not None:
            raise refused

    async def close(
        self, rollout_id: str, outcome: Outcome | None = None, credential: str = CREDENTIAL
    ) -> None:
        """Close a rollout and go no further."""
        ending = rollout_finish(rollout_id, outcome, credential)
        (answer,) = await self.store.tokens.finish(self.run_id, [ending])
        if isinstance(answer, ServiceError):
            raise answer

    async def play(
        self, version: int = 0, outcome: Outcome | None = None, span: Span | None = None
    ) -> TaskLease | None:
        """One whole rollout: lease, start, a turn, finish; None if admission is closed."""
        lease = await self.lease()
        if lease is not None:
            await self.start(lease.rollout_id, lease.nonce)
            await self.turn(lease.rollout_id, "t1", [1, 2, 3], [4, 5], span or policy(version))
            await self.finish(lease.rollout_id, outcome)
        return lease

    async def fill(self, version: int = 0) -> int:
        """Play until nothing is leased any more; return how many rollouts that were."""
        played = 0
        while await self.play(version):
            played += 1
        return played


def token_append(
    run_id: str,
    rollout_id: str,
    turn_id: str,
    epoch: int,
    offset: int,
    added: Tokens = NO_TOKENS,
    **fields: Any,
) -> pb.TokenAppend:
    """Tokens for a turn; `fields` are those that end it, and routed experts."""
    append = pb.TokenAppend(
        run_id=run_id, rollout_id=rollout_id, turn_id=turn_id, epoch=epoch, offset=offset, **fields
    )
    added.fill(append.tokens)
    return append


async def refused(reason: Reason, awaitable: object) -> ServiceError:
    """The ServiceError that awaiting raises, which must have this reason."""
    with pytest.raises(ServiceError) as caught:
        await awaitable  # type: ignore[misc]
    assert caught.value.reason is reason
    return caught.value


async def other_run(store: Store, **changes: object) -> Run:
    """A run with other rules."""
    run_id = uuid.uuid4().hex
    await store.runs.create_run(run_id, replace(RULES, **changes))  # type: ignore[arg-type]
    return Run(store, run_id)
