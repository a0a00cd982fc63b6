"""What a step trained on, recorded by its trainer and read by people, over real gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
from seamflow.trajectory.v1 import run_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import sample_service_pb2 as pb

from tests.lib.trajectory_manager.client import Client, reason_of


def trained(name: str, number: int = 2, reward: float = 1.0) -> trajectory_pb2.TrainedSample:
    """What was trained of a rollout."""
    return trajectory_pb2.TrainedSample(
        sample_id=f"{name}#t1",
        rollout_id=name,
        group_id="g",
        reward=reward,
        ratio_mean=1.0,
        num_tokens=10,
        num_trained_tokens=number,
        spans=[trajectory_pb2.TrainedSpan(start=3, num_tokens=number)],
        logprob_differences=b"\0\x3c" * number,
        advantages=b"\0\x38",
    )


async def record(
    client: Client,
    epoch: int,
    step: int,
    samples: Sequence[trajectory_pb2.TrainedSample],
    kept: int = 10,
) -> None:
    """Record samples of a step."""
    request = pb.RecordTrainedSamplesRequest(
        run_id=client.run_id, epoch=epoch, step=step, samples=samples, num_kept_steps=kept
    )
    await client.samples.RecordTrainedSamples(request)


async def listed(client: Client, step: int = 0, **asked: object) -> pb.ListTrainedSamplesResponse:
    """What is recorded of a step."""
    request = pb.ListTrainedSamplesRequest(run_id=client.run_id, step=step, **asked)  # type: ignore[arg-type]
    return await client.samples.ListTrainedSamples(request)


def names(found: pb.ListTrainedSamplesResponse) -> list[str]:
    """The rollouts of a page."""
    return [sample.rollout_id for sample in found.samples]


async def test_a_step_is_read_as_it_was_recorded(replicas: tuple[Client, Client]) -> None:
    """Through any replica; with values of tokens only where they are asked for."""
    client, other = replicas
    epoch = await client.reconcile()
    given = [trained(f"r{i}") for i in range(3)]
    await record(client, epoch, 1, given[:2])
    await record(client, epoch, 1, given[1:])
    found = await listed(other, with_tokens=True)
    assert list(found.samples) == given
    assert (found.step, list(found.recorded_steps), found.next_page_token) == (1, [1], "")
    summaries = (await listed(other, 1)).samples
    assert [each.reward for each in summaries] == [1.0] * 3
    assert not any(each.logprob_differences or each.spans for each in summaries)
    assert names(await listed(other, 1, rollout_ids=["r1", "x"])) == ["r1"]
    first = await listed(other, 1, page_size=2)
    second = await listed(other, 1, page_size=2, page_token=first.next_page_token)
    assert names(first) + names(second) == ["r0", "r1", "r2"]


async def test_the_newest_steps_are_kept(replicas: tuple[Client, Client]) -> None:
    """As many as the trainer asks for."""
    client = replicas[0]
    epoch = await client.reconcile()
    for step in range(1, 6):
        await record(client, epoch, step, [trained("r")], kept=3)
    assert list((await listed(client)).recorded_steps) == [3, 4, 5]
    assert names(await listed(client, 2)) == []


async def test_an_older_trainer_is_refused_and_what_it_recorded_later_forgotten(
    replicas: tuple[Client, Client],
) -> None:
    """After a crash a step is trained again: no record of the first attempt remains."""
    client = replicas[0]
    old = await client.reconcile("old")
    for step in (1, 2, 3):
        await record(client, old, step, [trained("a"), trained("b")])
    new = await client.reconcile("new")
    await record(client, new, 2, [trained("b", reward=0.5)])
    assert list((await listed(client)).recorded_steps) == [1, 2]
    again = await listed(client, 2)
    assert [(each.rollout_id, each.reward) for each in again.samples] == [("b", 0.5)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await record(client, old, 3, [trained("a")])
    assert reason_of(caught.value) == "STALE_EPOCH"


async def test_what_is_recorded_is_deleted_with_its_run(replicas: tuple[Client, Client]) -> None:
    """A run of the same name begins without it."""
    client = replicas[0]
    await record(client, await client.reconcile(), 1, [trained("r")])
    await client.runs.EndRun(run_service_pb2.EndRunRequest(run_id=client.run_id))
    await client.runs.DeleteRun(run_service_pb2.DeleteRunRequest(run_id=client.run_id))
    await client.create_run()
    assert list((await listed(client)).recorded_steps) == []
    assert names(await listed(client, 1)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_id", "r"),
        ("sample_id", "r#"),
        ("logprob_differences", b"\0\0"),
        ("advantages", b"\0\0" * 3),
        ("spans", [trajectory_pb2.TrainedSpan(num_tokens=1)]),
        ("num_trained_tokens", 11),
    ],
)
async def test_values_that_do_not_fit_are_refused(
    replicas: tuple[Client, Client], field: str, value: object
) -> None:
    """With the field and the cure."""
    client = replicas[0]
    sample = trained("r")
    sample.ClearField(field)  # type: ignore[arg-type]
    sample.MergeFrom(trajectory_pb2.TrainedSample(**{field: value}))  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError, match=rf"samples\[0\].{field}") as caught:
        await record(client, await client.reconcile(), 1, [sample])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
