"""The steps of a rollout that take more than one atomic step of the store.

Closing crosses from the rollout's tokens to its run: announce (outbox mark) -> close -> settle,
which clears the mark. Each step is idempotent, so whoever comes next (the agent's retry,
CompleteTask, the sweeper, another replica) finishes what a killed process began.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.chassis.errors import Reason, ServiceError
from trajectory_manager import refusals, samples
from trajectory_manager.metrics import Metrics
from trajectory_manager.packing import pack_ids
from trajectory_manager.prefix_tree import Match, PrefixTree
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
from trajectory_manager.token_records import Opening, Tokens, Turn

EXPIRED = Outcome(
    failure_class=FailureClass.INFRASTRUCTURE,
    failure_message="its lease expired before it finished",
)
ABANDONED = Outcome(
    failure_class=FailureClass.INFRASTRUCTURE, failure_message="its agent completed the lease first"
)
_SWEEP_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a turn continues, as the gateway gives it."""

    token_ids: Sequence[int] = ()
    """Whole prompt as ids."""
    message_keys: tuple[str, ...] = ()
    """Or the digest of each message."""

    @property
    def digest(self) -> str:
        """Equal for equal prompts."""
        keys = "\0".join(self.message_keys).encode()
        return hashlib.sha256(pack_ids(self.token_ids) + b"|" + keys).hexdigest()


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


