"""Linear samples with a loss mask, built from finished rollouts.

A sample is one root-to-leaf path of the prefix tree. A policy token is trainable in exactly one
sample: the first whose path contains it. Masking by staleness happens here, against the base
version that the step ledger keeps, so that a repeated step yields identical samples. Policy tokens
of untrained turns are masked in every sample.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from seamflow.trajectory.v1 import trajectory_pb2

from trajectory_manager.model import sampling
from trajectory_manager.model.prefix_tree import Piece, PrefixTree, SamplePlan
from trajectory_manager.model.records import (
    FailureClass,
    Rollout,
    RolloutResult,
    RolloutState,
    StalenessPolicy,
)
from trajectory_manager.model.runs import RunConfig, StepLease
from trajectory_manager.model.tokens import (
    FINISHED_BY_LENGTH,
    RoutedExperts,
    Span,
    Tokens,
    Turn,
    VersionSource,
    cut_spans,
    joined,
)
from trajectory_manager.store.redis.token_store import TokenStore

_READ_BATCH = 8
_NOTHING_TO_TRAIN = "POLICY: no turn to train sampled a token of a known weight version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One linear token sequence to train on."""

    sample_id: str
    rollout: Rollout
    tokens: Tokens
    loss_mask: bytes
    """One byte per token: 1 where the loss counts."""
    min_weight_version: int
    """Oldest version among trainable tokens; the step's base version if there are none."""
    max_weight_version: int
    turns: tuple[trajectory_pb2.SampleTurn, ...]
    """From the root to the leaf; they cover the sample."""
    truncated: bool
    """Whether it ends with the last turn of a rollout that a limit cut off."""
    rollout_truncated: bool
    routed: tuple[RoutedExperts, ...] = ()


def sample_id(rollout_id: str, leaf_turn_id: str) -> str:
    """Name of the sample of `rollout_id` that ends in `leaf_turn_id`."""
    return f"{rollout_id}#{leaf_turn_id}"


def rollout_result(rollout: Rollout, turns: Sequence[Turn], reward_name: str) -> RolloutResult:
    """The result of a finished `rollout` for its group; without trainable tokens it failed."""
    outcome = rollout.outcome
    if rollout.state is not RolloutState.FINISHED:
        message = f"{outcome.failure_class.name}: {outcome.failure_message}"
        return RolloutResult(
            rollout_id=rollout.rollout_id,
            finished=False,
            failure_message=message,
            cancelled=outcome.failure_class is FailureClass.CANCELLED,
        )
    spans = _loss_spans(rollout, turns)
    plans = list(PrefixTree(turns).sample_plans(spans, outcome.untrained_turn_ids))
    versions = [
        span.weight_version for plan in plans for span, trained in _parts(plan, spans) if trained
    ]
    rewards = outcome.totals
    return RolloutResult(
        rollout_id=rollout.rollout_id,
        finished=bool(plans) or outcome.failure_class is FailureClass.POLICY,
        reward=rewards.get(reward_name),
        rewards=tuple(rewards.items()),
        min_weight_version=min(versions, default=0),
        sample_ids=tuple(sample_id(rollout.rollout_id, plan.leaf_turn_id) for plan in plans),
        failure_message="" if plans else _NOTHING_TO_TRAIN,
    )


async def build(
    tokens: TokenStore, run_id: str, config: RunConfig, lease: StepLease
) -> AsyncIterator[Sample]:
    """The samples of a leased step, in the ledger's order."""
    leased = set(lease.sample_ids)
    rollout_ids = list(dict.fromkeys(name.rpartition("#")[0] for name in lease.sample_ids))
    base = lease.base_weight_version
    masks = config.staleness_policy is StalenessPolicy.MASK
    oldest = base - config.max_staleness if masks else None
    for start in range(0, len(rollout_ids), _READ_BATCH):
        # In small batches, so that appends do not wait behind a whole step.
        for found in await tokens.read(run_id, rollout_ids[start : start + _READ_BATCH]):
            assert found is not None, "a leased sample has a rollout"
            for sample in of_rollout(*found, base, oldest):
                if sample.sample_id in leased:
                    yield sample


