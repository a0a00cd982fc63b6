"""What agents may do to a gateway: cancel, run out of time, stop reading, come in crowds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import ExhaustedError, decode
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from bench.harness.byte_model import make_byte_model
from rollout.gateway import servicer as servicer_module
from rollout.gateway.send_buffer import SendBuffer
from rollout.server.cli import build
from services.chassis.rpc.server import Service, started
from tests.lib.rollout.gateway.support import PLAIN, ScriptedServer, bearer, gateway, scripted
from tests.lib.rollout.server.client import Client, fake_config
from tests.lib.trajectory_manager.client import RULES

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

PROMPT = [3, 4, 5]


@dataclass(slots=True)
class Agent:
    """One rollout whose turns may run concurrently."""

    stub: RolloutServiceAsyncStub
    store: TrajectoryServiceAsyncStub
    credential: str

    def request(self, turn_id: str, **fields: Any) -> pb.GenerateRequest:
        """What asks for a turn."""
        sampling = {"max_new_tokens": 64, "ignore_eos": True, **fields}
        request = pb.GenerateRequest(
            run_id="run",
            rollout_id="r",
            turn_id=turn_id,
            token_ids=pb.TokenIds(token_ids=PROMPT),
            sampling=tokens_pb2.SamplingParams(**sampling),
        )
        request.heartbeat_interval.FromMilliseconds(20)
        return request

    def generate(self, turn_id: str, timeout: float | None = None, **fields: Any) -> Any:
        """The stream of one turn, unread."""
        return self.call(self.request(turn_id, **fields), timeout)

    def call(self, request: pb.GenerateRequest, timeout: float | None = None) -> Any:
        """The stream of a request, unread."""
        return self.stub.Generate(request, timeout=timeout, metadata=bearer(self.credential))

    async def recorded(self, turn_id: str) -> list[int]:
        """The sampled ids of a turn, as they are stored."""
        request = store_pb.GetTrajectoryRequest(run_id="run", rollout_id="r")
        turns = (await self.store.GetTrajectory(request)).trajectory.turns
        (turn,) = [turn for turn in turns if turn.turn_id == turn_id]
        return sampled_of(turn.tokens)


def sampled_of(tokens: tokens_pb2.Tokens) -> list[int]:
    """The sampled ids of a turn, which follow its prompt."""
    start = sum(s.num_tokens for s in tokens.spans if s.origin == tokens_pb2.ORIGIN_ENVIRONMENT)
    return list(tokens.token_ids[start:])


@asynccontextmanager
async def agent(
    folder: Path, *servers: str, template: str = "", **settings: Any
) -> AsyncIterator[Agent]:
    """An agent in front of a gateway and a store."""
    model = make_byte_model(folder, template) if template else make_byte_model(folder)
    async with gateway(model, servers=servers, **settings) as (stub, store, runs):
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=RULES))
        request = pb.StartRolloutRequest(
            run_id="run", rollout_id="r", purpose=tokens_pb2.PURPOSE_EVAL
        )
        yield Agent(stub, store, (await stub.StartRollout(request)).credential)


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[tuple[str, Client]]:
    """A rollout server with the fake engine: its address, and a client that sees its load."""
    config = fake_config(drain_seconds=0.2, admin_port=-1, **settings)
    async with (
        build(config) as service,
        started(service, config, "rollout_server") as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield f"127.0.0.1:{port}", Client(async_stub(RolloutServerServiceStub, channel))


async def ids_of(call: Any) -> list[int]:
    """All sampled ids of a turn that were not read yet."""
    token_ids: list[int] = []
    while (event := await call.read()) is not grpc.aio.EOF:
        token_ids += event.chunk.tokens.token_ids
    return token_ids


async def first_chunk(call: Any) -> pb.GenerateResponse:
    """The next event that is no heartbeat."""
    while True:
        event: pb.GenerateResponse = await call.read()
        if not event.HasField("heartbeat"):
            return event


async def test_a_cancelled_turn_ends_its_engines_work(tmp_path: Path) -> None:
    """And no other's: the concurrent turn continues to its end."""
    async with (
        engine(fake_step_seconds=0.002) as (address, client),
        agent(tmp_path, address) as one,
    ):
        stays = asyncio.create_task(ids_of(one.generate("stays", max_new_tokens=200)))
        gone = one.generate("gone", max_new_tokens=4000)
        await first_chunk(gone)
        await client.until(lambda info: info.num_running == 2)
        gone.cancel()
        await client.until(lambda info: info.num_running == 1)
        assert len(await stays) == 200
        await client.until(lambda info: info.num_running == 0)


async def test_a_waiting_turn_that_is_cancelled_never_starts(tmp_path: Path) -> None:
    """It leaves the gateway's queue, and the turn behind it gets the server."""
    server = ScriptedServer()
    server.may_answer.clear()
    server.answers = [[[7]], [[8]]]
    settings: dict[str, Any] = {"overcommit": 0.1}  # one place of the eight
    async with scripted(server) as address, agent(tmp_path, address, **settings) as one:
        runs = asyncio.create_task(ids_of(one.generate("runs")))
        await server.asked.wait()
        gone, behind = one.generate("gone"), one.generate("behind")
        assert (await gone.read()).HasField("heartbeat")
        assert (await behind.read()).HasField("heartbeat")
        gone.cancel()
        server.may_answer.set()
        assert (await runs, await ids_of(behind)) == ([7], [8])
        assert len(server.prompts) == 2


