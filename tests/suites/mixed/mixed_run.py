"""A small training run whose processes are changed for those of another release meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.inspect.snapshot import Snapshot
from seamflow.pages import pages
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb

from services.launcher.child_process import ProcessPlan
from services.launcher.run import Run
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from tests.chaos.trainer.checker import History, Verdict, check_delivery
from tests.lib.trained_samples import steps_with_samples
from tests.suites.mixed.changes import Change
from tests.suites.mixed.source_tree import SourceTree

CHANGE_SECONDS = 300.0
"""Bound of one change: stop, start, serve, and optimizer steps. It takes seconds; a crash-loop ends
it earlier."""
MAX_STALENESS = 1
"""Steps that generation is ahead of training."""
_STEPS = MAX_STALENESS + 2
"""Steps committed after each change: one under way, those whose samples were there already, and one
whose samples were made after the change."""
_LAST_STEPS = 2
"""Of the trainer that ends the run."""
_LOOK_SECONDS = 0.2
_TAIL = 12
_WITHOUT_SERVER = ("agent_runner",)


class ChangeError(Exception):
    """The run did not go on after a change."""


@dataclass(slots=True, kw_only=True)
class MixedRun(Run):
    """Training that goes on through every change."""

    trees: dict[str, SourceTree]
    """By process, the tree that it runs from."""
    changes: Sequence[Change]
    """In order."""
    bound_seconds: float = CHANGE_SECONDS
    """Bound of one change."""
    done: list[float] = field(default_factory=list)
    """Seconds that each change took, until further steps were committed."""
    current: Change | None = None
    """The change under way."""

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        """Start training, make the changes, and let the trainer finish."""
        await processes.start(self._plan("dataloader"))
        self.view.phase("training: waiting for the first steps")
        await self._within_bound("all processes", self._steps_follow(services))
        for number, change in enumerate(self.changes, 1):
            self.view.phase(f"{number}/{len(self.changes)} {change}")
            self.current, began = change, time.monotonic()
            await self._within_bound(str(change), self._apply(change, processes, services))
            self.done.append(time.monotonic() - began)
        self.current = None
        await self._finish(processes, services)

    async def _apply(self, change: Change, processes: Supervisor, services: Services) -> None:
        await processes.stop(change.process)
        self.trees[change.process] = change.tree
        self._port_file(change.process).unlink(missing_ok=True)
        await processes.start(self._plan(change.process))
        await self._serves(change.process)
        served = time.time()
        await self._steps_follow(services)
        while not await self._takes_part(change.process, served, services):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serves(self, process: str) -> None:
        """Wait until the process takes calls; one without a server is waited for by its work."""
        while process not in _WITHOUT_SERVER and not self._port_file(process).exists():
            await asyncio.sleep(_LOOK_SECONDS)

    async def _steps_follow(self, services: Services, steps: int = _STEPS) -> None:
        """Wait until `steps` further steps are committed."""
        first: int | None = None
        while True:
            committed = await self._committed(services)
            if first is None:
                first = committed
            elif committed is not None and committed >= first + steps:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _committed(self, services: Services) -> int | None:
        request = sample_pb.GetReadinessRequest(run_id=self.layout.run_id)
        with suppress(grpc.aio.AioRpcError):  # the manager is being changed
            answer = await services.samples.GetReadiness(request, timeout=5)
            return int(answer.readiness.committed_step)
        return None

    async def _takes_part(self, process: str, since: float, services: Services) -> bool:
        """Whether a process does its own work, where steps alone do not show it."""
        kind, _, node_id = process.partition("-")
        if kind == "dataloader":
            return (self.layout.folder / "dataloader.json").stat().st_mtime > since
        if kind == "ranker":
            return await services.ranker_status() is not None
        now = await services.snapshot()
        if kind == "rollout_server":
            return _is_current(node_id, now)
        if kind in ("node_agent", "scheduler"):
            heard = {node.node_id: node.heartbeat_time.ToSeconds() for node in now.nodes or ()}
            nodes = [node_id] if node_id else [node.node_id for node in self.config.node_plans()]
            return all(heard.get(name, 0) > since for name in nodes)
        return True

    async def _within_bound(self, what: str, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.bound_seconds):
                await work
        except TimeoutError:
            message = f"{what}: training did not go on within {self.bound_seconds:.0f} s"
            raise ChangeError(f"{message}{self._log_ends()}") from None

    def _log_ends(self) -> str:
        names = [self.current.process] if self.current is not None else list(self.plans)
        ends = []
        for name in names:
            with suppress(FileNotFoundError):
                file = self.layout.logs() / f"{name}.log"
                lines = file.read_text(errors="replace").splitlines()[-_TAIL:]
                ends.append(f"\nthe end of {file}:\n  " + "\n  ".join(lines))
        return "".join(ends)

    async def _finish(self, processes: Supervisor, services: Services) -> None:
        """A last trainer takes a few more steps and ends the training."""
        await processes.stop("trainer")
        steps = int(await self._committed(services) or 0) + _LAST_STEPS
        plan = self._plan("trainer")
        last = {**plan.environment, "SEAMFLOW_TRAINER_NUM_STEPS": str(steps)}
        self.view.phase(f"a last trainer ends the training at step {steps}")
        await processes.start(replace(plan, environment=last))
        await self._within_bound("the last trainer", self._finished(processes, services))

    async def _finished(self, processes: Supervisor, services: Services) -> None:
        status = None
        while status is None or status.state != trainer_pb.TRAINER_STATE_FINISHED:
            await asyncio.sleep(_LOOK_SECONDS)
            status = await services.trainer_status()
        await processes.stop("dataloader")
        await self._training(processes, services).wait_for_version(status.weight_version)

    def _plan(self, process: str) -> ProcessPlan:
        return self.trees[process].started(self.plans[process], self._port_file(process))

    def _port_file(self, process: str) -> Path:
        return self.layout.folder / f"{process}.port"

    async def _start_core_services(self, processes: Supervisor) -> None:
        self.plans |= {name: self._plan(name) for name in self.trees}
        await Run._start_core_services(self, processes)

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        """The launcher's summary, with the seconds of each change and the samples' verdict."""
        summary = await Run._summarize(self, processes, services)
        return {**summary, **asdict(await self._delivered(services))}

    async def _delivered(self, services: Services) -> Verdict:
        steps = steps_with_samples(self.layout.folder / "metrics.jsonl")
        trained = [(step["step"], step["sample_ids"]) for step in steps]
        return check_delivery(
            History(trained=trained, committed=await self._ledger(services)),
            num_steps=len(trained),
            finished=(),
            available=[name async for name in self._available(services, len(trained))],
            group_size=self.config.group_size,
            groups_per_step=self.config.groups_per_step,
        )

    async def _ledger(self, services: Services) -> dict[str, int]:
        """The step that consumed each committed sample."""
        request = sample_pb.ListSamplesRequest(run_id=self.layout.run_id)
        listed = pages(services.samples.ListSamples, request)
        entries = [entry async for page in listed for entry in page.samples]
        return {e.sample.sample_id: e.committed_step for e in entries if e.committed_step}

    async def _available(self, services: Services, step: int) -> AsyncIterator[str]:
        """The samples that the ledger would give the next trainer."""
        run_id = self.layout.run_id
        reconcile = sample_pb.ReconcileRequest(run_id=run_id, step=step, trainer_id="audit")
        epoch = (await services.samples.Reconcile(reconcile)).epoch
        while True:
            step += 1
            request = sample_pb.LeaseSamplesRequest(
                run_id=run_id, epoch=epoch, step=step, min_groups=1, wait=Duration()
            )
            page = await services.samples.LeaseSamples(request)
            if not page.lease_token:
                return
            for sample in page.samples:
                yield sample.sample_id


def _is_current(node_id: str, now: Snapshot) -> bool:
    """Whether a node's rollout server answers, and has loaded weights like those of the others."""
    newest = max((server.weight_version for server in now.answering_servers.values()), default=0)
    return (
        node_id in now.answering_servers
        and 0 < newest <= now.answering_servers[node_id].weight_version + 1
    )
