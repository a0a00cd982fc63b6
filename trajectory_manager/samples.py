"""From closed rollouts to what the trainer gets: linear samples with a loss mask.

A sample is one root-to-leaf path of the prefix tree. A policy token is trainable in exactly one
sample: the first leaf that runs through it. Masking by staleness happens here, against the base
version that the step ledger keeps, so that a repeated step yields identical samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trajectory_manager.prefix_tree import PrefixTree, SamplePlan
from trajectory_manager.records import (
    FailureClass,
    Rollout,
    RolloutState,
    RunConfig,
    Settlement,
    StalenessPolicy,
    StepLease,
)
from trajectory_manager.store import TokenStore
from trajectory_manager.token_records import Span, Tokens, Turn, cut_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One linear token sequence to train on."""

    sample_id: str
    """Rollout and leaf turn."""
    rollout: Rollout
    """Header of its rollout."""
    tokens: Tokens
    """The whole sequence."""
    loss_mask: tuple[bool, ...]
    """True where the loss counts."""
    min_weight_version: int
    """Oldest version among trainable tokens; the step's base version if there are none."""
    max_weight_version: int
    """Newest such version."""
    temperature: float
    """Sampling temperature of its leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A piece of a sample, cut where its tokens begin to be trained."""

    span: Span
    trained: bool


def sample_id(rollout_id: str, leaf_turn_id: str) -> str:
    """Name of the sample of `rollout_id` that ends in `leaf_turn_id`."""
    return f"{rollout_id}#{leaf_turn_id}"


async def settlement(tokens: TokenStore, rollout: Rollout, reward_name: str) -> Settlement:
    """What the group of a closed `rollout` must know; one without trainable tokens failed."""
    reward = next(
        (r.value for r in rollout.outcome.rewards if r.name == reward_name and not r.turn_id), None
    )
    if rollout.state is not RolloutState.FINISHED:
        return Settlement(rollout_id=rollout.rollout_id, finished=False)
    turns = await tokens.turns(rollout.run_id, rollout.rollout_id)
    names = [turn.turn_id for turn in turns]
    spans = dict(
        zip(names, await tokens.spans(rollout.run_id, rollout.rollout_id, names), strict=True)
    )
    plans = list(_tree(turns, list(spans.values())).sample_plans(spans))
    versions = [
        part.span.weight_version for plan in plans for part in _parts(plan, spans) if part.trained
    ]
    return Settlement(
        rollout_id=rollout.rollout_id,
        finished=bool(plans) or rollout.outcome.failure_class is FailureClass.POLICY,
        reward=reward,
        min_weight_version=min(versions, default=0),
        sample_ids=tuple(sample_id(rollout.rollout_id, plan.leaf_turn_id) for plan in plans),
    )


async def build(
    tokens: TokenStore, run_id: str, config: RunConfig, lease: StepLease
) -> list[Sample]:
    """The samples of a leased step, in the ledger's order."""
    rollout_ids = list(dict.fromkeys(name.rpartition("#")[0] for name in lease.sample_ids))
    oldest = (
        lease.base_weight_version - config.max_staleness
        if config.staleness_policy is StalenessPolicy.MASK
        else None
    )
    built = await asyncio.gather(
        *(
            _build_rollout(tokens, run_id, name, lease.base_weight_version, oldest)
            for name in rollout_ids
        )
    )
    by_id = {sample.sample_id: sample for samples in built for sample in samples}
    return [by_id[name] for name in lease.sample_ids]


async def _build_rollout(
    tokens: TokenStore, run_id: str, rollout_id: str, base: int, oldest: int | None
) -> list[Sample]:
    rollout = await tokens.rollout(run_id, rollout_id)
    assert rollout is not None, "a leased sample has a rollout"
    turns = await tokens.turns(run_id, rollout_id)
    names = [turn.turn_id for turn in turns]
    stored = dict(zip(names, await tokens.tokens(run_id, rollout_id, names), strict=True))
    spans = {name: added.spans for name, added in stored.items()}
    temperatures = {turn.turn_id: turn.opening.temperature for turn in turns}
    samples = []
    for plan in _tree(turns, list(spans.values())).sample_plans(spans):
        sequence = Tokens()
        for piece in plan.pieces:
            sequence = sequence.joined(stored[piece.turn_id].cut(0, piece.stop))
        parts = [_masked(part, oldest) for part in _parts(plan, spans)]
        versions = [part.span.weight_version for part in parts if part.trained]
        samples.append(
            Sample(
                sample_id=sample_id(rollout_id, plan.leaf_turn_id),
                rollout=rollout,
                tokens=sequence,
                loss_mask=tuple(
                    part.trained for part in parts for _ in range(part.span.num_tokens)
                ),
                min_weight_version=min(versions, default=base),
                max_weight_version=max(versions, default=base),
                temperature=temperatures[plan.leaf_turn_id],
            )
        )
    return samples


def _tree(turns: Sequence[Turn], spans: Sequence[Sequence[Span]]) -> PrefixTree:
    return PrefixTree(turns, [sum(span.num_tokens for span in of_turn) for of_turn in spans])


def _parts(plan: SamplePlan, spans: dict[str, tuple[Span, ...]]) -> Iterator[_Trained]:
    for piece, start in zip(plan.pieces, plan.trained_from, strict=True):
        of_turn = spans[piece.turn_id]
        for span in cut_spans(of_turn, 0, min(start, piece.stop)):
            yield _Trained(span=span, trained=False)
        for span in cut_spans(of_turn, start, piece.stop):
            yield _Trained(span=span, trained=span.trainable)


def _masked(part: _Trained, oldest: int | None) -> _Trained:
    if oldest is None or part.span.weight_version >= oldest:
        return part
    return _Trained(span=part.span, trained=False)
