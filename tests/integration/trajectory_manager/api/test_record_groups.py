"""Whole groups that were generated elsewhere: recorded, settled and leased like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.client import rewards
from tests.lib.trajectory_manager.support import RULES, Run
from trajectory_manager.api.record_groups import RecordGroupsHandler
from trajectory_manager.cli import store_budget
from trajectory_manager.service import sample_builder


def tokens(ids: list[int], version: int = 3) -> tokens_pb2.Tokens:
    """An environment token, then sampled ones."""
    return tokens_pb2.Tokens(
        token_ids=ids,
        logprobs=[0.0] + [-0.5] * (len(ids) - 1),
        spans=[
            tokens_pb2.Span(start=0, num_tokens=1, origin=tokens_pb2.ORIGIN_ENVIRONMENT),
            tokens_pb2.Span(
                start=1,
                num_tokens=len(ids) - 1,
                origin=tokens_pb2.ORIGIN_POLICY,
                weight_version=version,
                version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
            ),
        ],
    )


def turn(name: str, ids: list[int], after: str = "", prefix: int = 0) -> trajectory_pb2.Turn:
    """A turn that ended with STOP."""
    return trajectory_pb2.Turn(
        turn_id=name,
        prefix_turn_id=after,
        prefix_length=prefix,
        tokens=tokens(ids),
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
        sampling=tokens_pb2.SamplingParams(temperature=0.5),
    )


def group(task_id: str, num_rollouts: int = 2) -> pb.RecordedGroup:
    """A group of rollouts of two turns each."""
    rollouts = [
        pb.RecordedRollout(
            turns=[turn("a", [1, 2, 3]), turn("b", [4, 5], after="a", prefix=3)],
            rewards=rewards(float(i)),
        )
        for i in range(num_rollouts)
    ]
    return pb.RecordedGroup(task_id=task_id, payload_json="{}", rollouts=rollouts)


def request(run: Run, *groups: pb.RecordedGroup) -> pb.RecordGroupsRequest:
    """Record `groups` in the run."""
    return pb.RecordGroupsRequest(run_id=run.run_id, groups=groups)


def recorder(run: Run) -> RecordGroupsHandler:
    """On the store of the run."""
    return RecordGroupsHandler(run.store, run.rollouts, store_budget(1 << 20), 1000)


async def test_recorded_groups_are_leased_as_they_were_sent(run: Run) -> None:
    """One sample per rollout, its two turns merged, the recorded versions and rewards kept."""
    answer = await recorder(run).record(request(run, group("a"), group("b")))
    assert (answer.num_recorded, answer.num_free) == (2, 0)
    epoch = (await run.store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    lease = (await run.store.ledger.lease_samples(run.run_id, epoch, 1, 3, 2)).lease
    assert lease is not None
    assert lease.sample_ids == ("a/0/1#b", "a/1/1#b", "b/0/1#b", "b/1/1#b")
    built = [
        each async for each in sample_builder.build(run.store.tokens, run.run_id, RULES, lease)
    ]
    assert list(unpack_ids(built[0].tokens.ids)) == [1, 2, 3, 4, 5]
    assert built[0].loss_mask == bytes([0, 1, 1, 0, 1])
    assert built[0].min_weight_version == 3
    assert [turn.sampling.temperature for turn in built[0].turns] == [0.5] * 2
    assert [sample.rollout.outcome.rewards[0].value for sample in built] == [0.0, 1.0, 0.0, 1.0]


async def test_a_repeated_request_records_nothing_twice(run: Run) -> None:
    """Also when the first try died between admission and settling."""
    await run.store.runs.admit_recorded(run.run_id, [])
    first = recorder(run)
    await first.record(request(run, group("a")))
    again = await recorder(run).record(request(run, group("a")))
    assert again.num_recorded == 0
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_admitted_groups) == (1, 1)
    with pytest.raises(ServiceError) as caught:
        await recorder(run).record(request(run, group("a", num_rollouts=1)))
    assert caught.value.reason is Reason.ALREADY_EXISTS


async def test_admission_holds_recorded_groups_back(run: Run) -> None:
    """All or none, with a time to try again; a leased step lets more in."""
    groups = [group(name) for name in "abc"]
    with pytest.raises(ServiceError) as caught:
        await recorder(run).record(request(run, *groups))
    assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    assert caught.value.retry_after
    assert (await run.store.runs.run_counts(run.run_id)).num_admitted_groups == 0
    await recorder(run).record(request(run, *groups[:2]))
    epoch = (await run.store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    await run.store.ledger.lease_samples(run.run_id, epoch, 1, 3, 0)
    assert (await recorder(run).record(request(run, groups[2]))).num_recorded == 1


async def test_a_full_run_takes_no_more_groups(run: Run) -> None:
    """The cap on stored tokens holds for recorded groups too."""
    run_id = f"{run.run_id}-capped"
    await run.store.runs.create_run(run_id, replace(RULES, max_stored_tokens=5))
    capped = Run(run.store, run_id)
    await recorder(capped).record(request(capped, group("a")))
    await run.store.runs.add_stored_tokens(run_id, 10)
    with pytest.raises(ServiceError) as caught:
        await recorder(capped).record(request(capped, group("b")))
    assert caught.value.reason is Reason.STORE_FULL
    assert (await recorder(capped).record(request(capped, group("a")))).num_recorded == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rewards": tokens_pb2.Rewards()}, "rollouts[0].rewards.rewards"),
        (
            {
                "rewards": tokens_pb2.Rewards(
                    rewards=[tokens_pb2.Reward(name="reward", value=1.0, turn_id="z")]
                )
            },
            "rollouts[0].rewards.rewards[0].turn_id",
        ),
        ({"turns": [turn("b", [4, 5], after="a", prefix=3)]}, "prefix_length"),
        ({"turns": [turn("a", [1, 2]), turn("a", [1, 2])]}, "turn_id"),
        ({"turns": [turn("a", list(range(1, 1500)))]}, "tokens"),
    ],
)
async def test_untrainable_groups_are_rejected(
    run: Run, change: dict[str, object], field: str
) -> None:
    """The error names the field; nothing is admitted."""
    one = group("a", num_rollouts=1)
    for name in change:
        one.rollouts[0].ClearField(name)  # type: ignore[arg-type]
    one.rollouts[0].MergeFrom(pb.RecordedRollout(**change))  # type: ignore[arg-type]
    with pytest.raises(ServiceError) as caught:
        await recorder(run).record(request(run, one))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert field in caught.value.message
    assert (await run.store.runs.run_counts(run.run_id)).num_admitted_groups == 0


async def test_a_group_without_variance_is_filtered_when_it_is_recorded_too(run: Run) -> None:
    """The rules of the run also hold for recorded groups."""
    run_id = f"{run.run_id}-filtered"
    await run.store.runs.create_run(run_id, replace(RULES, zero_variance_reward="reward"))
    other = Run(run.store, run_id)
    same = group("a")
    for rollout in same.rollouts:
        rollout.rewards.rewards[0].value = 1.0
    await recorder(other).record(request(other, same))
    counts = await run.store.runs.run_counts(run_id)
    assert (counts.num_ready_groups, counts.num_discarded_groups) == (0, 1)
