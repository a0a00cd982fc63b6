"""Processes are killed in mid-generation: agents get every token once, as it is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow import Client, SeamflowError
from seamflow.channel import connect
from seamflow.client import Message
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.launcher.report.summary import Audit, audit, read_token_log
from tests.lib.end_to_end.support import NUM_WORDS, Process, make_tokenizer_folder
from tests.lib.redis_server import RedisServer

RUN = "kill"
NUM_AGENTS = 12
TURNS = 3
TOKENS_PER_TURN = 96
TOTAL = NUM_AGENTS * TURNS * TOKENS_PER_TURN


class AgentLog:
    """What the agents received, written by them, outside the system."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_tokens = 0
        self._grew = asyncio.Condition()
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def __call__(self, rollout_id: str, turn_id: str, chunk: TokenChunk) -> None:
        spans = [[s.start, s.num_tokens, s.weight_version, s.server_id] for s in chunk.tokens.spans]
        line = {
            "rollout_id": rollout_id,
            "turn_id": turn_id,
            "offset": chunk.offset,
            "token_ids": list(chunk.tokens.token_ids),
            "spans": spans,
        }
        with self.file.open("a") as log:
            log.write(json.dumps(line) + "\n")
        self.num_tokens += len(chunk.tokens.token_ids)
        for threshold, event in self._waiting:
            if self.num_tokens >= threshold:
                event.set()

    async def reaches(self, num_tokens: int) -> None:
        """Wait until the agents have received so many tokens."""
        event = asyncio.Event()
        self._waiting.append((num_tokens, event))
        if self.num_tokens >= num_tokens:
            event.set()
        await event.wait()


@dataclass
class System:
    """All processes of the test."""

    managers: list[Process]
    servers: list[Process]
    gateway: Process

    @property
    def manager_target(self) -> str:
        """Both replicas behind one channel."""
        return "ipv4:" + ",".join(manager.address for manager in self.managers)


def start(stack: ExitStack, redis: RedisServer, folder: Path, gateway_module: str) -> System:
    """Two managers, two fake rollout servers and one gateway, all real processes."""
    model = make_tokenizer_folder(folder / "model")
    managers = [
        Process("trajectory_manager", "trajectory_manager", folder, redis_url=redis.url)
        for _ in range(2)
    ]
    servers = [
        Process(
            "rollout.server",
            "rollout_server",
            folder,
            run_id=RUN,
            engine="fake",
            server_id=f"server-{i}",
            fake_step_seconds=0.01,
            fake_mean_tokens=0,
            fake_vocab_size=NUM_WORDS,
            cache_folder=folder / f"cache-{i}",
        )
        for i in range(2)
    ]
    system = System(managers, servers, gateway=None)  # type: ignore[arg-type]
    system.gateway = Process(
        gateway_module,
        "rollout_gateway",
        folder,
        run_id=RUN,
        model=model,
        trajectory_manager=system.manager_target,
        servers=",".join(server.address for server in servers),
        credential_secret="of this test",
    )
    for process in (*managers, *servers, system.gateway):
        stack.enter_context(process)
    return system


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs and data of the test."""
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends every process of the test, whatever happens."""
    with ExitStack() as stack:
        yield stack


async def act(client: Client, number: int) -> None:
    """One agent: a conversation of several turns."""
    rollout = await client.start_rollout(f"rollout-{number}")
    messages: list[Message] = [{"role": "user", "content": f"w{number}"}]
    for turn_number in range(TURNS):
        turn = await rollout.generate(
            messages,
            SamplingParams(max_new_tokens=TOKENS_PER_TURN, ignore_eos=True),
            turn_id=f"turn-{turn_number}",
            chunk_seconds=0.0,  # so that a kill finds turns of which part is recorded
        )
        assert len(turn.token_ids) == TOKENS_PER_TURN
        messages += [
            turn.message,
            {"role": "user", "content": f"w{number + turn_number}"},
        ]
    await rollout.finish(1.0)


async def stored(system: System) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """Everything the store holds."""
    async with connect(system.manager_target) as channel:
        request = pb.ListTrajectoriesRequest(run_id=RUN, page_size=1000)
        answer = await async_stub(TrajectoryServiceStub, channel).ListTrajectories(request)
        for trajectory in answer.trajectories:
            yield trajectory


async def create_run(system: System) -> None:
    """The rules matter little here: nothing is trained."""
    config = trajectory_pb2.RunConfig(
        group_size=1,
        groups_per_step=1,
        max_staleness=1,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=Duration(seconds=60),
        durability=trajectory_pb2.DURABILITY_FAST,
    )
    async with connect(system.manager_target) as channel:
        stub = async_stub(RunServiceStub, channel)
        await stub.CreateRun(run_pb.CreateRunRequest(run_id=RUN, config=config))


async def check(system: System, log: AgentLog) -> Audit:
    """Hold the agents' log against the store."""
    trajectories = [trajectory async for trajectory in stored(system)]
    return audit(read_token_log(log.file), trajectories)


async def strike(process: Process) -> None:
    """Kill a process and start it again on its port."""
    await asyncio.to_thread(process.kill)
    await asyncio.to_thread(process.start)


async def test_kills_lose_and_double_nothing(
    redis_server: RedisServer, stack: ExitStack, folder: Path
) -> None:
    """A rollout server, the gateway and a trajectory manager die; every call still finishes."""
    system = await asyncio.to_thread(start, stack, redis_server, folder, "rollout.gateway")
    await create_run(system)
    log = AgentLog(folder / "received.jsonl")
    async with (
        Client(system.gateway.address, run_id=RUN, observer=log) as client,
        asyncio.TaskGroup() as agents,
    ):
        for number in range(NUM_AGENTS):
            agents.create_task(act(client, number))
        for share, victim in (
            (0.1, system.servers[0]),
            (0.35, system.gateway),
            (0.6, system.managers[0]),
        ):
            await log.reaches(int(share * TOTAL))
            await strike(victim)
    result = await check(system, log)
    assert log.num_tokens == result.num_received == TOTAL
    assert (result.num_lost, result.num_duplicated, result.num_wrong_version) == (0, 0, 0)
    servers = {
        span.server_id
        async for trajectory in stored(system)
        for turn in trajectory.turns
        for span in turn.tokens.spans
        if len({s.server_id for s in turn.tokens.spans if s.server_id}) > 1
    } - {""}
    assert servers == {"server-0", "server-1"}, "no turn moved: nothing was interrupted"


@pytest.mark.long(short="tests/system/end_to_end/test_kill.py")
async def test_forwarding_before_recording_loses_tokens(
    redis_server: RedisServer, stack: ExitStack, folder: Path
) -> None:
    """Negative control: the same check finds losses once record-before-forward is off."""
    module = "tests.system.end_to_end.forward_first"
    system = await asyncio.to_thread(start, stack, redis_server, folder, module)
    await create_run(system)
    log = AgentLog(folder / "received.jsonl")

    async def act_until_failure(client: Client, number: int) -> None:
        with suppress(SeamflowError):
            await act(client, number)

    async with (
        Client(system.gateway.address, run_id=RUN, observer=log) as client,
        asyncio.TaskGroup() as agents,
    ):
        for number in range(NUM_AGENTS):
            agents.create_task(act_until_failure(client, number))
        await log.reaches(int(0.2 * TOTAL))
        await strike(system.gateway)
    result = await check(system, log)
    assert result.num_lost > 0
