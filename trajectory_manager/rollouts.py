"""The steps of a rollout that take more than one atomic step of the store.

Closing crosses from the rollout's tokens to its run: announce (outbox mark) -> close -> settle,
which clears the mark. Each step is idempotent, so whoever comes next (the agent's retry,
CompleteTask, the sweeper, another replica) finishes what a killed process began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.chassis.errors import Reason, ServiceError
from trajectory_manager import refusals, samples
from trajectory_manager.matching import Divergence, Matching, Prompt
from trajectory_manager.metrics import Metrics
from trajectory_manager.records import (
    Effect,
    FailureClass,
    Outcome,
    Purpose,
    Rollout,
    RolloutState,
    SlotName,
)
from trajectory_manager.store import Store
from trajectory_manager.token_records import (
    Append,
    Appended,
    Opening,
    Tokens,
    Turn,
    TurnRecord,
)

EXPIRED = Outcome(
    failure_class=FailureClass.INFRASTRUCTURE,
    failure_message="its lease expired before it finished",
)
ABANDONED = Outcome(
    failure_class=FailureClass.INFRASTRUCTURE, failure_message="its agent completed the lease first"
)
SURPLUS = Outcome(
    failure_class=FailureClass.CANCELLED, failure_message="its group needs no more samples"
)
_GIVEN_UP = (FailureClass.INFRASTRUCTURE, FailureClass.CANCELLED)
_SWEEP_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTurn:
    """An opened turn with what is before it and what it already has."""

    turn: Turn
    """Its record."""
    prefix_ids: bytes
    """int32 ids of the shared prefix."""
    tokens: Tokens
    """What earlier attempts recorded."""
    rollout: Rollout
    """Header of its rollout."""
    divergence: Divergence | None
    """Where its prompt leaves what was sampled before."""


class Rollouts:
    """Opens, continues and closes rollouts on a store."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        # Tokens stored since the run's last sweep; a killed process takes these few uncounted.
        self._new_tokens = Counter[str]()

    async def start(self, rollout: Rollout, nonce: str | None) -> str:
        """Open a rollout, under the lease that `nonce` proves; return its group.

        Raises:
            ServiceError: LEASE_EXPIRED, ROLLOUT_FINISHED, ALREADY_EXISTS, NOT_FOUND (run).
        """
        purpose = await self._store.runs.enlist(rollout.run_id, rollout.rollout_id, nonce)
        if purpose is Purpose.TRAIN and rollout.pinned_weight_version is not None:
            raise refusals.pinned_training(rollout.pinned_weight_version)
        name = SlotName.parse(rollout.rollout_id)
        group_id = name.task_id if purpose is not None and name is not None else ""
        await self._store.tokens.create_rollout(
            replace(rollout, group_id=group_id, purpose=purpose or rollout.purpose),
            leased=purpose is not None,
        )
        return group_id

    async def begin_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, opening: Opening, prompt: Prompt
    ) -> OpenedTurn:
        """Match the prompt against what is stored and open the turn.

        Raises:
            ServiceError: as `TokenStore.open_turn`; NOT_FOUND for a parent that does not exist.
        """
        tokens = self._store.tokens
        matching = Matching(store=tokens, run_id=run_id, rollout_id=rollout_id, prompt=prompt)
        match = await matching.match(opening)
        opening = replace(
            opening,
            prompt_digest=prompt.digest,
            parent_turn_id=match.parent_turn_id,
            prefix_length=match.prefix_length,
            num_matched_messages=match.num_messages,
            new_message_keys=prompt.message_keys[match.num_messages :],
            num_prompt_tokens=len(prompt.token_ids),
        )
        turn = await tokens.open_turn(run_id, rollout_id, credential_digest, opening)
        rollout = await tokens.rollout(run_id, rollout_id)
        if rollout is None:  # the store lost it, or a retention deleted it, in between
            raise refusals.refusal("UNKNOWN_ROLLOUT", rollout_id)
        (own,) = await tokens.tokens(run_id, rollout_id, [turn.turn_id])
        return OpenedTurn(
            turn=turn,
            prefix_ids=await matching.prefix(turn),
            tokens=own,
            rollout=rollout,
            divergence=await matching.divergence(turn),
        )

    async def append(self, appends: Sequence[Append]) -> list[Appended | ServiceError]:
        """Record tokens; what was refused stands as its error, as in `TokenStore.append`.

        A gap fails the rollout and replaces its sample.
        """
        answers = await self._store.tokens.append(appends)
        num_new = num_repeated = 0
        for append, answer in zip(appends, answers, strict=True):
            if isinstance(answer, Appended):
                num_new += answer.num_new
                num_repeated += append.tokens.num_tokens - answer.num_new
                self._new_tokens[append.run_id] += answer.num_new
                continue
            self._metrics.append_refused(answer.reason)
            if answer.reason is Reason.OFFSET_GAP:
                await self.settle(append.run_id, append.rollout_id)
        self._metrics.appended(num_new, num_repeated)
        return answers

    async def finish(
        self, run_id: str, rollout_id: str, credential_digest: str, outcome: Outcome
    ) -> None:
        """Close a rollout and hand it to its group. Idempotent.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT (TRAIN without rewards),
                ROLLOUT_FINISHED (given up before), ALREADY_EXISTS (finished otherwise).
        """
        if outcome == Outcome():
            await self._check_needs_no_rewards(run_id, rollout_id)
        closed = await self._close(run_id, rollout_id, credential_digest, outcome)
        if closed.outcome == outcome:
            return
        if closed.outcome.failure_class in _GIVEN_UP:
            raise refusals.closed_rollout(rollout_id, closed.outcome.failure_message)
        raise refusals.refusal("OTHER_ROLLOUT", rollout_id)

    async def _check_needs_no_rewards(self, run_id: str, rollout_id: str) -> None:
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        if rollout is None:
            raise refusals.refusal("UNKNOWN_ROLLOUT", rollout_id)
        if rollout.purpose is Purpose.TRAIN:
            raise refusals.no_rewards()

    async def _close(
        self, run_id: str, rollout_id: str, credential_digest: str, outcome: Outcome
    ) -> Rollout:
        is_leased = SlotName.parse(rollout_id) is not None
        if is_leased:
            await self._store.runs.announce(run_id, rollout_id)
        try:
            closed = await self._store.tokens.close(run_id, rollout_id, credential_digest, outcome)
        except ServiceError as error:
            # Not the caller's to close: its mark would stay. (A mark that another call relies on is
            # not missed for long: the lease of its rollout runs out.)
            if is_leased and error.reason in (Reason.NOT_FOUND, Reason.PERMISSION_DENIED):
                await self._store.runs.retract(run_id, rollout_id)
            raise
        if is_leased:
            await self.settle_closed(*closed)
        return closed[0]

    async def give_up(self, run_id: str, rollout_id: str, outcome: Outcome) -> None:
        """Close a leased rollout that its agent left, if it still runs, and settle it."""
        await self.settle_closed(*await self._store.tokens.close(run_id, rollout_id, None, outcome))

    async def complete(self, run_id: str, rollout_id: str, nonce: str) -> None:
        """Take the agent's lease back; an unfinished rollout fails and is replaced. Idempotent."""
        held = await self._store.runs.extend_tasks(run_id, [(rollout_id, nonce)])
        if held[0]:
            await self.give_up(run_id, rollout_id, ABANDONED)

    async def record(self, rollout: Rollout, turns: Sequence[TurnRecord]) -> None:
        """Store a closed rollout of an admitted group; `settle_closed` comes next. Idempotent."""
        new = await self._store.tokens.record(rollout, turns)
        if new:
            num_tokens = sum(record.tokens.num_tokens for record in turns)
            self._metrics.appended(num_tokens, 0)
            self._new_tokens[rollout.run_id] += num_tokens

    async def settle(self, run_id: str, rollout_id: str) -> None:
        """Tell the group of a rollout how it ended, if it has ended. Idempotent."""
        (found,) = await self._store.tokens.read(run_id, [rollout_id], spans_only=True)
        if found is None or found[0].state is RolloutState.RUNNING:
            return
        await self.settle_closed(*found)

    async def settle_closed(self, rollout: Rollout, turns: Sequence[TurnRecord]) -> None:
        """Tell the group of a closed rollout how it ended. Idempotent."""
        config = await self._store.runs.config(rollout.run_id)
        facts = samples.settlement(rollout, turns, config.zero_variance_reward)
        settled = await self._store.runs.settle(rollout.run_id, facts)
        if settled.effect is not Effect.IGNORED:
            self._metrics.settled(settled)

    async def sweep(self, run_id: str) -> int:
        """Give up rollouts whose lease is over, settle what is closed; return how many."""
        if num_new := self._new_tokens[run_id]:
            await self._store.runs.add_stored_tokens(run_id, num_new)
            self._new_tokens[run_id] -= num_new
        expired = await self._store.runs.expired(run_id, _SWEEP_BATCH)
        for lost in expired:
            await self.give_up(run_id, lost.rollout_id, SURPLUS if lost.surplus else EXPIRED)
            self._metrics.leases("surplus" if lost.surplus else "expired")
        unsettled = await self._store.runs.unsettled(run_id, _SWEEP_BATCH)
        for rollout_id in unsettled:
            await self.settle(run_id, rollout_id)
        return len(expired) + len(unsettled)
