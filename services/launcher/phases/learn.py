"""The learning of a run: from its first task to its last weights in every rollout server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.launcher.child_process import ProcessPlan
from services.launcher.phases.watch import Watch
from services.launcher.report.occupancy import CoresBusy
from services.launcher.supervisor import Supervisor
from services.launcher.training import Training


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of the training of a run after it."""

    seconds: float = 0.0
    """Duration."""
    cores_busy: float = 0.0
    """Mean number of cores at work."""
    is_without_tasks: bool = False
    """Whether it ended as no task was left for another step."""
    stopped_early: str = ""
    """Why the evaluator ended it early; empty: it did not."""


async def learn(training: Training, plans: Mapping[str, ProcessPlan], watch: Watch) -> Learned:
    """Submit tasks until the trainer has finished and every server has its last weights."""
    began, cores, watch.is_learning = time.monotonic(), CoresBusy(), True
    await submit_tasks(training.processes, plans, watch)
    status = await training.finished()
    watch.is_learning = False
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
