"""Evaluation of the current policy on held-out tasks, from the recorded rollouts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.launcher.service_clients import Services

__all__ = ["PATIENCE_SECONDS", "Evaluation", "evaluate", "read_tasks", "trajectories"]

PATIENCE_SECONDS = 120.0
"""Time without a finished task after which the agent runner is taken to be broken."""
_PAGE = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    num_tasks: int
    """Tasks solved, once each."""
    success_rate: float
    """Mean of the success reward, in [0, 1]."""


def read_tasks(path: Path, label: str) -> list[trajectory_pb2.Task]:
    """Held-out tasks from JSONL ({"task_id": …, "payload": {…}}), named for one evaluation."""
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            name, payload = record["task_id"], record["payload"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a task ({error!r}): "
                'write {"task_id": "…", "payload": {…}}'
            ) from error
        tasks.append(
            trajectory_pb2.Task(
                task_id=f"{name}@{label}",
                payload_json=json.dumps(payload),
                num_samples=1,
                purpose=tokens_pb2.PURPOSE_EVAL,
            )
        )
    return tasks


async def evaluate(
    services: Services,
    tasks: list[trajectory_pb2.Task],
    success: str,
    progress: Callable[[int], None],
    patience: float = math.inf,
) -> Evaluation:
    """Submit the tasks, wait until each has one finished rollout, average the success reward.

    Raises `DependencyUnavailable` when nothing finishes for `patience` seconds.
    """
    request = task_service_pb2.SubmitTasksRequest(run_id=services.run_id, tasks=tasks)
    await retrying(lambda: services.tasks.SubmitTasks(request))
    missing, results = {task.task_id for task in tasks}, []
    loop = asyncio.get_running_loop()
    last_progress, page_token = loop.time(), ""
    while missing:
        page_token, found = await _finished(services, page_token, missing)
        if found:
            last_progress = loop.time()
        elif loop.time() - last_progress > patience:
            raise DependencyUnavailable(
                "evaluation",
                f"none of {len(missing)} tasks finished for {patience:g} s; "
                "see the log of agent_runner",
            )
        missing -= {trajectory.group_id for trajectory in found}
        results += [_reward(trajectory, success) for trajectory in found]
        progress(len(results))
        await asyncio.sleep(0.5)
    return Evaluation(num_tasks=len(results), success_rate=sum(results) / max(len(results), 1))


async def trajectories(
    services: Services, *, headers_only: bool = False
) -> AsyncIterator[trajectory_pb2.Trajectory]:
    """All recorded trajectories of the run, oldest first."""
    token = ""
    while True:
        page = await _page(services, token, headers_only=headers_only)
        for trajectory in page.trajectories:
            yield trajectory
        token = page.next_page_token
        if not token:
            return


async def _finished(
    services: Services, page_token: str, task_ids: set[str]
) -> tuple[str, list[trajectory_pb2.Trajectory]]:
    """Finished rollouts of the tasks, and the page to begin with next time.

    Pages are oldest first: a page whose rollouts of these tasks have all closed is not read again.
    """
    found: list[trajectory_pb2.Trajectory] = []
    resume_at, is_closed = page_token, True
    while True:
        page = await _page(services, page_token, headers_only=True)
        mine = [t for t in page.trajectories if t.group_id in task_ids]
        found += [t for t in mine if t.state == trajectory_pb2.ROLLOUT_STATE_FINISHED]
        is_closed &= all(t.state != trajectory_pb2.ROLLOUT_STATE_RUNNING for t in mine)
        if not page.next_page_token:
            return resume_at, found
        page_token = page.next_page_token
        if is_closed:
            resume_at = page_token


async def _page(
    services: Services, token: str, *, headers_only: bool
) -> pb.ListTrajectoriesResponse:
    request = pb.ListTrajectoriesRequest(
        run_id=services.run_id, page_size=_PAGE, page_token=token, headers_only=headers_only
    )
    return await retrying(lambda: services.trajectories.ListTrajectories(request))


def _reward(trajectory: trajectory_pb2.Trajectory, name: str) -> float:
    given = {reward.name: reward.value for reward in trajectory.rewards.rewards}
    if name not in given:
        raise ConfigError(
            f"rollout {trajectory.rollout_id!r} has rewards {sorted(given)} but no {name!r}: "
            "let the agent return it, or set success in [launcher]"
        )
    return given[name]
