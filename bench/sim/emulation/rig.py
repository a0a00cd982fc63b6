"""One run of the real control plane on emulated nodes, measured like a simulated one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from google.protobuf.duration_pb2 import Duration
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.runner.agent_runner import AgentRunner, RunnerConfig
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import (
    run_service_pb2,
    task_service_pb2,
    trajectory_pb2,
)
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

from bench.harness.byte_model import make_byte_model
from bench.harness.redis_process import FAST, redis_server
from bench.sim.emulation.agent import EmulatedAgent
from bench.sim.emulation.nodes import NodesSettings, ready_file
from bench.sim.emulation.prompts import Emulation
from bench.sim.emulation.readings import Readings
from bench.sim.simulator.cluster import node_tags
from bench.sim.simulator.simulation import Result, Setting

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

_RUN = "pipeline"
_START_SECONDS = 60.0
_END_SECONDS = 20.0
_POLL_SECONDS = 0.05
_FOLLOW_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What came of a run."""

    result: Result
    """As of a simulated one, in emulated seconds."""
    control_plane_cores: float
    """Cores that the control plane took: its services, Redis and the node agents."""
    starts: tuple[int, ...]
    """Groups that were complete when each step requested its nodes."""


async def emulate(setting: Setting, emulation: Emulation, **trainer: object) -> Emulated:
    """Run it; `trainer` is given to the trainer besides what the setting says."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(_rig(setting, emulation, trainer))
        playing = [asyncio.create_task(part) for part in rig.parts()]
        try:
            await _first(rig.until_step(setting.warm_up), playing)
            cpu, began = rig.cpu_seconds(), time.monotonic()
            await _first(rig.until_step(setting.warm_up + setting.steps), playing)
            cores = (rig.cpu_seconds() - cpu) / (time.monotonic() - began)
            await asyncio.sleep(2.0)  # the engines' last lines
            return Emulated(
                result=rig.readings.result(),
                control_plane_cores=cores,
                starts=rig.readings.starts(),
            )
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)


async def _first(waiting: Coroutine[Any, Any, None], playing: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the one; the others only end if they fail."""
    done = asyncio.create_task(waiting)
    pending = {done, *playing}
    while not done.done():
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()


@asynccontextmanager
async def _rig(
    setting: Setting, emulation: Emulation, trainer: Mapping[str, object]
) -> AsyncIterator[_Rig]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamflow-bench-")))
        rig = _Rig(setting, emulation, folder, trainer)
        before = set(psutil.Process().children())
        redis_url = stack.enter_context(redis_server(FAST))
        rig.control_plane += set(psutil.Process().children()) - before
        await rig.start(stack, redis_url)
        yield rig


