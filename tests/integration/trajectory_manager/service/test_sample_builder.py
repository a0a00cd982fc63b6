"""What the trainer gets: masks by staleness, forks, and the same samples every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import Reason
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.support import (
    RULES,
    Run,
    policy,
    refused,
    rewarded,
    token_append,
    tokens,
)
from trajectory_manager.model.records import StalenessPolicy
from trajectory_manager.model.runs import StepLease
from trajectory_manager.model.tokens import RoutedExperts
from trajectory_manager.service import sample_builder

MASKING = replace(RULES, staleness_policy=StalenessPolicy.MASK)


async def rollout_of_two_versions(run: Run) -> None:
    """A turn whose answer was sampled at versions 1 and 3."""
    await run.start("r")
    epoch = (await run.begin("r", "t", [1])).epoch
    await run.append("r", "t", epoch, 0, tokens([1]))
    await run.append("r", "t", epoch, 1, tokens([2, 3], policy(1)))
    await run.append("r", "t", epoch, 3, tokens([4], policy(3)))
    await run.finish("r")


async def test_segments_beyond_the_bound_are_masked(run: Run) -> None:
    """Under MASK the loss skips what is too old for the ledger's base version, and only that."""
    await rollout_of_two_versions(run)
    for base, mask, oldest in ((2, [0, 1, 1, 1], 1), (3, [0, 0, 0, 1], 3), (9, [0, 0, 0, 0], 9)):
        lease = StepLease(step=1, base_weight_version=base, sample_ids=("r#t",))
        (sample,) = [
            each
            async for each in sample_builder.build(run.store.tokens, run.run_id, MASKING, lease)
        ]
        assert list(sample.loss_mask) == [bool(flag) for flag in mask]
        assert sample.min_weight_version == oldest
        assert list(unpack_ids(sample.tokens.ids)) == [1, 2, 3, 4]


async def test_other_policies_mask_nothing(run: Run) -> None:
    """Under DROP a leased sample is whole."""
    await rollout_of_two_versions(run)
    lease = StepLease(step=1, base_weight_version=9, sample_ids=("r#t",))
    (sample,) = [
        each async for each in sample_builder.build(run.store.tokens, run.run_id, RULES, lease)
    ]
    assert list(sample.loss_mask) == [False, True, True, True]


async def test_the_end_of_a_rollout_that_was_cut_off_is_marked(run: Run) -> None:
    """By the finish reason of its last turn, or by its agent; turns keep their finish reasons."""
    for rollout_id, last, truncated in (
        ("stop", 1, False),
        ("length", 2, False),
        ("told", 1, True),
    ):
        await run.start(rollout_id)
        await run.turn(rollout_id, "t1", [1], [2])
        epoch = (await run.begin(rollout_id, "t2", [1, 5])).epoch
        await run.append(rollout_id, "t2", epoch, 0, tokens([5]))
        await run.append(rollout_id, "t2", epoch, 1, tokens([6], policy()))
        await run.end(rollout_id, "t2", epoch, reason=last)
        await run.finish(rollout_id, replace(rewarded(), truncated=truncated))
        (found,) = await run.store.tokens.read(run.run_id, [rollout_id])
        assert found is not None
        branch, end = sample_builder.of_rollout(*found)
        assert [turn.finish_reason for turn in branch.turns] == [1]
        assert [turn.finish_reason for turn in end.turns] == [0, last], "a part of the first turn"
        assert not branch.truncated
        assert end.truncated == (rollout_id != "stop")
        assert branch.rollout_truncated == end.rollout_truncated == end.truncated