async def test_the_agents_deadline_is_the_engines(tmp_path: Path) -> None:
    """It is passed on, so that it holds without the gateway too; the server is not suspected."""
    server = ScriptedServer()
    server.may_answer.clear()
    server.answers = [[[7]]]
    # One report for the whole test: a suspected server would get no further turn.
    async with scripted(server) as address, agent(tmp_path, address, poll_seconds=60.0) as one:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ids_of(one.generate("late", timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await server.cancelled.wait()
        (left,) = server.seconds_left
        # gRPC rounds up what it passes on.
        assert left is not None and 0 < left < 0.4
        server.may_answer.set()
        assert await ids_of(one.generate("next", timeout=30.0)) == [7]


async def test_without_a_deadline_the_engine_has_none_of_the_agents(tmp_path: Path) -> None:
    """Control of the test above: only the channel's own bound, a day."""
    server = ScriptedServer()
    server.answers = [[[7]]]
    async with scripted(server) as address, agent(tmp_path, address) as one:
        await ids_of(one.generate("turn"))
        (left,) = server.seconds_left
        assert left is not None and left > 3600


async def test_an_agent_that_does_not_read_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn leaves the only place of the server, and waits for its agent as one chunk."""
    buffer: list[SendBuffer] = []

    class Seen(SendBuffer):
        def __init__(self, heartbeat_seconds: float) -> None:
            super().__init__(heartbeat_seconds)
            buffer.append(self)

    monkeypatch.setattr(servicer_module, "SendBuffer", Seen)
    length = 60_000
    server = {"max_running": 1, "max_context": 1 << 20, "stream_interval": 256}
    async with (
        engine(**server) as (address, client),
        agent(tmp_path, address, overcommit=1.0) as one,
    ):
        slow = one.generate("slow", max_new_tokens=length)
        received = list((await first_chunk(slow)).chunk.tokens.token_ids)
        for number in range(5):
            assert len(await ids_of(one.generate(f"quick-{number}"))) == 64
        await client.until(lambda info: info.num_running + info.num_queued == 0)
        # Negative control: it was the agent that did not read, beyond what the network holds.
        unread = list(buffer[0]._unread)
        assert [type(event) for event in unread] in ([pb.TokenChunk, pb.TurnEnd], [pb.TokenChunk])
        received += await ids_of(slow)
        assert len(received) == length
        assert received == await one.recorded("slow")


async def test_a_full_queue_names_a_retry_time(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED with a RetryInfo; turns that wait already keep waiting."""
    server = ScriptedServer()
    async with agent(tmp_path, max_waiting_turns=1) as one:
        waits = one.generate("waits")
        assert (await waits.read()).HasField("heartbeat")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ids_of(one.generate("too-many"))
        refusal = decode(caught.value)
        assert isinstance(refusal, ExhaustedError)
        assert (refusal.reason, refusal.retry_after) == ("TOO_MANY_REQUESTS", 1.0)
        assert "max_waiting_turns" in str(refusal)
        assert (await waits.read()).HasField("heartbeat")
        waits.cancel()
    assert server.prompts == []


@pytest.mark.parametrize("name", ["heartbeat_interval", "chunk_interval"])
@pytest.mark.parametrize(("seconds", "nanos"), [(-1, 0), (1 << 62, 0), (0, -1)])
async def test_an_interval_of_no_length_is_refused(
    tmp_path: Path, name: str, seconds: int, nanos: int
) -> None:
    """Before the turn begins, by its name."""
    async with agent(tmp_path) as one:
        request = one.request("turn")
        interval = getattr(request, name)
        interval.seconds, interval.nanos = seconds, nanos
        with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
            await ids_of(one.call(request))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_agents_chunk_interval_reaches_the_server(tmp_path: Path) -> None:
    """GenerateTokens carries the interval of Generate."""
    server = ScriptedServer()
    server.answers = [[[7]]]
    async with scripted(server) as address, agent(tmp_path, address) as one:
        request = one.request("turn")
        request.chunk_interval.FromMilliseconds(2500)
        assert await ids_of(one.call(request)) == [7]
    assert server.chunk_seconds == [2.5]


class TinyScheduler(SchedulerServiceServicer):
    """Lists one node with the given rollout servers."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    async def ListNodes(
        self, request: scheduler_service_pb2.ListNodesRequest, context: Any
    ) -> scheduler_service_pb2.ListNodesResponse:
        """The node."""
        workers = [scheduler_service_pb2.Worker(tag="rollout", address=a) for a in self.addresses]
        return scheduler_service_pb2.ListNodesResponse(
            nodes=[scheduler_service_pb2.Node(workers=workers)]
        )


async def test_a_turn_continues_when_its_server_leaves_the_run(tmp_path: Path) -> None:
    """The scheduler lists the server no more while a turn waits for its tokens."""
    first, second = ScriptedServer("a"), ScriptedServer("b")
    first.may_answer.clear()
    second.answers = [[[8]]]
    async with scripted(first) as a, scripted(second) as b:
        scheduler = TinyScheduler(a)
        service = Service(servicers=[(add_SchedulerServiceServicer_to_server, scheduler)])
        async with (
            started(service, PLAIN, "scheduler") as port,
            agent(tmp_path, scheduler=f"127.0.0.1:{port}") as one,
        ):
            turn = asyncio.create_task(ids_of(one.generate("turn")))
            await first.asked.wait()
            scheduler.addresses = [b]
            assert await turn == [8]