class _Rig:
    def __init__(
        self,
        setting: Setting,
        emulation: Emulation,
        folder: Path,
        trainer: Mapping[str, object],
    ) -> None:
        self._setting, self._emulation, self._folder = setting, emulation, folder
        self._trainer = trainer
        self._model = make_byte_model(folder / "model")
        (self._model / "emulation.json").write_text(json.dumps(asdict(emulation)))
        self._agent = EmulatedAgent(setting.workload, setting.seed, emulation)
        self._submitted = 0
        self.control_plane: list[psutil.Process] = []
        self.readings = Readings(
            setting=setting,
            speed=emulation.speed,
            trainer_file=folder / "metrics.jsonl",
            gang_file=folder / "gang.jsonl",
            engine_folder=self._model,
        )
        """What they wrote."""

    async def start(self, stack: AsyncExitStack, redis_url: str) -> None:
        """Start every process, in the order in which they need each other."""
        setting, split = self._setting, self._setting.split
        self._manager = await self._service(
            stack, "trajectory_manager", redis_url=redis_url, max_queued_tasks=1 << 20
        )
        await self._create_run(stack)
        weights = await self._service(
            stack, "services.weights", redis_url=redis_url, folder=self._folder / "weights"
        )
        self._scheduler = await self._service(
            stack, "scheduler", redis_url=redis_url, lending=setting.lending
        )
        trainer = await self._service(
            stack,
            "bench.sim.emulation.trainer",
            run_id=_RUN,
            model=self._model,
            checkpoint__folder=self._folder / "checkpoints",
            tracking__metrics_file=self.readings.trainer_file,
            trajectory_manager=self._manager,
            weights=weights,
            gang__nodes=split.gang,
            num_steps=(setting.warm_up + setting.steps + 2) * setting.mode.parts,
            publish__every=setting.mode.parts,
            **({"scheduler": self._scheduler} if split.both else {}),
            **self._trainer,
        )
        await self._nodes(stack, weights, trainer)
        self._gateway = await self._service(
            stack,
            "rollout.gateway",
            run_id=_RUN,
            model=self._model,
            trajectory_manager=self._manager,
            scheduler=self._scheduler,
            weights=weights,
            dispatch=setting.dispatch,
            max_version_lag=setting.most_behind,
        )

    def parts(self) -> list[Coroutine[Any, Any, None]]:
        """What is played around the services, for as long as the run goes on."""
        parts = [self._act(), self._submit(), self._follow_nodes()]
        return [*parts, self._hold_weights()] if self._setting.mode.barrier else parts

    async def until_step(self, step: int) -> None:
        """Wait until an optimizer step has ended."""
        while self.readings.num_steps() < step:
            await asyncio.sleep(_POLL_SECONDS)

    async def _until_served(self, step: int) -> None:
        """Wait until every server has a step's weights: what begins earlier would be too old."""
        await self.until_step(step)
        wanted = self.readings.weight_version(step)
        async with AsyncExitStack() as stack:
            servers = [await _server(stack, port) for port in self._server_ports.values()]
            while min([await _weight_version(server) for server in servers]) < wanted:
                await asyncio.sleep(_POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """Of the control plane."""
        times = (process.cpu_times() for process in self.control_plane)
        return sum(float(spent.user + spent.system) for spent in times)

    async def _act(self) -> None:
        """Be the agents."""
        setting = self._setting
        nodes = setting.split.rollout + setting.split.both
        runner = RunnerConfig(
            run_id=_RUN,
            gateway=self._gateway,
            concurrency=min(
                setting.workload.rollouts_per_node * nodes,
                setting.workload.rollouts_per_step * (1 + setting.ahead),
            ),
        )
        await AgentRunner(self._agent, runner).run(asyncio.Event())

    async def _submit(self) -> None:
        """Be the dataloader: all tasks at once, or a batch for each step whose weights serve."""
        mode, size = self._setting.mode, self._setting.workload.groups_per_step
        steps = self._setting.warm_up + self._setting.steps + 8
        async with connect(self._manager) as channel:
            stub = async_stub(TaskServiceStub, channel)
            for step in range(steps):
                if mode.admission == "published":
                    await self._until_served(step - (mode.ahead or 0))
                await self._submit_batch(stub, step * size, (step + 1) * size)
        await asyncio.Event().wait()

    async def _submit_batch(self, stub: TaskServiceAsyncStub, first: int, end: int) -> None:
        tasks = [
            trajectory_pb2.Task(
                task_id=f"group-{n}",
                payload_json=json.dumps({"group": n}),
                purpose=tokens_pb2.PURPOSE_TRAIN,
            )
            for n in range(first, end)
        ]
        self._submitted += len(tasks) * self._setting.workload.group_size
        request = task_service_pb2.SubmitTasksRequest(run_id=_RUN, tasks=tasks)
        await retrying(lambda: stub.SubmitTasks(request))

    async def _follow_nodes(self) -> None:
        """Let rollouts begin for as many nodes as serve."""
        async with connect(self._scheduler) as channel:
            stub = async_stub(SchedulerServiceStub, channel)
            while True:
                nodes = (await retrying(lambda: stub.ListNodes(pb.ListNodesRequest()))).nodes
                serving = [
                    node
                    for node in nodes
                    if node.assignment.tag == "rollout" and node.state == pb.NODE_STATE_ACTIVE
                ]
                room = self._setting.workload.rollouts_per_node * len(serving)
                await self._agent.room.resize(room)
                await asyncio.sleep(_FOLLOW_SECONDS)

    async def _hold_weights(self) -> None:
        """Keep new weights back for as long as anything is generated."""
        barrier = self.readings.gang_file.with_name("barrier")
        while True:
            if self._agent.num_ended < self._submitted:
                barrier.touch()
            else:
                barrier.unlink(missing_ok=True)
            await asyncio.sleep(_POLL_SECONDS)

    async def _create_run(self, stack: AsyncExitStack) -> None:
        setting, workload = self._setting, self._setting.workload
        config = trajectory_pb2.RunConfig(
            group_size=workload.group_size,
            groups_per_step=workload.groups_per_step // setting.mode.parts,
            max_staleness=setting.most_behind,
            staleness_policy=trajectory_pb2.STALENESS_POLICY_WAIT,
            max_publish_wait=Duration(seconds=3600),
            lease_duration=Duration(seconds=600),
            durability=trajectory_pb2.DURABILITY_FAST,
        )
        channel = await stack.enter_async_context(connect(self._manager))
        store = async_stub(RunServiceStub, channel)
        request = run_service_pb2.CreateRunRequest(run_id=_RUN, config=config)
        await retrying(lambda: store.CreateRun(request))

    async def _nodes(self, stack: AsyncExitStack, weights: str, trainer: str) -> None:
        """Those that only train are the trainer's own, and have no agent."""
        tags = node_tags(self._setting.split)
        nodes = {name: list(can) for name, can in tags.items() if "rollout" in can}
        settings = NodesSettings(
            run_id=_RUN,
            model=str(self._model),
            slots=self._setting.workload.slots,
            weights=weights,
            scheduler=self._scheduler,
            trainer=trainer,
            nodes=nodes,
        )
        file = self._folder / "nodes.json"
        settings.write(file)
        for part in ("servers", "agents"):
            command = ["-m", "bench.sim.emulation.nodes", part, str(file)]
            ready = ready_file(settings, part)
            process = await stack.enter_async_context(_process(command, ready, {}))
            if part == "agents":
                self.control_plane.append(psutil.Process(process.pid))
        self._server_ports = json.loads(ready_file(settings, "servers").read_text())

    async def _service(self, stack: AsyncExitStack, module: str, **flags: object) -> str:
        """Start one process of its own; its address."""
        given = {"port": 0, "admin_port": -1, "log_level": "warning", "drain_seconds": 1, **flags}
        command = ["-m", module]
        for name, value in given.items():
            command.append(f"--{name.replace('__', '.').replace('_', '-')}")
            command += [] if value is True else [str(value)]
        ready = self._folder / f"{module}.port"
        environment = {"SEAMFLOW_PORT_FILE": str(ready)}
        process = await stack.enter_async_context(_process(command, ready, environment))
        if not module.startswith("bench."):
            self.control_plane.append(psutil.Process(process.pid))
        return f"127.0.0.1:{json.loads(ready.read_text())['port']}"


async def _server(stack: AsyncExitStack, port: int) -> RolloutServerServiceAsyncStub:
    channel = await stack.enter_async_context(connect(f"127.0.0.1:{port}"))
    return async_stub(RolloutServerServiceStub, channel)


async def _weight_version(server: RolloutServerServiceAsyncStub) -> int:
    request = server_pb.GetServerInfoRequest()
    return (await retrying(lambda: server.GetServerInfo(request))).weight_version


@asynccontextmanager
async def _process(
    command: list[str], ready: Path, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=inherited)
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not ready.exists():  # noqa: ASYNC240 -- one stat
                if process.returncode is not None:
                    raise RuntimeError(f"{command} ended with exit code {process.returncode}")
                await asyncio.sleep(_POLL_SECONDS)
        yield process
    finally:
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Told to end, and killed if it does not."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
