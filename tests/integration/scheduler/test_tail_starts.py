"""R_t and m at run time, over real gRPC: from what nodes and gangs report."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from redis.asyncio import Redis
from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.model.records import Assignment, NodeState, State
from scheduler.policy.tail_migration import Engines, GangCosts, MeasuredBatch, best_tail
from scheduler.pool.tail_starts import TailStarts, drawn
from scheduler.store.redis_store import TAILS
from services.lib.decode_latency import DecodeLatency
from tests.lib.scheduler.support import (
    BOTH,
    RUN,
    gang,
    list_nodes,
    node,
    register,
    request_nodes,
    running_scheduler,
)

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

SLOTS = 16
RATES = {1: 100.0, 16: 1280.0}
"""Tokens per second by batch size: a step takes 10 ms, of 16 turns 12.5 ms."""
LATENCY = DecodeLatency.of({1: 0.01, 16: 0.0125})


def groups(scale: float = 1.0, num_groups: int = 16, seed: int = 0) -> list[list[int]]:
    """Lengths with a long tail."""
    draw = random.Random(seed)
    return [
        [1 + int(scale * draw.lognormvariate(math.log(150), 0.85)) for _ in range(2)]
        for _ in range(num_groups)
    ]


def released(
    batch: int, lengths: list[list[int]], training_seconds: float = 4.0, **fields: Any
) -> pb.ReleaseNodesRequest:
    """The gang waits for `batch`, and has measured another."""
    rollouts = sum(map(len, lengths))
    forecast = pb.GenerationForecast(
        remaining_rollouts=rollouts,
        batch_rollouts=rollouts,
        done_rollouts=rollouts,
        newest_batch=pb.MeasuredBatch(
            groups=[pb.GroupTokens(rollout_tokens=group) for group in lengths],
            training_duration=to_duration(training_seconds),
            **fields,
        ),
    )
    return pb.ReleaseNodesRequest(run_id=RUN, gang_id="g", forecast=forecast, batch=batch)


async def beat(
    stub: SchedulerServiceAsyncStub, name: str, num_turns: int = 0, switch: float | None = None
) -> None:
    """The node has done what it is assigned, and decodes `num_turns`."""
    epoch = (await list_nodes(stub))[name].assignment.epoch
    await stub.Heartbeat(
        pb.HeartbeatRequest(
            node_id=name,
            reported_epoch=epoch,
            known_epoch=epoch,
            state=pb.NODE_STATE_ACTIVE,
            switch_duration=None if switch is None else to_duration(switch),
            report=pb.NodeReport(
                num_turns=num_turns,
                tokens_per_second=RATES.get(num_turns, 0.0),
                max_running=SLOTS,
            ),
        )
    )


async def train(stub: SchedulerServiceAsyncStub, batch: int = 0) -> None:
    """The gang gets its two nodes, which take 2 s to switch."""
    await request_nodes(stub, "g", 2)
    for name in ("b", "c"):
        await beat(stub, name, switch=2.0)
    assert (await request_nodes(stub, "g", 2)).granted


async def begin(stub: SchedulerServiceAsyncStub, *, measured: bool = True) -> None:
    """A node that generates and two that train too, whose rates are measured; a gang has these."""
    await register(stub, "a", "rollout")
    for name in ("b", "c"):
        await register(stub, name, *BOTH)
    for name in ("a", "b", "c"):
        for num_turns in RATES if measured else ():
            await beat(stub, name, num_turns)
        await beat(stub, name)
    await train(stub)


async def test_a_release_tells_when_the_tail_begins() -> None:
    """As the planner says for what was measured; the decision is in the audit log, once."""
    async with running_scheduler(lending="always") as (_, stub):
        await begin(stub)
        lengths = groups()
        answer = await stub.ReleaseNodes(released(2, lengths, prompt_tokens=50.0))
        expected = best_tail(
            drawn([MeasuredBatch(groups=tuple(map(tuple, lengths)), training_seconds=4.0)]),
            Engines(
                num_instances=3,
                latency=LATENCY,
                slots=SLOTS,
                prompt_tokens=50.0,
                prefill_seconds=0.0125 / 16,
            ),
            GangCosts(
                num_instances=2, switch_seconds=2.0, token_seconds=4.0 / sum(map(sum, lengths))
            ),
        )
        assert 0 < expected.remaining < 32
        assert answer.tail == pb.Tail(
            remaining_rollouts=expected.remaining, num_nodes=expected.num_kept
        )
        again = await stub.ReleaseNodes(released(2, groups(5.0)))
        assert again.tail == answer.tail, "the same batch, so the decision stands"
        causes = [event.cause for event in await tail_events(stub)]
        assert len(causes) == 1
        assert f"begins when {expected.remaining} of 32 rollouts remain" in causes[0]


async def tail_events(stub: SchedulerServiceAsyncStub) -> list[pb.AllocationEvent]:
    """Those of the audit log."""
    watch = stub.WatchAllocations(pb.WatchAllocationsRequest(), timeout=10)
    message = await watch.read()
    watch.cancel()
    assert isinstance(message, pb.WatchAllocationsResponse)
    return [event for event in message.events if event.kind == "tail"]


async def test_the_tail_follows_what_is_measured() -> None:
    """Training that takes as long as generation begins earlier than training that takes no time."""
    async with running_scheduler(lending="always") as (_, stub):
        await begin(stub)
        remaining = []
        for batch, seconds in enumerate((0.0, 30.0, 30.0, 30.0), start=2):
            answer = await stub.ReleaseNodes(released(batch, groups(seed=batch), seconds))
            remaining.append(answer.tail.remaining_rollouts)
            await train(stub, batch)
        assert remaining[0] < remaining[-1]


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_scheduler_that_starts_keeps_to_the_last_decision(
    is_kept: bool, redis_url: str
) -> None:
    """Until it has measured again; as control, one whose store has no decision knows none."""
    async with running_scheduler(lending="always", redis_url=redis_url) as (_, stub):
        await begin(stub)
        before = await stub.ReleaseNodes(released(2, groups()))
        assert before.tail.remaining_rollouts > 0
    if not is_kept:
        store = Redis.from_url(redis_url)
        await store.delete(TAILS)
        await store.aclose()
    async with running_scheduler(lending="always", redis_url=redis_url) as (_, stub):
        await train(stub, 2)
        after = await stub.ReleaseNodes(released(3, groups(5.0)))
        assert after.HasField("tail") == is_kept
        assert not is_kept or after.tail == before.tail
        await stub.ReleaseNodes(pb.ReleaseNodesRequest(run_id=RUN, gang_id="g"))
        await train(stub)
        unknown = await stub.ReleaseNodes(released(1, groups()))
        assert not unknown.HasField("tail"), "the gang had released its nodes for good"


async def test_a_gang_without_a_forecast_may_begin_at_the_tail_too() -> None:
    """Its nodes are free meanwhile, and rollout gets them."""
    async with running_scheduler(lending="gated") as (_, stub):
        await begin(stub)
        forecast = released(2, groups()).forecast
        request = pb.ReleaseNodesRequest(
            run_id=RUN, gang_id="g", newest_batch=forecast.newest_batch
        )
        assert 0 < (await stub.ReleaseNodes(request)).tail.remaining_rollouts < 32
        nodes = await list_nodes(stub)
        assert {nodes[name].assignment.tag for name in "abc"} == {"rollout"}


async def test_nodes_that_are_kept_need_no_tail_to_begin() -> None:
    """Nothing migrates, so the gang begins with the first group."""
    async with running_scheduler(lending="never") as (_, stub):
        await begin(stub)
        answer = await stub.ReleaseNodes(released(2, groups()))
        assert answer.tail.remaining_rollouts == 30


@pytest.mark.parametrize("at_tail", [True, False])
async def test_nodes_that_the_tail_does_not_need_generate_for_another_run(at_tail: bool) -> None:
    """Until the gang releases its nodes; all are kept for a trainer that measures nothing."""
    async with running_scheduler(lending="always") as (_, stub):
        await stub.SetRunPolicy(
            pb.SetRunPolicyRequest(run_id="other", policy=pb.RunPolicy(rollout_share=0.01))
        )
        workers = [pb.Worker(tag="rollout", address=f"{r}:1", run_id=r) for r in (RUN, "other")]
        for name in ("d", "e"):
            await stub.RegisterNode(
                pb.RegisterNodeRequest(
                    node_id=name, run_id=RUN, capability_tags=["rollout"], workers=workers
                )
            )
        await begin(stub)
        for name in ("d", "e"):
            await beat(stub, name)
        request = released(2, groups(num_groups=4))
        if not at_tail:
            request.forecast.ClearField("newest_batch")
        tail = (await stub.ReleaseNodes(request)).tail
        assert tail.num_nodes == at_tail
        assert await runs(stub, "ade") == {RUN: 3}
        await train(stub, 2)
        assert await runs(stub, "ade") == ({RUN: 1, "other": 2} if at_tail else {RUN: 3})
        await stub.ReleaseNodes(released(3, groups(num_groups=4)))
        back = (await runs(stub, "ade"))[RUN]
        assert back >= 2, "shares are kept to within a node"


async def test_nodes_do_not_leave_for_less_time_than_they_need_to_return() -> None:
    """By the measured seconds of switches to rollout."""
    report = pb.NodeReport(num_turns=1, tokens_per_second=100.0, max_running=SLOTS)
    generates = node(
        "a",
        "rollout",
        assignment=Assignment(tag="rollout"),
        state=NodeState.ACTIVE,
        report=report,
    )
    trains = node("b", *BOTH, assignment=Assignment(tag="train", gang_id="g"))
    before = State(nodes={"a": generates, "b": trains}, gangs={(RUN, "g"): gang("g", 1)})
    after = State(nodes={"a": generates, "b": replace(trains, assignment=generates.assignment)})
    tails = TailStarts()
    tails.observe(generates)
    batch = MeasuredBatch(groups=((100, 100), (100, 200)), training_seconds=4.0)
    tail = await tails.after_release(before, after, (RUN, "g"), 2, batch)
    assert tail is not None
    for seconds, number in ((0.0, tail.num_kept), (tail.gang_seconds, 0)):
        slow = replace(generates, switch_seconds={"rollout": seconds})
        decided = State(nodes={"a": slow}, tails={(RUN, "g"): tail})
        assert tails.num_nodes((RUN, "g"), decided) == number
    assert tails.num_nodes((RUN, "another"), decided) == 0
    for _ in range(2):
        tails.forget((RUN, "g"))


async def runs(stub: SchedulerServiceAsyncStub, names: str) -> Counter[str]:
    """How many of these nodes generate for each run."""
    nodes = await list_nodes(stub)
    return Counter(nodes[name].assignment.run_id or RUN for name in names)


@pytest.mark.parametrize("what", ["unmeasured", "old trainer"])
async def test_without_measurements_there_is_no_tail(what: str) -> None:
    """Neither from nodes that reported no rate, nor of trainers that do not begin at it."""
    async with running_scheduler(lending="always") as (_, stub):
        await begin(stub, measured=what != "unmeasured")
        request = released(2, groups())
        if what == "old trainer":
            request.forecast.ClearField("newest_batch")
        answer = await stub.ReleaseNodes(request)
        assert not answer.HasField("tail")


async def test_a_gang_that_takes_every_node_has_no_tail() -> None:
    """Nobody would be left to generate it."""
    async with running_scheduler(lending="always") as (_, stub):
        for name in ("b", "c"):
            await register(stub, name, *BOTH)
            await beat(stub, name, 1)
        await train(stub)
        assert not (await stub.ReleaseNodes(released(2, groups()))).HasField("tail")


@pytest.mark.parametrize(
    ("lengths", "fields", "message"),
    [
        ([], {}, "forecast.newest_batch.groups"),
        ([[]], {}, "forecast.newest_batch.groups"),
        ([[3, 0]], {}, "forecast.newest_batch.groups"),
        ([[3]], {"prompt_tokens": -1.0}, "forecast.newest_batch.prompt_tokens"),
        ([[3]], {"training_seconds": -1.0}, "forecast.newest_batch.training_duration"),
    ],
)
async def test_an_impossible_batch_is_rejected(
    lengths: list[list[int]], fields: dict[str, float], message: str
) -> None:
    """The message names the field; the gang keeps its nodes."""
    async with running_scheduler(lending="always") as (_, stub):
        await begin(stub)
        request = released(2, lengths, **fields)
        request.forecast.batch_rollouts = request.forecast.remaining_rollouts = 2
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ReleaseNodes(request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (error.value.details() or "")
        assert (await list_nodes(stub))["b"].assignment.tag == "train"
