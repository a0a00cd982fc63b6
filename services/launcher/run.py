"""A run, from the first process to the summary, in its phases."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from seamflow.evaluator.v1 import evaluator_service_pb2 as evaluator_pb
from seamflow.inspect.lives import STOPPING, give_sign, note
from seamflow.inspect.run_files import read_steps
from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from services.chassis.errors import DependencyUnavailable
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.evaluation import (
    AROUND_TRAINING,
    WITHOUT_TRAINING,
    FollowedEvaluator,
)
from services.launcher.hosts.other_hosts import OtherHosts
from services.launcher.layout import Layout
from services.launcher.phases.run_summary import RunSummary
from services.launcher.phases.start import Start
from services.launcher.phases.training import Learned, Training, learn, submit_tasks
from services.launcher.phases.watch import Watch
from services.launcher.report.notes import stopping_note
from services.launcher.report.view import View
from services.launcher.service_clients import Services, connected
from services.launcher.supervisor import Supervisor, run_until_failure
from services.lib.evaluation import (
    EvaluationConfig,
    EvaluationLine,
    read_evaluations,
)

_SECONDS = 1.0
_DELETED = " (deleted)"

_AGENT_END_SECONDS = 10.0
_AGENT_POLL_SECONDS = 2.0
_REFRESH_SECONDS = 0.5
T = TypeVar("T")


async def watch_folder(folder: Path, seconds: float = _SECONDS) -> NoReturn:
    """Look at `folder` every `seconds`.

    Raises:
        DependencyUnavailable: it was moved, deleted or replaced, or cannot be written any more:
            what processes write would go astray, half here and half there.
    """
    with opened_folder(folder) as descriptor:
        while True:
            await asyncio.sleep(seconds)
            problem = await asyncio.to_thread(folder_problem, folder, descriptor)
            if problem:
                raise DependencyUnavailable("run folder", problem)
            give_sign(folder)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, which knows it by any later name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folder_problem(folder: Path, descriptor: int) -> str:
    """What is wrong with the folder that was opened as `descriptor`; empty if it is usable."""
    if not _is_same(folder, descriptor):
        return f"{folder} {_whereabouts(descriptor)}, so that the run cannot go on"
    # By the descriptor: the folder may be moved at any moment.
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        cure = "mount its file system for writing, then --resume"
        return f"{folder} is on a file system that became read-only: {cure}"
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=descriptor):
        cure = "give this user its permissions back, then --resume"
        return f"{folder} cannot be written any more: {cure}"
    return ""


def _is_same(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _whereabouts(descriptor: int) -> str:
    """What became of the folder, as far as the system tells."""
    try:
        now = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return "is gone: put it back there, then --resume"
    if now.endswith(_DELETED):
        return "was deleted: put a copy there and --resume, or start a new run"
    return f"was moved to {now}: move it back, then --resume"


async def end_run(
    config: LauncherConfig,
    plans: Mapping[str, ProcessPlan],
    processes: Supervisor,
    services: Services,
) -> None:
    """End the run, and give agents with programs of their own time to notice it."""
    request = run_pb.EndRunRequest(run_id=services.run_id)
    await retrying(lambda: services.runs.EndRun(request))
    if "agent" in plans:
        await processes.stop("agent", patience=_AGENT_END_SECONDS)
    elif config.are_agents_outside:
        await _wait_for_rollouts(services)


async def _wait_for_rollouts(services: Services) -> None:
    """Wait for the rollouts of agents from outside, then until they have asked for more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_AGENT_END_SECONDS):
            ready = (await services.snapshot()).readiness
            while ready is None or ready.num_running_rollouts:
                await asyncio.sleep(_REFRESH_SECONDS)
                ready = (await services.snapshot()).readiness
    await asyncio.sleep(_AGENT_POLL_SECONDS)


async def drain_nodes(services: Services) -> None:
    """Return every lent node before the processes end."""
    for node in await _present(services):
        request = scheduler_pb.DrainNodeRequest(node_id=node.node_id, drain=True)
        await retrying(lambda request=request: services.scheduler.DrainNode(request))  # type: ignore[misc]
    while any(
        node.assignment.epoch != node.reported_epoch or node.assignment.tag
        for node in await _present(services)
    ):
        await asyncio.sleep(_REFRESH_SECONDS / 5)
    await asyncio.sleep(_REFRESH_SECONDS)  # the change feed's last entries


async def _present(services: Services) -> list[scheduler_pb.Node]:
    """The nodes but those that are lost, such as those of a host that has left."""
    nodes = await services.nodes()
    return [node for node in nodes if node.state != scheduler_pb.NODE_STATE_LOST]


