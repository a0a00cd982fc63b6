"""Lengths from a ranker: asked behind the turns' backs, never waited for."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from prometheus_client import REGISTRY
from seamflow.common.v1 import tokens_pb2
from seamflow.ranker.v1 import ranker_service_pb2 as pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import (
    RankerServiceServicer,
    add_RankerServiceServicer_to_server,
)
from seamflow.rollout.v1 import rollout_service_pb2
from seamflow.trajectory.v1 import run_service_pb2, trajectory_pb2

from bench.harness.byte_model import make_byte_model
from bench.harness.constants import changed
from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.length_estimators import LengthQuery, RankerLengths
from services.chassis.rpc.server import Service, started
from tests.lib.rollout.gateway.support import (
    PLAIN,
    ScriptedServer,
    bearer,
    gateway,
    message,
    scripted,
)


class ScriptedRanker(RankerServiceServicer):
    """Expects ten tokens for each of the prompt."""

    def __init__(self) -> None:
        self.requests: list[pb.PredictLengthsRequest] = []
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def PredictLengths(
        self, request: pb.PredictLengthsRequest, context: Any
    ) -> pb.PredictLengthsResponse:
        """When it may."""
        self.requests.append(request)
        self.asked.set()
        await self.may_answer.wait()
        expected = [10.0 * len(prompt.token_ids) / 4 for prompt in request.prompts]
        return pb.PredictLengthsResponse(expected_tokens=expected)


@asynccontextmanager
async def serving(ranker: ScriptedRanker) -> AsyncIterator[str]:
    """Its address."""
    service = Service(servicers=[(add_RankerServiceServicer_to_server, ranker)])
    async with started(service, PLAIN, "ranker") as port:
        yield f"127.0.0.1:{port}"


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@asynccontextmanager
async def estimator(
    address: str, clock: Clock | None = None, seconds: float = 60.0
) -> AsyncIterator[RankerLengths]:
    """Of a gateway of run "run"."""
    config = GatewayConfig(
        run_id="run",
        model=Path("model"),
        lengths="ranker",
        ranker=address,
    )
    with changed("rollout.gateway.limits", {"ranker_seconds": seconds}):
        lengths = RankerLengths(config, clock=clock or Clock())
        yield lengths
        await lengths.close()


def turn(group: str, num_tokens: int = 3, turn_index: int = 0) -> LengthQuery:
    """A query with a prompt of that length."""
    return LengthQuery(group=group, token_ids=[1] * num_tokens, turn_index=turn_index)


async def until_asked(lengths: RankerLengths) -> None:
    """Wait until no question is under way."""
    assert lengths._sending is not None
    await lengths._sending


def failures() -> float:
    """Questions without an answer, so far."""
    return REGISTRY.get_sample_value("seamflow_rollout_gateway_ranker_failures_total") or 0.0


async def test_a_group_is_queried_once() -> None:
    """Its later turns know at once; another turn index is another question."""
    ranker = ScriptedRanker()
    async with serving(ranker) as address, estimator(address) as lengths:
        for _ in range(3):
            lengths.prefetch(turn("a"))
        lengths.prefetch(turn("a", 9, turn_index=1))
        await until_asked(lengths)
        lengths.prefetch(turn("a"))
        assert lengths.predict(turn("a")) == 30.0
        assert lengths.predict(turn("a", turn_index=1)) == 90.0
        assert sum(len(request.prompts) for request in ranker.requests) == 2
    assert {request.run_id for request in ranker.requests} == {"run"}


async def test_queries_during_a_call_form_the_next_batch() -> None:
    """Two questions for a hundred turns, one of them for 64 at most: three."""
    ranker = ScriptedRanker()
    async with serving(ranker) as address, estimator(address) as lengths:
        for number in range(100):
            lengths.prefetch(turn(f"{number}"))
        await until_asked(lengths)
        assert [len(request.prompts) for request in ranker.requests] == [64, 36]


async def test_an_expired_answer_is_queried_again() -> None:
    """And serves until the new one is there."""
    ranker, clock = ScriptedRanker(), Clock()
    async with serving(ranker) as address, estimator(address, clock) as lengths:
        lengths.prefetch(turn("a"))
        await until_asked(lengths)
        clock.now = 61.0
        lengths.prefetch(turn("a", 5))
        assert lengths.predict(turn("a")) == 30.0
        await until_asked(lengths)
        assert lengths.predict(turn("a")) == 50.0


async def test_without_a_ranker_the_means_count() -> None:
    """No process listens: a metric counts it, and the next turn is queried again."""
    before = failures()
    async with estimator("127.0.0.1:9") as lengths:
        lengths.observe(turn("a"), 40)
        for group in "ab":
            lengths.prefetch(turn(group))
            await until_asked(lengths)
            assert lengths.predict(turn(group)) == 40.0
    assert failures() == before + 2


async def test_a_call_to_a_hanging_ranker_times_out() -> None:
    """After its deadline, with the turn long under way."""
    ranker, before = ScriptedRanker(), failures()
    ranker.may_answer.clear()
    async with (
        serving(ranker) as address,
        estimator(address, seconds=0.02) as lengths,
    ):
        lengths.prefetch(turn("a"))
        assert lengths.predict(turn("a")) is None
        await until_asked(lengths)
        ranker.may_answer.set()
    assert failures() == before + 1


async def test_nothing_is_queried_before_the_prompt_is_known() -> None:
    """A turn whose prefix only the store knows."""
    async with estimator("127.0.0.1:9") as lengths:
        lengths.prefetch(LengthQuery(group="a"))
        assert lengths._sending is None


async def test_a_turn_through_a_gateway_is_ranked_by_its_prompt(tmp_path: Path) -> None:
    """The ranker sees the prompt as the server does; the agent has its answer though it hangs."""
    ranker, server = ScriptedRanker(), ScriptedServer()
    ranker.may_answer.clear()
    server.answers = [[[1, 2]]]
    model = make_byte_model(tmp_path / "model")
    async with serving(ranker) as address, scripted(server) as rollout_server:
        settings: dict[str, Any] = {
            "servers": (rollout_server,),
            "lengths": "ranker",
            "ranker": address,
        }
        async with gateway(model, dispatch="skew_aware", **settings) as (agent, _, runs):
            rules = trajectory_pb2.RunConfig(
                group_size=1,
                groups_per_step=1,
                staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
                lease_duration=Duration(seconds=60),
                durability=trajectory_pb2.DURABILITY_FAST,
            )
            await runs.CreateRun(run_service_pb2.CreateRunRequest(run_id="run", config=rules))
            start = rollout_service_pb2.StartRolloutRequest(
                run_id="run", rollout_id="task/0/1x", purpose=tokens_pb2.PURPOSE_EVAL
            )
            credential = (await agent.StartRollout(start)).credential
            request = rollout_service_pb2.GenerateRequest(
                run_id="run",
                rollout_id="task/0/1x",
                turn_id="turn",
                messages=rollout_service_pb2.Messages(messages=[message("user", "hello")]),
            )
            call = agent.Generate(request, metadata=bearer(credential))
            responses = [response async for response in call]
            await ranker.asked.wait()
        assert responses[-1].end.num_sampled_tokens == 2
        ranker.may_answer.set()
    (prompt,) = ranker.requests[0].prompts
    assert prompt.task_id == "task/0/1x"
    assert list(array("i", prompt.token_ids)) == server.prompts[0]