class Rollouts:
    """Opens, continues and closes rollouts on a store."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

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
        turns = await tokens.turns(run_id, rollout_id)
        opening = replace(opening, prompt_digest=prompt.digest, message_keys=prompt.message_keys)
        if not any(turn.turn_id == opening.turn_id for turn in turns):
            match = await self._match(run_id, rollout_id, turns, opening, prompt)
            opening = replace(
                opening,
                parent_turn_id=match.parent_turn_id,
                prefix_length=match.prefix_length,
                num_matched_messages=match.num_messages,
            )
        turn = await tokens.open_turn(run_id, rollout_id, credential_digest, opening)
        return await self._opened(run_id, rollout_id, [*turns, turn], turn)

    async def _match(
        self,
        run_id: str,
        rollout_id: str,
        turns: Sequence[Turn],
        opening: Opening,
        prompt: Prompt,
    ) -> Match:
        names = [turn.turn_id for turn in turns]
        parent, fingerprint = opening.parent_turn_id, opening.template_fingerprint
        if parent and parent not in names:
            raise refusals.refusal("UNKNOWN_TURN", parent)
        if prompt.message_keys:
            spans = await self._store.tokens.spans(run_id, rollout_id, names)
            lengths = [sum(span.num_tokens for span in of_turn) for of_turn in spans]
            tree = PrefixTree(turns, lengths)
            return tree.match_messages(prompt.message_keys, fingerprint, parent)
        stored = await self._store.tokens.tokens(run_id, rollout_id, names)
        ids = {name: added.ids for name, added in zip(names, stored, strict=True)}
        tree = PrefixTree(turns, [added.num_tokens for added in stored])
        return tree.match_token_ids(pack_ids(prompt.token_ids), ids, fingerprint, parent)

    async def _opened(
        self, run_id: str, rollout_id: str, turns: Sequence[Turn], turn: Turn
    ) -> OpenedTurn:
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        assert rollout is not None, "an opened turn has a rollout"
        by_id = {known.turn_id: known for known in turns}
        path = list(_ancestors(by_id, turn))
        stored = await self._store.tokens.tokens(run_id, rollout_id, path)
        prefix = b""
        # From the root: each turn keeps what it shares with its parent and adds its own.
        for name, added in zip(reversed(path[1:]), reversed(stored[1:]), strict=True):
            prefix = Tokens(ids=prefix).cut(0, by_id[name].opening.prefix_length).ids + added.ids
        prefix = Tokens(ids=prefix).cut(0, turn.opening.prefix_length).ids
        return OpenedTurn(turn=turn, prefix_ids=prefix, tokens=stored[0], rollout=rollout)

    async def append(
        self, run_id: str, rollout_id: str, turn_id: str, epoch: int, offset: int, tokens: Tokens
    ) -> int:
        """Record tokens; return how many the turn now has.

        A gap fails the rollout and replaces its sample.

        Raises:
            ServiceError: as `TokenStore.append`.
        """
        try:
            stored, new = await self._store.tokens.append(
                run_id, rollout_id, turn_id, epoch, offset, tokens
            )
        except ServiceError as error:
            self._metrics.append_refused(error.reason)
            if error.reason is Reason.OFFSET_GAP:
                await self.settle(run_id, rollout_id)
            raise
        self._metrics.appended(new, tokens.num_tokens - new)
        return stored

    async def finish(
        self, run_id: str, rollout_id: str, credential_digest: str, outcome: Outcome
    ) -> None:
        """Close a rollout and hand it to its group. Idempotent.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT (TRAIN without rewards),
                ROLLOUT_FINISHED (given up before), ALREADY_EXISTS (finished otherwise).
        """
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        if rollout is None:
            raise refusals.refusal("UNKNOWN_ROLLOUT", rollout_id)
        if rollout.credential_digest != credential_digest:
            raise refusals.refusal("BAD_CREDENTIAL", rollout_id)
        if rollout.purpose is Purpose.TRAIN and outcome == Outcome():
            raise refusals.no_rewards()
        closed = await self._close(rollout, credential_digest, outcome)
        if closed.outcome == outcome:
            return
        if closed.outcome.failure_class is FailureClass.INFRASTRUCTURE:
            raise refusals.closed_rollout(rollout_id, closed.outcome.failure_message)
        raise refusals.refusal("OTHER_ROLLOUT", rollout_id)

    async def _close(
        self, rollout: Rollout, credential_digest: str | None, outcome: Outcome
    ) -> Rollout:
        run_id, rollout_id = rollout.run_id, rollout.rollout_id
        if not rollout.group_id:
            return await self._store.tokens.close(run_id, rollout_id, credential_digest, outcome)
        await self._store.runs.announce(run_id, rollout_id)
        closed = await self._store.tokens.close(run_id, rollout_id, credential_digest, outcome)
        await self.settle(run_id, rollout_id)
        return closed

    async def give_up(self, run_id: str, rollout_id: str, outcome: Outcome) -> None:
        """Close a leased rollout that its agent left, if it still runs, and settle it."""
        await self._store.tokens.close(run_id, rollout_id, None, outcome)
        await self.settle(run_id, rollout_id)

    async def complete(self, run_id: str, rollout_id: str, nonce: str) -> None:
        """Take the agent's lease back; an unfinished rollout fails and is replaced. Idempotent."""
        held = await self._store.runs.extend_tasks(run_id, [(rollout_id, nonce)])
        if held[0]:
            await self.give_up(run_id, rollout_id, ABANDONED)

    async def settle(self, run_id: str, rollout_id: str) -> None:
        """Tell the group of a rollout how it ended, if it has ended. Idempotent."""
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        if rollout is None or rollout.state is RolloutState.RUNNING:
            return
        config = await self._store.runs.config(run_id)
        facts = await samples.settlement(self._store.tokens, rollout, config.zero_variance_reward)
        settled = await self._store.runs.settle(run_id, facts)
        if settled.effect is not Effect.IGNORED:
            self._metrics.settled(settled)

    async def sweep(self, run_id: str) -> int:
        """Give up rollouts whose lease ran out, settle what is closed; return how many."""
        expired = await self._store.runs.expired(run_id, _SWEEP_BATCH)
        for rollout_id in expired:
            await self.give_up(run_id, rollout_id, EXPIRED)
        self._metrics.leases("expired", len(expired))
        unsettled = await self._store.runs.unsettled(run_id, _SWEEP_BATCH)
        for rollout_id in unsettled:
            await self.settle(run_id, rollout_id)
        return len(expired) + len(unsettled)


def _ancestors(turns: dict[str, Turn], turn: Turn) -> list[str]:
    """The turn, its parent, and so on to the root."""
    path = [turn.turn_id]
    while turn.opening.parent_turn_id:
        turn = turns[turn.opening.parent_turn_id]
        path.append(turn.turn_id)
    return path