async def test_a_rollout_that_was_cut_off_in_a_turn_without_a_sample_is_marked(run: Run) -> None:
    """Its last turn is a fork that is not trained; the control ended by itself."""
    for reason in (1, 2):
        await run.start(rollout_id := f"r{reason}")
        await run.turn(rollout_id, "t1", [1], [2])
        epoch = (await run.begin(rollout_id, "t2", [1, 5])).epoch
        await run.append(rollout_id, "t2", epoch, 0, tokens([5]))
        await run.append(rollout_id, "t2", epoch, 1, tokens([6], policy()))
        await run.end(rollout_id, "t2", epoch, reason=reason)
        await run.finish(rollout_id, replace(rewarded(), untrained_turn_ids=("t2",)))
        (found,) = await run.store.tokens.read(run.run_id, [rollout_id])
        assert found is not None
        (sample,) = sample_builder.of_rollout(*found)
        assert sample.rollout_truncated == (reason == 2)
        assert not sample.truncated


async def test_a_fork_trains_the_shared_part_once(run: Run) -> None:
    """Two continuations of one turn are two samples; only the first trains what they share."""
    await run.start("r")
    await run.turn("r", "t1", [1], [2])
    await run.turn("r", "t2", [1, 2, 3], [4])
    await run.turn("r", "t3", [1, 2, 5], [6])
    await run.finish("r")
    (found,) = await run.store.tokens.read(run.run_id, ["r"])
    assert found is not None
    result = sample_builder.rollout_result(*found, "reward")
    assert result.sample_ids == ("r#t2", "r#t3")
    assert result.reward == rewarded().rewards[0].value
    assert result.rewards == (("reward", result.reward),)
    lease = StepLease(step=1, base_weight_version=0, sample_ids=result.sample_ids)
    built = [
        each async for each in sample_builder.build(run.store.tokens, run.run_id, RULES, lease)
    ]
    assert [list(unpack_ids(sample.tokens.ids)) for sample in built] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [list(sample.loss_mask) for sample in built] == [
        [False, True, False, True],
        [False, False, False, True],
    ]


def routed(start: int, *experts: int) -> RoutedExperts:
    """One layer, one choice."""
    return RoutedExperts(start, len(experts), 1, 1, bytes(experts))


def sent(start: int, *experts: int) -> tokens_pb2.RoutedExperts:
    """The same as a message."""
    return tokens_pb2.RoutedExperts(**routed(start, *experts)._asdict())


async def test_routed_experts_follow_their_tokens_into_the_samples(run: Run) -> None:
    """Placed by turn, cut at forks; of two that begin alike the longer is kept."""
    await run.start("r")
    epoch = (await run.begin("r", "t1", [1, 2])).epoch
    name, new = (run.run_id, "r", "t1"), tokens([1, 2])
    first = token_append(*name, epoch, 0, new, routed_experts=sent(1, 11))
    await run.do(first)
    await run.do(first)  # repeated
    epoch = (await run.begin("r", "t1", [1, 2], "b")).epoch
    late = token_append(*name, first.epoch, 0, new, routed_experts=sent(1, 90, 91, 92, 93))
    await refused(Reason.STALE_EPOCH, run.do(late))
    answer = tokens([3, 4, 5], policy(1))
    ended: dict[str, Any] = {"finish_reason": 1, "routed_experts": sent(1, 11, 12, 13, 14)}
    await run.do(token_append(*name, epoch, 2, answer, **ended))
    fork = (await run.begin("r", "t2", [1, 2, 3, 9])).epoch
    await run.do(token_append(run.run_id, "r", "t2", fork, 0, tokens([9])))
    answer = tokens([6], policy(1))
    ended = {"finish_reason": 1, "routed_experts": sent(0, 21, 22)}
    await run.do(token_append(run.run_id, "r", "t2", fork, 1, answer, **ended))
    await run.finish("r")
    (found,) = await run.store.tokens.read(run.run_id, ["r"])
    assert found is not None
    samples = {each.sample_id: each.routed for each in sample_builder.of_rollout(*found)}
    assert samples == {
        "r#t1": (routed(1, 11, 12, 13, 14),),
        "r#t2": (routed(1, 11, 12), routed(3, 21, 22)),
    }
