"""Training from the launcher's side: until the last step, or until no task is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from seamflow.common.v1 import tokens_pb2
from seamflow.inspect.lives import LEARNED, note, note_learning
from seamflow.inspect.snapshot import Snapshot
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.checks.run_settings import trained_rewards
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.phases.watch import Watch
from services.launcher.report.occupancy import CoresBusy
from services.launcher.report.summary import trajectories
from services.launcher.report.view import View
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from services.lib.evaluation import check_trained_reward

_SECONDS = 5.0
"""All must stay so for this long: a sample may be replaced."""

_REFRESH_SECONDS = 0.5
_LOADED_SECONDS = 0.1
"""Less than a step of the smallest model: its first one counts too."""


class UsedUpTasks:
    """Looks at a run whose dataloader has submitted its last task."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def look(self, snapshot: Snapshot, now: float) -> bool:
        """Whether the trainer would wait for ever; `now` in seconds of a monotonic clock."""
        ready, trainer = snapshot.readiness, snapshot.trainer
        works = ready is None or (
            ready.num_queued_tasks
            or ready.num_running_rollouts
            or ready.num_ready_groups >= ready.groups_per_step
            or ready.leased_step > (trainer.step if trainer is not None else 0)
        )
        waits = trainer is not None and trainer.state in (
            trainer_pb.TRAINER_STATE_WAITING,
            trainer_pb.TRAINER_STATE_SUSPENDED,
        )
        if works or not waits:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._seconds


@dataclass(slots=True)
class Training:
    """The training of one run, which its trainer does."""

    config: LauncherConfig
    layout: Layout
    view: View
    processes: Supervisor
    services: Services
    is_without_tasks: bool = False

    async def begun(self) -> None:
        """Wait until the trainer has loaded its model, which is no time of training."""
        while await self.services.trainer_status() is None:
            await asyncio.sleep(_LOADED_SECONDS)

    async def finished(self) -> trainer_pb.GetStatusResponse:
        """Wait until the trainer has made its last step, or no task is left for another one.

        Raises:
            ConfigError: training does not know which of a rollout's rewards to use.
        """
        status, used_up, is_checked = await self.services.trainer_status(), UsedUpTasks(), False
        while status is None or status.state != trainer_pb.TRAINER_STATE_FINISHED:
            await asyncio.sleep(_REFRESH_SECONDS)
            snapshot = await self.services.snapshot()
            status = snapshot.trainer or status
            if status is not None:
                self.view.progress(status.step, status.num_steps)
            is_checked = is_checked or await self._check_rewards(snapshot)
            has_all = "dataloader" in self.processes.ended and not self.config.serve
            if status and has_all and used_up.look(snapshot, time.monotonic()):
                return await self._without_tasks(status)
        return status

    async def _check_rewards(self, snapshot: Snapshot) -> bool:
        """Check the rewards of one finished rollout; whether there was one."""
        if snapshot.readiness is None or not snapshot.readiness.num_ready_groups:
            return False
        names = trained_rewards(self.config, self.layout.config_file)
        async for each in trajectories(self.services, headers_only=True):
            is_finished = each.state == trajectory_pb2.ROLLOUT_STATE_FINISHED
            if is_finished and each.purpose == tokens_pb2.PURPOSE_TRAIN:
                check_trained_reward(each, names)
                return True
        return False

    async def _without_tasks(
        self, status: trainer_pb.GetStatusResponse
    ) -> trainer_pb.GetStatusResponse:
        """End training before its last step; its newest step gets a checkpoint."""
        self.is_without_tasks = True
        self.view.note(
            f"all tasks are used up: training ends after step {status.step} of {status.num_steps}. "
            "dataloader.epochs = 0 repeats them; continue by --resume --set dataloader.epochs=0"
        )
        if status.step:
            request = trainer_pb.SaveCheckpointRequest()
            await retrying(lambda: self.services.trainer.SaveCheckpoint(request))
        return await self.services.trainer_status() or status

    async def wait_for_version(self, version: int) -> None:
        """Wait until all rollout servers that may get them have the weights of a version."""
        self.view.phase(f"rollout servers load weight version {version}")
        while True:
            snapshot = await self.services.snapshot()
            servers = snapshot.answering_servers
            lost = scheduler_pb.NODE_STATE_LOST  # such as those of a host that has left
            away = {node.node_id for node in snapshot.nodes or () if node.state == lost}
            others = [
                node
                for node in self.services.rollout_nodes
                if (node not in servers and node not in away)
                or (node in servers and not self._rests(servers[node]))
            ]
            if all(n in servers and servers[n].weight_version == version for n in others):
                return
            await asyncio.sleep(_REFRESH_SECONDS)

    async def some_server_serves(self) -> bool:
        """Whether an evaluation has a rollout server after training that is without tasks."""
        servers = (await self.services.snapshot()).answering_servers
        if all(_is_released(server) for server in servers.values()):
            self.view.note("the trainer has the only node that rolls out: no evaluation afterwards")
            return False
        return True

    def _rests(self, server: server_pb.GetServerInfoResponse) -> bool:
        """Whether a server has given its memory to a trainer that will not give it back: without
        tasks the trainer waits for its next step."""
        return self.is_without_tasks and _is_released(server)


def _is_released(server: server_pb.GetServerInfoResponse) -> bool:
    return server.state == server_pb.SERVER_STATE_RELEASED


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of the training of a run after it."""

    seconds: float = 0.0
    cores_busy: float = 0.0
    is_without_tasks: bool = False
    stopped_early: str = ""
    """Why the evaluator ended it early; empty: it did not."""


async def learn(training: Training, plans: Mapping[str, ProcessPlan], watch: Watch) -> Learned:
    """Submit tasks until the trainer has finished and every server has its last weights."""
    await submit_tasks(training.processes, plans, watch)
    await training.begun()
    training.view.phase("training")
    began = time.monotonic() - note_learning(training.layout.folder)
    cores, watch.is_learning = CoresBusy(), True
    watch.occupancy.add(await training.services.snapshot())
    status = await training.finished()
    watch.occupancy.add(await training.services.snapshot())
    watch.is_learning = False
    note(training.layout.folder, LEARNED)
    learned = Learned(time.monotonic() - began, cores.mean(), training.is_without_tasks)
    if "dataloader" in plans:
        await training.processes.stop("dataloader")
    await training.wait_for_version(status.weight_version)
    return learned


async def submit_tasks(
    processes: Supervisor, plans: Mapping[str, ProcessPlan], watch: Watch
) -> None:
    """Submit tasks, unless agents bring their own; tell of settings that no process knows."""
    if "dataloader" in plans:
        await processes.start(plans["dataloader"])
    for warning in processes.warnings():
        watch.view.note(warning)
