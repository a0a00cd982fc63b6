"""The ranker's process with a running gateway: it learns, answers, is killed, and restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from seamflow.agent import Task
from seamflow.channel import connect
from seamflow.client import Rollout
from seamflow.common.v1 import tokens_pb2
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.ranker.v1 import ranker_service_pb2 as ranker_pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.runner.agent_runner import AgentRunner, RunnerConfig
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2, task_service_pb2, trajectory_pb2
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

import rollout.gateway.cli
import rollout.server.cli
from rollout.gateway.config import GatewayConfig
from rollout.server.config import RolloutServerConfig
from services.chassis.rpc.server import started
from tests.lib.end_to_end.support import NUM_WORDS, Process, make_tokenizer_folder
from tests.lib.ranker.support import manager

if TYPE_CHECKING:
    from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceAsyncStub
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

RUN = "ranked"
GROUP_SIZE = 4
WAVE = 8
"""Tasks that are submitted at a time."""
TURNS = WAVE * GROUP_SIZE
"""That come of them."""


class Agent:
    """One turn of the length in its task."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float] | float:
        """Ask; the reward is of no interest."""
        length = task.payload["length"]
        messages = [{"role": "user", "content": f"w{length}"}]
        await rollout.generate(messages, SamplingParams(max_new_tokens=length, ignore_eos=True))
        return 1.0


@dataclass(kw_only=True)
class Fleet:
    """The ranker's process, and the run that it is to learn."""

    ranker: Process
    tasks: TaskServiceAsyncStub
    samples: SampleServiceAsyncStub
    num_tasks: int = 0

    async def wave(self) -> None:
        """Submit tasks and wait until every rollout of them has ended well."""
        tasks = [
            trajectory_pb2.Task(
                task_id=f"task-{self.num_tasks + i}",
                payload_json=json.dumps({"length": 2 + 6 * (i % 4)}),
                purpose=tokens_pb2.PURPOSE_TRAIN,
            )
            for i in range(WAVE)
        ]
        self.num_tasks += WAVE
        await self.tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(run_id=RUN, tasks=tasks))
        request = sample_service_pb2.GetReadinessRequest(run_id=RUN)
        while (
            await self.samples.GetReadiness(request)
        ).readiness.num_ready_groups < self.num_tasks:
            await asyncio.sleep(0.02)

    async def waves_until(self, condition: Callable[[], bool]) -> None:
        """Submit tasks until it holds."""
        while not condition():
            await self.wave()

    async def learned(self) -> ranker_pb.GetRankerResponse:
        """What the ranker knows, once it knows something."""
        request = ranker_pb.GetRankerRequest(run_id=RUN)
        async with connect(self.ranker.address) as channel:
            stub = async_stub(RankerServiceStub, channel)
            while not (facts := await stub.GetRanker(request)).num_turns:
                await asyncio.sleep(0.02)
        return facts


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """A manager, a fake engine, a gateway and agents; the ranker is not started yet."""
    plain: dict[str, Any] = {"run_id": RUN, "port": 0, "admin_port": -1, "drain_seconds": 0.2}
    engine = RolloutServerConfig(
        engine="fake", fake_mean_tokens=0, fake_vocab_size=NUM_WORDS, model="", **plain
    )
    async with (
        manager(RUN, GROUP_SIZE) as (address, _),
        rollout.server.cli.build(engine) as server,
        started(server, engine) as port,
    ):
        ranker = Process(
            "services.ranker",
            "ranker",
            folder,
            run_id=RUN,
            trajectory_manager=address,
            train_every_turns=TURNS,
        )
        config = GatewayConfig(
            model=make_tokenizer_folder(folder / "model"),
            trajectory_manager=address,
            servers=(f"127.0.0.1:{port}",),
            dispatch="skew_aware",
            lengths="ranker",
            ranker=ranker.address,
            **plain,
        )
        async with (
            rollout.gateway.cli.build(config) as gateway,
            started(gateway, config) as door,
            acting(f"127.0.0.1:{door}"),
            connect(address) as channel,
        ):
            try:
                yield Fleet(
                    ranker=ranker,
                    tasks=async_stub(TaskServiceStub, channel),
                    samples=async_stub(SampleServiceStub, channel),
                )
            finally:
                await asyncio.to_thread(ranker.stop)


@asynccontextmanager
async def acting(gateway: str) -> AsyncIterator[None]:
    """Agents that take every task."""
    config = RunnerConfig(run_id=RUN, gateway=gateway, concurrency=2)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(AgentRunner(Agent(), config).run(stop))
        yield
        stop.set()


def estimates(source: str) -> float:
    """Lengths that the gateway took from `source`."""
    name = "seamflow_rollout_gateway_length_estimates_total"
    return REGISTRY.get_sample_value(name, {"source": source}) or 0.0


def failures() -> float:
    """Calls without an answer."""
    return REGISTRY.get_sample_value("seamflow_rollout_gateway_ranker_failures_total") or 0.0


async def test_generation_continues_without_the_ranker(tmp_path: Path) -> None:
    """Running means before its first fit and after SIGKILL; its answers in between, and again after
    a restart, once it has read the whole run again. No rollout fails."""
    at_first = estimates("ranker")
    async with fleet(tmp_path) as run:
        await run.wave()
        assert estimates("ranker") == at_first

        await asyncio.to_thread(run.ranker.start)
        assert (await run.learned()).num_turns == TURNS
        await run.waves_until(lambda: estimates("ranker") > at_first)

        await asyncio.to_thread(run.ranker.kill)
        asked, means, failed = estimates("ranker"), estimates("running_means"), failures()
        await run.wave()
        assert estimates("ranker") == asked
        assert estimates("running_means") == means + TURNS
        assert failures() > failed

        num_turns = run.num_tasks * GROUP_SIZE
        await asyncio.to_thread(run.ranker.start)
        assert (await run.learned()).num_turns == num_turns, "all of it from the store"
        await run.waves_until(lambda: estimates("ranker") > asked)
