"""The steps of a rollout that take more than one atomic step of the store.

Finishing crosses from the rollout's tokens to its run: add an outbox mark -> finish the record ->
settle, which removes the mark. Each step is idempotent, so the next caller (the agent's retry, the
sweep, another replica) completes what a killed process began.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError, invalid_argument
from services.lib.bounds import MIN_TEMPERATURE
from trajectory_manager.model import sampling
from trajectory_manager.model.records import (
    Effect,
    FailureClass,
    Outcome,
    Purpose,
    Rollout,
    RolloutState,
    SlotName,
)
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import (
    BYTES_PER_TOKEN,
    Appended,
    RolloutFinish,
    Turn,
)
from trajectory_manager.service import metrics, sample_builder
from trajectory_manager.service.prefix_match import PrefixMatch, prompt_digest
from trajectory_manager.service.rollout_index import summary_of
from trajectory_manager.store import errors
from trajectory_manager.store.redis.connect import Store


def missing_reward(
    outcome: Outcome, reward_name: str, field: str = "rewards"
) -> ServiceError | None:
    """INVALID_ARGUMENT for a TRAIN rollout that counts without the reward it is trained on.

    Args:
        outcome: of the rollout.
        reward_name: the run's reward_name; empty: any reward will do.
        field: name of the `Rewards` in the request.
    """
    if outcome.state is not RolloutState.FINISHED:
        return None
    names = sorted({reward.name for reward in outcome.rewards})
    if not names:
        cure = "a TRAIN rollout finishes with at least one reward, or with a failure"
        return invalid_argument(f"{field}.rewards", names, cure)
    if reward_name and reward_name not in names:
        cure = f"one of them must be {reward_name!r}, the run's reward_name"
        return invalid_argument(f"{field}.rewards", names, cure)
    return None


def names_turns(outcome: Outcome) -> bool:
    """Whether the outcome is about single turns too."""
    return bool(outcome.untrained_turn_ids) or any(r.turn_id for r in outcome.rewards)


def unknown_turn(
    outcome: Outcome, turn_ids: Collection[str], field: str = "rewards"
) -> ServiceError | None:
    """INVALID_ARGUMENT for a reward or an untrained turn that is none of `turn_ids`."""
    cure = "a turn of the rollout that has begun"
    for index, reward in enumerate(outcome.rewards):
        if reward.turn_id and reward.turn_id not in turn_ids:
            name = f"{field}.rewards[{index}].turn_id"
            return invalid_argument(name, reward.turn_id, cure)
    for index, turn_id in enumerate(outcome.untrained_turn_ids):
        if turn_id not in turn_ids:
            return invalid_argument(f"untrained_turn_ids[{index}]", turn_id, cure)
    return None


EXPIRED = Outcome(
    failure_class=FailureClass.INFRASTRUCTURE,
    failure_message="its lease expired before it finished",
)
STOPPED = Outcome(
    failure_class=FailureClass.CANCELLED,
    failure_message="the run was stopped or had ended before it finished",
)
SURPLUS = Outcome(
    failure_class=FailureClass.CANCELLED, failure_message="its group needs no more samples"
)
UNFINISHED = Outcome(
    failure_class=FailureClass.TIMEOUT,
    failure_message="it has no lease and was not finished within a day",
)
_MANAGER_FAILURES = (FailureClass.INFRASTRUCTURE, FailureClass.CANCELLED)
_NOT_OWNED = (Reason.NOT_FOUND, Reason.PERMISSION_DENIED)
_SWEEP_BATCH = 256
# Small, so that appends do not wait long behind whole rollouts.
_RECORD_BATCH = 32
_MAX_WITHOUT_TURNS = 65_536


class Rollouts:
    def __init__(self, store: Store, *, keeps_rows: bool = True) -> None:
        """`keeps_rows`: whether finished rollouts get a row of the index."""
        self._store = store
        self._keeps_rows = keeps_rows
        self._began = time.monotonic()
        # Tokens stored since the run's last sweep; a killed process leaves them uncounted.
        self._new_tokens = Counter[str]()
        # Runs of which something was recorded since the last sweep of all.
        self._active: set[str] = set()
        # Rollouts that were started here and had no turn yet, oldest first: only a hint.
        self._without_turns: dict[tuple[str, str], None] = {}

    async def start(self, rollout: Rollout, nonce: str | None) -> str:
        """Start a rollout, under the lease of `nonce`; return its group.

        Raises:
            ServiceError: LEASE_EXPIRED, ROLLOUT_FINISHED, ALREADY_EXISTS, NOT_FOUND (run).
        """
        group_id = await self._start(rollout, nonce)
        if len(self._without_turns) >= _MAX_WITHOUT_TURNS:
            del self._without_turns[next(iter(self._without_turns))]
        self._without_turns[rollout.run_id, rollout.rollout_id] = None
        return group_id

    async def _start(self, rollout: Rollout, nonce: str | None) -> str:
        self._active.add(rollout.run_id)
        leased = await self._store.runs.register_rollout(rollout.run_id, rollout.rollout_id, nonce)
        if leased is None:
            await self._store.tokens.start_rollout(rollout, leased=False)
            return ""
        if leased.purpose is Purpose.TRAIN and rollout.pinned_weight_version is not None:
            cure = "absent: the leased task is for TRAIN, only EVAL is pinned"
            raise invalid_argument("pinned_weight_version", rollout.pinned_weight_version, cure)
        name = SlotName.parse(rollout.rollout_id)
        assert name is not None  # it was leased
        known = replace(
            rollout,
            group_id=name.task_id,
            purpose=leased.purpose,
            required_weight_version=leased.required_weight_version,
        )
        await self._store.tokens.start_rollout(known, leased=True)
        return name.task_id

    async def begin_turn(self, new: pb.NewTurn) -> pb.BegunTurn:
        """Match the prompt against the record and begin the turn.

        Raises:
            ServiceError: as `TokenStore.begin_turn`; NOT_FOUND for a parent that does not exist;
                INVALID_ARGUMENT for sampling parameters, also of a TRAIN rollout that samples
                greedily, or nearly.
        """
        tokens, name, digest = (
            self._store.tokens,
            (new.run_id, new.rollout_id),
            new.credential_digest,
        )
        turn = _turn_of(new)
        if (temperature := sampling.temperature(turn.sampling)) < MIN_TEMPERATURE:
            await self._check_not_trained(*name, temperature)
        if name in self._without_turns and not new.parent_turn_id:
            # There is nothing to match, and so nothing to read.
            del self._without_turns[name]
            first = await tokens.begin_first_turn(*name, digest, turn)
            if first is not None and not first[1].prefix_turn_id:
                return _begun(*first)
        matching = PrefixMatch(tokens, new)
        match = await matching.match()
        turn = replace(
            turn,
            prefix_turn_id=match.prefix_turn_id,
            prefix_length=match.prefix_length,
            num_matched_messages=match.num_messages,
            new_message_keys=turn.new_message_keys[match.num_messages :],
        )
        rollout, turn = await tokens.begin_turn(*name, digest, turn)
        return _begun(rollout, turn, await matching.prefix(turn), await matching.divergence(turn))

    async def _check_not_trained(self, run_id: str, rollout_id: str, temperature: float) -> None:
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        if rollout is not None and rollout.purpose is Purpose.TRAIN:
            raise errors.cold_training("sampling.temperature", temperature)

    async def append(self, appends: Sequence[pb.TokenAppend]) -> list[Appended | ServiceError]:
        """Record tokens; a result is an error where an append failed, as in `TokenStore.append`.

        A gap fails the rollout and replaces its sample.
        """
        answers = await self._store.tokens.append(appends)
        num_new = num_repeated = 0
        for append, answer in zip(appends, answers, strict=True):
            if isinstance(answer, Appended):
                num_new += answer.num_new
                given = len(append.tokens.token_ids) // BYTES_PER_TOKEN
                num_repeated += given - answer.num_new
                self._new_tokens[append.run_id] += answer.num_new
                self._active.add(append.run_id)
                continue
            metrics.FAILED_APPENDS.labels(str(answer.reason)).inc()
            if answer.reason is Reason.OFFSET_GAP:
                await self.settle(append.run_id, [append.rollout_id])
        metrics.APPENDED.inc(num_new)
        metrics.DUPLICATE.inc(num_repeated)
        return answers

    async def finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[ServiceError | None]:
        """Finish rollouts for their agents and hand them to their groups. Idempotent.

        A result is an error where a rollout did not finish: NOT_FOUND, PERMISSION_DENIED,
        INVALID_ARGUMENT (TRAIN without the rewards it needs, an unknown turn), ROLLOUT_FINISHED
        (failed by the manager), ALREADY_EXISTS (finished with another outcome).

        Raises:
            ServiceError: the store is away or full; NOT_FOUND (run).
        """
        config = await self._store.runs.config(run_id)
        answers = [await self._check(run_id, config, finish) for finish in finishes]
        sound = [i for i, error in enumerate(answers) if error is None]
        closed = await self._finish(run_id, [finishes[i] for i in sound])
        for index, result in zip(sound, closed, strict=True):
            answers[index] = _finish_error(finishes[index], result)
        return answers

    async def _check(
        self, run_id: str, config: RunConfig, finish: RolloutFinish
    ) -> ServiceError | None:
        """Why the outcome is refused; the usual one needs no read."""
        error = missing_reward(finish.outcome, config.reward_name)
        if error is None and not names_turns(finish.outcome):
            return None
        rollout = await self._store.tokens.rollout(run_id, finish.rollout_id)
        if rollout is None or rollout.credential_digest != finish.credential_digest:
            return None  # refused when it is finished
        if error is not None and rollout.purpose is Purpose.TRAIN:
            return error
        if not names_turns(finish.outcome):
            return None
        turns = await self._store.tokens.turns(run_id, finish.rollout_id)
        return unknown_turn(finish.outcome, {turn.turn_id for turn in turns})

    async def _finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[tuple[Rollout, list[Turn]] | ServiceError]:
        leased = {c.rollout_id for c in finishes if SlotName.parse(c.rollout_id) is not None}
        if leased:
            await self._store.runs.add_outbox_marks(run_id, sorted(leased))
        closed = await self._store.tokens.finish(run_id, finishes)
        # These were not finished by this call: remove their marks. (If another call relied on a
        # mark, the rollout is settled when its lease expires.)
        foreign = [
            finish.rollout_id
            for finish, result in zip(finishes, closed, strict=True)
            if isinstance(result, ServiceError) and result.reason in _NOT_OWNED
        ]
        if foreign:
            await self._store.runs.remove_outbox_marks(run_id, foreign)
        await self.settle_finished(
            run_id,
            [r for r in closed if not isinstance(r, ServiceError) and r[0].rollout_id in leased],
        )
        return closed

    async def fail(self, run_id: str, rollout_ids: Sequence[str], outcome: Outcome) -> None:
        """Fail leased rollouts that their agents left, if they still run, and settle them."""
        finishes = [
            RolloutFinish(rollout_id=name, credential_digest=None, outcome=outcome)
            for name in rollout_ids
        ]
        results = await self._store.tokens.finish(run_id, finishes)
        errors = [result for result in results if isinstance(result, ServiceError)]
        closed = [result for result in results if not isinstance(result, ServiceError)]
        await self.settle_finished(run_id, closed)
        if errors:
            raise errors[0]

    async def record(self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[Turn]]]) -> None:
        """Store finished rollouts of admitted groups and settle them, in order. Idempotent."""
        for start in range(0, len(recorded), _RECORD_BATCH):
            await self._record(run_id, recorded[start : start + _RECORD_BATCH])

    async def _record(
        self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[Turn]]]
    ) -> None:
        are_new = await self._store.tokens.record(run_id, recorded)
        num_new = sum(
            turn.tokens.num_tokens
            for (_, turns), is_new in zip(recorded, are_new, strict=True)
            for turn in turns
            if is_new
        )
        metrics.APPENDED.inc(num_new)
        self._new_tokens[run_id] += num_new
        await self.settle_finished(run_id, recorded)

    async def settle(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Apply those of the rollouts that have finished to their groups. Idempotent."""
        found = await self._store.tokens.read(run_id, rollout_ids, spans_only=True)
        ended = [pair for pair in found if pair and pair[0].state is not RolloutState.RUNNING]
        await self.settle_finished(run_id, ended)

    def take_active(self) -> set[str]:
        """Runs of which something was recorded since the last call."""
        active, self._active = self._active, set()
        return active

    async def settle_finished(
        self, run_id: str, closed: Sequence[tuple[Rollout, Sequence[Turn]]]
    ) -> None:
        """Apply finished rollouts to their groups. Idempotent."""
        if not closed:
            return
        self._active.add(run_id)
        config = await self._store.runs.config(run_id)
        facts = [
            replace(
                sample_builder.rollout_result(*pair, config.zero_variance_reward),
                summary=summary_of(*pair, config) if self._keeps_rows else None,
            )
            for pair in closed
        ]
        for settled in await self._store.runs.settle(run_id, facts):
            if settled.effect is not Effect.IGNORED:
                metrics.SETTLED.labels(settled.effect.value).inc()
            if settled.effect is Effect.DISCARDED:
                metrics.DISCARDED.labels(settled.reason).inc()

    async def _count_tokens(self, run_id: str) -> None:
        """Add the tokens appended since the last sweep to the run's count."""
        # Popped before the call: sweeps of a run may be concurrent.
        num_new = self._new_tokens.pop(run_id, 0)
        try:
            if num_new:
                await self._store.runs.add_stored_tokens(run_id, num_new)
        except BaseException:
            self._new_tokens[run_id] += num_new
            raise

    async def sweep(self, run_id: str) -> int:
        """Fail rollouts whose lease has ended, settle marked ones; return how many.

        A lease that nobody has extended since this process began was held by an agent that was
        stopped together with the process before.
        """
        await self._count_tokens(run_id)
        lost = await self._store.runs.expired(run_id, _SWEEP_BATCH)
        here = time.monotonic() - self._began
        ways: dict[str, list[str]] = {"surplus": [], "stopped": [], "expired": []}
        for lease in lost:
            stopped = lease.run_ended or lease.idle_seconds > here
            way = "surplus" if lease.surplus else "stopped" if stopped else "expired"
            ways[way].append(lease.rollout_id)
        for outcome, (way, names) in zip((SURPLUS, STOPPED, EXPIRED), ways.items(), strict=True):
            await self.fail(run_id, names, outcome)
            metrics.LEASES.labels(way).inc(len(names))
        unsettled = await self._store.runs.unsettled(run_id, _SWEEP_BATCH)
        await self.settle(run_id, unsettled)
        return len(lost) + len(unsettled)


