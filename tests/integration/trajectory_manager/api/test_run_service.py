"""RunService over real gRPC: two replicas on one store."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.trajectory.v1 import run_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.trajectory_manager.client import RULES, Client, reason_of

RULES_WITH_ALL = trajectory_pb2.RunConfig(
    group_size=3,
    groups_per_step=2,
    max_staleness=4,
    staleness_policy=trajectory_pb2.STALENESS_POLICY_WAIT,
    lease_duration=Duration(seconds=20, nanos=500_000_000),
    zero_variance_reward="reward",
    durability=trajectory_pb2.DURABILITY_FAST,
    num_extra_samples=1,
    fifo_window=4,
    max_publish_wait=Duration(seconds=30),
    required_columns=["value"],
    replay=trajectory_pb2.ReplayConfig(
        strategy=trajectory_pb2.REPLAY_STRATEGY_REWARD,
        capacity_groups=8,
        groups_per_step=1,
        reward_name="reward",
        temperature=0.5,
    ),
    max_deliveries=3,
    max_stored_tokens=1_000_000,
    retention_steps=5,
    reward_name="reward",
    labels={"team": "agents", "a": ""},
)


async def get(client: Client) -> trajectory_pb2.Run:
    """The run of a client."""
    return (await client.runs.GetRun(pb.GetRunRequest(run_id=client.run_id))).run


async def test_a_run_is_returned_as_it_was_created(replicas: tuple[Client, Client]) -> None:
    """Every rule, by any replica."""
    assert {field.name for field, _ in RULES_WITH_ALL.ListFields()} == set(
        trajectory_pb2.RunConfig.DESCRIPTOR.fields_by_name
    )
    first, second = (Client(client.channel, "all-rules") for client in replicas)
    first.run_id = second.run_id = uuid.uuid4().hex
    assert await first.create_run(RULES_WITH_ALL)
    assert not await second.create_run(RULES_WITH_ALL)
    run = await get(second)
    assert run.config == RULES_WITH_ALL
    assert run.state == trajectory_pb2.RUN_STATE_RUNNING
    assert run.create_time.seconds > 0
    assert not run.HasField("end_time")


async def test_runs_are_listed_in_pages(replicas: tuple[Client, Client]) -> None:
    """By name, each once; a page is never larger than its bound."""
    prefix = uuid.uuid4().hex
    wanted = [f"{prefix}-{number}" for number in range(5)]
    for name in reversed(wanted):
        await Client(replicas[0].channel, name).create_run()
    found, token = list[str](), ""
    while True:
        request = pb.ListRunsRequest(page_size=2, page_token=token)
        page = await replicas[1].runs.ListRuns(request)
        assert len(page.runs) <= 2
        found += [run.run_id for run in page.runs]
        if not (token := page.next_page_token):
            break
    assert [name for name in found if name.startswith(prefix)] == wanted
    assert len(set(found)) == len(found)
    large = await replicas[1].runs.ListRuns(pb.ListRunsRequest(page_size=10**6))
    assert len(large.runs) <= 1000
    with pytest.raises(grpc.aio.AioRpcError, match="page_size"):
        await replicas[1].runs.ListRuns(pb.ListRunsRequest(page_size=-1))


async def test_agents_learn_that_a_run_has_ended(replicas: tuple[Client, Client]) -> None:
    """Those that wait too; a trainer that reconciles starts it again."""
    first, second = replicas
    waiting = asyncio.create_task(first.ask(wait=30))
    await asyncio.sleep(0.2)
    for client in replicas:
        await client.runs.EndRun(pb.EndRunRequest(run_id=client.run_id))
    ended = trajectory_pb2.EMPTY_REASON_RUN_ENDED
    assert (await waiting).empty_reason == ended
    await second.submit("a")
    assert (await second.ask(wait=30)).empty_reason == ended
    run = await get(first)
    assert run.state == trajectory_pb2.RUN_STATE_ENDED
    assert run.end_time.seconds >= run.create_time.seconds
    await second.reconcile()
    assert (await get(first)).state == trajectory_pb2.RUN_STATE_RUNNING
    assert len((await first.ask(wait=30)).leases) == 1


async def test_only_an_ended_run_is_deleted(replicas: tuple[Client, Client]) -> None:
    """With its rollouts; then its name is free for other rules."""
    first, second = replicas
    await first.submit("a")
    name = await first.play()
    request = pb.DeleteRunRequest(run_id=first.run_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.runs.DeleteRun(request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(caught.value) == "WRONG_STATE"
    await first.runs.EndRun(pb.EndRunRequest(run_id=first.run_id))
    assert (await second.runs.DeleteRun(request)).num_rollouts == 1
    for call in (get(first), first.get(name)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    rules = trajectory_pb2.RunConfig()
    rules.CopyFrom(RULES)
    rules.group_size = 7
    assert await first.create_run(rules)
    assert (await get(second)).config.group_size == 7


async def test_creating_a_run_again_needs_the_same_rules(
    replicas: tuple[Client, Client],
) -> None:
    """Other rules are rejected with the fields that differ."""
    first, second = replicas
    assert not await second.create_run()
    other = trajectory_pb2.RunConfig()
    other.CopyFrom(RULES)
    other.group_size = 5
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.create_run(other)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "group_size (is 2, given 5)" in (caught.value.details() or "")
    assert "max_staleness" not in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("max_publish_wait", Duration(seconds=5), "INVALID_ARGUMENT"),
        ("max_publish_wait", Duration(seconds=-5), "INVALID_ARGUMENT"),
        ("num_extra_samples", -1, "INVALID_ARGUMENT"),
        ("fifo_window", -1, "INVALID_ARGUMENT"),
        ("max_deliveries", -1, "INVALID_ARGUMENT"),
        ("max_stored_tokens", -1, "INVALID_ARGUMENT"),
        ("retention_steps", -1, "INVALID_ARGUMENT"),
        ("staleness_policy", trajectory_pb2.STALENESS_POLICY_UNSPECIFIED, "INVALID_ARGUMENT"),
        ("durability", trajectory_pb2.DURABILITY_DURABLE, "FAILED_PRECONDITION"),
        ("durability", trajectory_pb2.DURABILITY_REPLICATED, "FAILED_PRECONDITION"),
        ("group_size", 0, "INVALID_ARGUMENT"),
        ("groups_per_step", 0, "INVALID_ARGUMENT"),
        ("max_staleness", -1, "INVALID_ARGUMENT"),
        ("lease_duration", Duration(), "INVALID_ARGUMENT"),
        ("lease_duration", Duration(seconds=86_401), "INVALID_ARGUMENT"),
        ("labels", {"": "x"}, "INVALID_ARGUMENT"),
        ("labels", {"x": "y" * 257}, "INVALID_ARGUMENT"),
        ("labels", {str(n): "" for n in range(33)}, "INVALID_ARGUMENT"),
    ],
)
async def test_rules_that_cannot_be_kept_are_rejected(
    replicas: tuple[Client, Client], field: str, value: Any, code: str
) -> None:
    """At creation, with the field's name."""
    rules = trajectory_pb2.RunConfig()
    rules.CopyFrom(RULES)
    rules.ClearField(field)  # type: ignore[arg-type]
    rules.MergeFrom(trajectory_pb2.RunConfig(**{field: value}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Client(replicas[0].channel, "other").create_run(rules)
    assert caught.value.code().name == code
    assert field in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({"staleness_policy": trajectory_pb2.STALENESS_POLICY_WAIT}, "max_publish_wait"),
        ({"required_columns": ["Reference"]}, "required_columns"),
        ({"required_columns": ["a", "a"]}, "required_columns"),
        ({"groups_per_step": 4, "fifo_window": 3}, "fifo_window"),
        ({"replay": {"strategy": 1, "groups_per_step": 0}}, "replay.groups_per_step"),
        (
            {"replay": {"strategy": 1, "groups_per_step": 2, "capacity_groups": 1}},
            "replay.capacity_groups",
        ),
        (
            {"replay": {"strategy": 2, "groups_per_step": 1, "capacity_groups": 1}},
            "replay.reward_name",
        ),
        ({"replay": {"strategy": 9}}, "replay.strategy"),
    ],
)
async def test_contradictory_rules_are_rejected(
    replicas: tuple[Client, Client], rules: dict[str, object], field: str
) -> None:
    """The error names the field that has to change."""
    config = trajectory_pb2.RunConfig()
    config.CopyFrom(RULES)
    for name in rules:
        config.ClearField(name)  # type: ignore[arg-type]
    config.MergeFrom(trajectory_pb2.RunConfig(**rules))  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Client(replicas[0].channel, "other").create_run(config)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