@dataclass(slots=True)
class Run:
    """One training run, whose launcher is on this machine."""

    config: LauncherConfig
    layout: Layout
    plans: dict[str, ProcessPlan]
    view: View
    supervisor: Callable[[Path], Supervisor] = Supervisor
    """Makes the supervisor of the processes, which log to the folder that it is given."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    other_hosts: OtherHosts | None = None
    accepts_lost_samples: bool = False
    """Whether the run goes on where the store has lost it."""
    start: float = field(default_factory=time.monotonic)
    watch: Watch = field(init=False)
    """What is counted from start to end."""
    learned: Learned = field(default_factory=Learned)

    def __post_init__(self) -> None:
        self.watch = Watch(self.config, self.layout, self.plans, self.view)

    async def train(self) -> dict[str, Any]:
        """Start all processes, train, end them, and return the summary."""
        return await self._with_processes(self._train)

    async def evaluate(self) -> EvaluationLine:
        return await self._with_processes(self._evaluate)

    async def serve(self) -> None:
        """Start all processes and keep them; ends by Ctrl-C, as `KeyboardInterrupt`."""
        await self._with_processes(self._serve)

    async def _with_processes(self, work: Callable[[Supervisor, Services], Awaitable[T]]) -> T:
        async with (
            self.supervisor(self.layout.logs()) as processes,
            connected(self.config, self.layout) as services,
        ):
            processes.tell = self.view.note
            watching = [watch_folder(self.layout.folder)]
            if self.other_hosts is not None:
                watching.append(self.other_hosts.watch())
            return await run_until_failure(
                processes, work(processes, services), *watching, stopping=self._stopping
            )

    def _stopping(self, reason: str) -> None:
        note(self.layout.folder, STOPPING, reason)
        steps = read_steps(self.layout.folder / "metrics.jsonl")
        self.view.note(stopping_note(reason, self.watch.snapshot, steps))

    async def _train(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        async with self._started(processes, services):
            evaluator = await self._evaluator(processes, services, AROUND_TRAINING)
            if evaluator is not None:
                await evaluator.until(evaluator_pb.EVALUATOR_STATE_BESIDE_TRAINING)
            async with _followed(evaluator):
                await self._learn(processes, services)
            if evaluator is not None:
                await self._evaluate_last(evaluator, processes, services)
            await self._end(processes, services)
            await drain_nodes(services)
        return await self._summarize(processes, services)

    async def _evaluate(self, processes: Supervisor, services: Services) -> EvaluationLine:
        async with self._started(processes, services):
            evaluator = await self._evaluator(processes, services, WITHOUT_TRAINING)
            assert evaluator is not None, "checked before the first process starts"
            await evaluator.finished(is_asked=False)
            await self._end(processes, services)
        return read_evaluations(self.layout.folder / "evaluation.jsonl")[-1]

    async def _serve(self, processes: Supervisor, services: Services) -> None:
        async with self._started(processes, services):
            self.view.phase("serving until Ctrl-C")
            await submit_tasks(processes, self.plans, self.watch)
            status = await self._training(processes, services).finished()
            self.view.note(f"trained for all {status.num_steps} steps; still serving")
            await asyncio.Event().wait()

    @asynccontextmanager
    async def _started(self, processes: Supervisor, services: Services) -> AsyncIterator[None]:
        """All processes but evaluator and dataloader, followed by the view."""
        watching = asyncio.create_task(self.watch.follow(processes, services))
        try:
            await self._start_core_services(processes)
            start = self._phase_of_start()
            await start.prepare()
            await start.create_run(services)
            self.watch.is_created = True
            async with nullcontext() if self.other_hosts is None else self.other_hosts.serving():
                await start.others(processes, services)
                yield
        finally:
            watching.cancel()

    def _phase_of_start(self) -> Start:
        return Start(self.config, self.layout, self.plans, self.view, self.accepts_lost_samples)

    async def _start_core_services(self, processes: Supervisor) -> None:
        await self._phase_of_start().core_services(processes)

    async def _evaluator(
        self,
        processes: Supervisor,
        services: Services,
        phases: Mapping[evaluator_pb.EvaluatorState.ValueType, str],
    ) -> FollowedEvaluator | None:
        """The evaluator, started; None: there is nothing to evaluate on."""
        if "evaluator" not in self.plans:
            return None
        await processes.start(self.plans["evaluator"])
        return FollowedEvaluator(services.evaluator, self.layout.run_id, self.view, phases)

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        """Submit tasks until the trainer has finished and every server has its last weights."""
        training = self._training(processes, services)
        self.learned = await learn(training, self.plans, self.watch)

    def _training(self, processes: Supervisor, services: Services) -> Training:
        return Training(self.config, self.layout, self.view, processes, services)

    async def _evaluate_last(
        self, evaluator: FollowedEvaluator, processes: Supervisor, services: Services
    ) -> None:
        """Let the last weights be evaluated, if a rollout server is left for that."""
        is_without_tasks = self.learned.is_without_tasks
        training = self._training(processes, services)
        if not is_without_tasks or await training.some_server_serves():
            await evaluator.finished(is_asked=is_without_tasks)
        self.learned = replace(self.learned, stopped_early=evaluator.stopped_early)

    async def _end(self, processes: Supervisor, services: Services) -> None:
        self.view.phase("ending the run")
        await end_run(self.config, self.plans, processes, services)

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        self.view.phase("summarizing")
        if "agent_runner" in self.plans:
            await processes.stop("agent_runner")
        facts = (self.config, self.layout, self.evaluation, self.learned, self.watch)
        return await RunSummary(*facts, processes, services).made(self.start)


@asynccontextmanager
async def _followed(evaluator: FollowedEvaluator | None) -> AsyncIterator[None]:
    """What the evaluator says is shown meanwhile."""
    following = None if evaluator is None else asyncio.create_task(evaluator.follow())
    try:
        yield
    finally:
        if following is not None:
            following.cancel()