def _turn_of(new: pb.NewTurn) -> Turn:
    """The turn as it begins where nothing is recorded."""
    keys = tuple(new.message_keys.keys)
    return Turn(
        turn_id=new.turn_id,
        attempt_id=new.attempt_id,
        prompt_digest=prompt_digest(new.token_ids, keys),
        parent_turn_id=new.parent_turn_id,
        new_message_keys=keys,
        num_prompt_tokens=len(new.token_ids) // BYTES_PER_TOKEN,
        template_fingerprint=new.template_fingerprint,
        sampling=sampling.stored("sampling", new.sampling),
    )


def _begun(
    rollout: Rollout, turn: Turn, prefix: bytes = b"", divergence: pb.Divergence | None = None
) -> pb.BegunTurn:
    begun = pb.BegunTurn(
        epoch=turn.epoch,
        prefix_turn_id=turn.prefix_turn_id,
        prefix_token_ids=prefix,
        num_matched_messages=turn.num_matched_messages,
        finish_reason=turn.finish_reason,  # type: ignore[arg-type]
        pinned_weight_version=rollout.pinned_weight_version,
        divergence=divergence,
        required_weight_version=rollout.required_weight_version,
        group_id=rollout.group_id,
    )
    turn.tokens.fill(begun.tokens)
    return begun


def _finish_error(
    finish: RolloutFinish, closed: tuple[Rollout, Sequence[Turn]] | ServiceError
) -> ServiceError | None:
    """Why a rollout did not finish as requested; None: it did."""
    if isinstance(closed, ServiceError):
        return closed
    outcome = closed[0].outcome
    if outcome == finish.outcome:
        return None
    if outcome.failure_class in _MANAGER_FAILURES or outcome == UNFINISHED:
        return errors.finished_rollout(finish.rollout_id, outcome.failure_message)
    return errors.store_error("OTHER_ROLLOUT", finish.rollout_id)
