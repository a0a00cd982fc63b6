"""One run of the real control plane on emulated nodes, measured like a simulated one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.runner import AgentRunner, RunnerConfig
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2, trajectory_service_pb2
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.peers.redis_process import FAST, redis_server
from bench.pipeline.cluster import NodeSeconds
from bench.pipeline.emulation.agent import EmulatedAgent
from bench.pipeline.emulation.nodes import NodesSettings, ready_file
from bench.pipeline.emulation.prompts import Emulation
from bench.pipeline.simulator import Setting
from tests.rollout.gateway.support import make_byte_model

if TYPE_CHECKING:
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Emulated", "emulate"]

_RUN = "pipeline"
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What came of a run, in emulated seconds."""

    rollouts_per_second: float
    """Trained."""
    node_seconds: NodeSeconds
    """Of all nodes."""
    staleness: tuple[int, ...]
    """Greatest of each step."""
    control_plane_cores: float
    """Cores that the control plane took: its services, Redis and the node agents."""


async def emulate(setting: Setting, emulation: Emulation) -> Emulated:
    """Run it."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(_rig(setting, emulation))
        done = asyncio.create_task(rig.until_step(setting.warm_up + setting.steps))
        agents = asyncio.create_task(rig.act())
        tasks = asyncio.create_task(rig.submit())
        try:
            await rig.until_step(setting.warm_up)
            cpu, began = rig.cpu_seconds(), time.time()
            await asyncio.wait({done, agents}, return_when=asyncio.FIRST_COMPLETED)
            for task in (done, agents, tasks):
                if task.done():
                    task.result()
            cores = (rig.cpu_seconds() - cpu) / (time.time() - began)
            await asyncio.sleep(2.0)  # the engines' last lines
            return rig.measured(cores)
        finally:
            for task in (done, agents, tasks):
                task.cancel()
            await asyncio.gather(done, agents, tasks, return_exceptions=True)


@asynccontextmanager
async def _rig(setting: Setting, emulation: Emulation) -> AsyncIterator[_Rig]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seamflow-bench-")))
        rig = _Rig(setting, emulation, folder)
        before = set(psutil.Process().children())
        redis_url = stack.enter_context(redis_server(FAST))
        rig.control_plane += set(psutil.Process().children()) - before
        await rig.start(stack, redis_url)
        yield rig


class _Rig:
    def __init__(self, setting: Setting, emulation: Emulation, folder: Path) -> None:
        self._setting, self._emulation, self._folder = setting, emulation, folder
        self._model = make_byte_model(folder / "model")
        (self._model / "emulation.json").write_text(json.dumps(asdict(emulation)))
        self.control_plane: list[psutil.Process] = []

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
        scheduler = await self._service(
            stack, "scheduler", redis_url=redis_url, lending=setting.lending
        )
        trainer = await self._service(
            stack,
            "bench.pipeline.emulation.trainer",
            run_id=_RUN,
            model=self._model,
            checkpoint_folder=self._folder / "checkpoints",
            metrics_file=self._metrics,
            trajectory_manager=self._manager,
            weights=weights,
            gang_nodes=split.gang,
            num_steps=(setting.warm_up + setting.steps + 2) * setting.mode.parts,
            publish_every=setting.mode.parts,
            **({"scheduler": scheduler} if split.both else {}),
        )
        await self._nodes(stack, weights, scheduler, trainer)
        self._gateway = await self._service(
            stack,
            "rollout.gateway",
            run_id=_RUN,
            model=self._model,
            trajectory_manager=self._manager,
            scheduler=scheduler,
            weights=weights,
            dispatch=setting.dispatch,
            max_version_lag=setting.bound,
        )

    async def act(self) -> None:
        """Be the agents."""
        setting, split = self._setting, self._setting.split
        nodes = split.rollout or split.both
        runner = RunnerConfig(
            run_id=_RUN,
            gateway=self._gateway,
            trajectory_manager=self._manager,
            concurrency=setting.workload.rollouts_per_node * nodes,
        )
        agent = EmulatedAgent(setting.workload, setting.seed, self._emulation)
        await AgentRunner(agent, runner).run(asyncio.Event())

    async def submit(self) -> None:
        """Be the dataloader: all tasks at once, or a batch for each step that was published."""
        mode, size = self._setting.mode, self._setting.workload.groups_per_step
        steps = self._setting.warm_up + self._setting.steps + 8
        async with connect(self._manager) as channel:
            stub: TaskServiceAsyncStub = TaskServiceStub(channel)  # type: ignore[assignment]
            if mode.admission == "leased":
                await self._submit(stub, 0, steps * size)
                return
            for step in range(steps):
                await self.until_step(step - (mode.ahead or 0))
                await self._submit(stub, step * size, (step + 1) * size)

    async def until_step(self, step: int) -> None:
        """Wait until an optimizer step has ended and its weights were published."""
        while len(self._steps()) < step * self._setting.mode.parts:
            await asyncio.sleep(_POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """Of the control plane."""
        times = (process.cpu_times() for process in self.control_plane)
        return sum(float(spent.user + spent.system) for spent in times)

    def measured(self, cores: float) -> Emulated:
        """Between the end of the last step of the warm-up and the end of the last step."""
        setting, speed = self._setting, self._emulation.speed
        parts, lines = setting.mode.parts, self._steps()
        begin = lines[setting.warm_up * parts - 1]["time"]
        end = lines[(setting.warm_up + setting.steps) * parts - 1]["time"]
        seconds = (end - begin) * speed
        within = lines[setting.warm_up * parts : (setting.warm_up + setting.steps) * parts]
        return Emulated(
            rollouts_per_second=setting.steps * setting.workload.rollouts_per_step / seconds,
            node_seconds=self._node_seconds(begin, end),
            staleness=tuple(int(line["max_staleness"]) for line in within),
            control_plane_cores=cores,
        )

    @property
    def _metrics(self) -> Path:
        return self._folder / "metrics.jsonl"

    def _steps(self) -> list[dict[str, float]]:
        return _lines(self._metrics)

    def _node_seconds(self, begin: float, end: float) -> NodeSeconds:
        speed, gang = self._emulation.speed, self._setting.split.gang
        spent = dict.fromkeys(("decode", "prefill", "repeated_prefill", "switching"), 0.0)
        for file in self._model.glob("*.busy.jsonl"):
            lines = _lines(file)
            for name in spent:
                spent[name] += _at(lines, name, end) - _at(lines, name, begin)
        doing = {"training": 0.0, "switching": 0.0}
        for line in _lines(self._folder / "gang.jsonl"):
            overlap = min(end, line["end"]) - max(begin, line["begin"])
            doing[str(line["doing"])] += max(overlap, 0.0) * speed * gang
        generation = spent["decode"] + spent["prefill"]
        switching = spent["switching"] + doing["switching"]
        busy = generation + spent["repeated_prefill"] + switching + doing["training"]
        return NodeSeconds(
            generation=generation,
            training=doing["training"],
            switching=switching,
            repeated_prefill=spent["repeated_prefill"],
            idle=self._setting.split.nodes * (end - begin) * speed - busy,
        )

    async def _create_run(self, stack: AsyncExitStack) -> None:
        setting, workload = self._setting, self._setting.workload
        config = trajectory_pb2.RunConfig(
            group_size=workload.group_size,
            groups_per_step=workload.groups_per_step // setting.mode.parts,
            # A batch may have several parts, and a part counts as a step there.
            max_staleness=(setting.bound + 1) * setting.mode.parts - 1,
            staleness_policy=trajectory_pb2.STALENESS_POLICY_WAIT,
            publish_wait_seconds=3600,
            lease_seconds=600,
            durability=trajectory_pb2.DURABILITY_FAST,
        )
        channel = await stack.enter_async_context(connect(self._manager))
        store: TrajectoryServiceAsyncStub = TrajectoryServiceStub(channel)  # type: ignore[assignment]
        request = trajectory_service_pb2.CreateRunRequest(run_id=_RUN, config=config)
        await retrying(lambda: store.CreateRun(request))

    async def _submit(self, stub: TaskServiceAsyncStub, first: int, end: int) -> None:
        tasks = [
            task_service_pb2.Task(
                task_id=f"group-{n}",
                payload_json=json.dumps({"group": n}),
                purpose=tokens_pb2.PURPOSE_TRAIN,
            )
            for n in range(first, end)
        ]
        request = task_service_pb2.SubmitTasksRequest(run_id=_RUN, tasks=tasks)
        await retrying(lambda: stub.SubmitTasks(request))

    async def _nodes(
        self, stack: AsyncExitStack, weights: str, scheduler: str, trainer: str
    ) -> None:
        split = self._setting.split
        nodes = {f"rollout-{n:04}": ["rollout"] for n in range(split.rollout)}
        nodes |= {f"both-{n:04}": ["rollout", "train"] for n in range(split.both)}
        settings = NodesSettings(
            run_id=_RUN,
            model=str(self._model),
            slots=self._setting.workload.slots,
            weights=weights,
            scheduler=scheduler,
            trainer=trainer,
            nodes=nodes,
        )
        file = self._folder / "nodes.json"
        settings.write(file)
        for part in ("servers", "agents"):
            command = ["-m", "bench.pipeline.emulation.nodes", part, str(file)]
            ready = ready_file(settings, part)
            process = await stack.enter_async_context(_process(command, ready, {}))
            if part == "agents":
                self.control_plane.append(psutil.Process(process.pid))

    async def _service(self, stack: AsyncExitStack, module: str, **flags: object) -> str:
        """Start one process of its own; its address."""
        given = {"port": 0, "admin_port": -1, "log_level": "warning", "drain_seconds": 1, **flags}
        command = ["-m", module]
        for name, value in given.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        ready = self._folder / f"{module}.port"
        environment = {"SEAMFLOW_PORT_FILE": str(ready)}
        process = await stack.enter_async_context(_process(command, ready, environment))
        if not module.startswith("bench."):
            self.control_plane.append(psutil.Process(process.pid))
        return f"127.0.0.1:{json.loads(ready.read_text())['port']}"


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
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _lines(file: Path) -> list[dict[str, float]]:
    if not file.exists():
        return []
    whole = file.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _at(lines: list[dict[str, float]], name: str, moment: float) -> float:
    """A growing number at a moment between two lines."""
    before = max((line for line in lines if line["time"] <= moment), key=lambda line: line["time"])
    after = min((line for line in lines if line["time"] > moment), key=lambda line: line["time"])
    share = (moment - before["time"]) / (after["time"] - before["time"])
    return before[name] + share * (after[name] - before[name])