def of_rollout(
    rollout: Rollout, turns: Sequence[Turn], base: int = 0, oldest: int | None = None
) -> list[Sample]:
    """The samples of a rollout: strict prefix merge, each token trained in exactly one.

    Args:
        rollout: its header.
        turns: its turns in the order they began.
        base: version of a sample without trainable tokens.
        oldest: oldest version to train; None: all.
    """
    stored = {turn.turn_id: turn for turn in turns}
    spans, tree = _loss_spans(rollout, turns), PrefixTree(turns)
    cut_off = _cut_off_turn(rollout, turns)
    samples = []
    for plan in tree.sample_plans(spans, rollout.outcome.untrained_turn_ids):
        parts = list(_parts(plan, spans, oldest))
        versions = [span.weight_version for span, trained in parts if trained]
        samples.append(
            Sample(
                sample_id=sample_id(rollout.rollout_id, plan.leaf_turn_id),
                rollout=rollout,
                tokens=joined(
                    stored[piece.turn_id].tokens.cut(0, piece.stop) for piece in plan.pieces
                ),
                loss_mask=b"".join(
                    (b"\1" if trained else b"\0") * span.num_tokens for span, trained in parts
                ),
                min_weight_version=min(versions, default=base),
                max_weight_version=max(versions, default=base),
                turns=tuple(
                    _sample_turn(rollout, stored[piece.turn_id], piece, tree.is_whole(piece))
                    for piece in plan.pieces
                ),
                truncated=plan.leaf_turn_id == cut_off,
                rollout_truncated=cut_off is not None,
                routed=tuple(_routed(plan, stored)),
            )
        )
    return samples


def _routed(plan: SamplePlan, stored: Mapping[str, Turn]) -> Iterator[RoutedExperts]:
    first = 0
    for piece in plan.pieces:
        for record in stored[piece.turn_id].routed:
            if (placed := record.placed(first, piece.stop)) is not None:
                yield placed
        first += piece.stop


def _cut_off_turn(rollout: Rollout, turns: Sequence[Turn]) -> str | None:
    """The turn at which a limit cut the rollout off: its last one; None: it ended by itself."""
    if not turns:
        return None
    last = turns[-1]
    is_cut_off = rollout.outcome.truncated or last.finish_reason == FINISHED_BY_LENGTH
    return last.turn_id if is_cut_off else None


def _sample_turn(
    rollout: Rollout, turn: Turn, piece: Piece, is_whole: bool
) -> trajectory_pb2.SampleTurn:
    """The tokens that a turn added; without its end where the sample has only a part of it."""
    message = trajectory_pb2.SampleTurn(
        turn_id=turn.turn_id, num_tokens=piece.stop, sampling=sampling.message(turn.sampling)
    )
    if is_whole:
        message.finish_reason = turn.finish_reason  # type: ignore[assignment]
        message.rewards.extend(
            reward.message() for reward in rollout.outcome.rewards if reward.turn_id == turn.turn_id
        )
    return message


def _loss_spans(rollout: Rollout, turns: Sequence[Turn]) -> dict[str, tuple[Span, ...]]:
    """The spans of each turn as the loss counts them: those of untrained turns never."""
    untrained = rollout.outcome.untrained_turn_ids
    return {
        turn.turn_id: tuple(map(_untrained, turn.tokens.spans))
        if turn.turn_id in untrained
        else turn.tokens.spans
        for turn in turns
    }


def _untrained(span: Span) -> Span:
    return span._replace(version_source=VersionSource.UNKNOWN)


def _parts(
    plan: SamplePlan, spans: dict[str, tuple[Span, ...]], oldest: int | None = None
) -> Iterator[tuple[Span, bool]]:
    """The spans of a sample, cut where it begins to train them, and whether each is trained."""
    for piece, start in zip(plan.pieces, plan.trained_from, strict=True):
        of_turn = spans[piece.turn_id]
        for span in cut_spans(of_turn, 0, min(start, piece.stop)):
            yield span, False
        for span in cut_spans(of_turn, start, piece.stop):
            is_masked = oldest is not None and span.weight_version < oldest
            yield span, span.trainable and not is_masked
