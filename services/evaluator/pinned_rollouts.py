"""The rollouts of one evaluation: all sample with one weight version."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError, SeamflowError
from seamflow.retry import retrying
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.evaluator.clients import Clients
from services.lib.evaluation import check_trained_reward, pinned_task
from services.lib.tasks.task_rows import TaskRow

_POLL_SECONDS = 0.5
_MAX_ATTEMPTS = 11
"""Of a sample, before its task becomes a dead letter."""
_CANCEL_BATCH = _SEARCH_BATCH = 1000
_States = Mapping[str, trajectory_pb2.RolloutState.ValueType]
"""By rollout."""


class EvaluationFailed(Exception):  # noqa: N818 -- names the event
    """The evaluation has no result; the message says why."""


@dataclass(slots=True)
class _Sample:
    """One rollout of a task, replaced when it fails."""

    task: TaskRow
    task_id: str
    slot: int
    attempt: int = 1

    @property
    def rollout_id(self) -> str:
        return f"{self.task_id}/{self.slot}/{self.attempt}"


@dataclass(slots=True, kw_only=True)
class PinnedRollouts:
    """Submits tasks, at most so many at once, and reads the rewards of their rollouts."""

    services: Clients
    tasks: Sequence[TaskRow]
    label: str
    """Name of the evaluation, unique in the run with its version."""
    weight_version: int
    samples: int
    """Rollouts of each task."""
    concurrency: int
    """Rollouts in flight; at least one task is."""
    metric: str
    """Name of the reward; empty: chosen by the first rollout that finishes."""
    trained_rewards: Collection[str] = ()
    """Names that training was told to use; none: it takes "reward", or the only one."""
    patience: float = math.inf
    """Seconds without a finished rollout after which the agents are taken to be broken."""
    start_patience: float = math.inf
    """Seconds in which no open rollout has started after which agents are taken to be busy."""
    num_shown: int = 0
    """Tasks of which the first rollout is kept in `shown`."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Of the finished rollouts of each task."""
    shown: list[trajectory_pb2.Trajectory] = field(default_factory=list)
    """For people to look at, in the order in which they finished."""
    _open: list[_Sample] = field(default_factory=list)
    _num_started: int = 0
    """Open rollouts that an agent had taken at the last look."""

    async def run(self, progress: Callable[[int, int], None]) -> Mapping[str, Sequence[float]]:
        """The rewards of all rollouts. Leaving early takes unfinished tasks back.

        Raises:
            EvaluationFailed: a task failed too often, was sampled by another version, or no agent
                has taken one for `start_patience` seconds.
            DependencyUnavailable: nothing finished for `patience` seconds.
            ConfigError: the agent gives no reward of that name.
        """
        waiting, num_done = deque(self.tasks), 0
        loop = asyncio.get_running_loop()
        last = started = loop.time()
        try:
            while waiting or self._open:
                await self._submit_more(waiting)
                done = await self._collect()
                num_done += done
                if done or self._num_started:
                    started = loop.time()
                elif loop.time() - started > self.start_patience:
                    raise EvaluationFailed(self._no_agent())
                if done:
                    last = loop.time()
                elif loop.time() - last > self.patience:
                    raise DependencyUnavailable("evaluation", self._silence())
                progress(num_done, len(self.tasks) * self.samples)
                if self._open:
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            await cancel(self.services, {sample.task_id for sample in self._open})
        return self.rewards

    async def _submit_more(self, waiting: deque[TaskRow]) -> None:
        tasks = []
        while waiting and (
            not self._open or len(self._open) + self.samples <= max(self.concurrency, self.samples)
        ):
            task = waiting.popleft()
            pinned = pinned_task(task, self.label, self.weight_version, self.samples)
            tasks.append(pinned)
            self._open += [_Sample(task, pinned.task_id, slot) for slot in range(self.samples)]
        if tasks:
            request = task_pb.SubmitTasksRequest(run_id=self.services.run_id, tasks=tasks)
            await retrying(lambda: self.services.tasks.SubmitTasks(request))

    async def _collect(self) -> int:
        """Take the finished rollouts; returns how many."""
        pairs = await self._read_closed()
        done = [(sample, trajectory) for sample, trajectory in pairs if _is_done(trajectory)]
        self._open = [sample for sample, trajectory in pairs if not _is_done(trajectory)]
        for sample, trajectory in done:
            assert trajectory is not None
            self._check_version(trajectory)
            if _has_rewards(trajectory):
                check_trained_reward(trajectory, self.trained_rewards)
                self.metric = self.metric or _chosen(trajectory)
            value = _reward(trajectory, self.metric)
            self.rewards.setdefault(sample.task.name, []).append(value)
            if sample.slot == 0 and sample.task in self.tasks[: self.num_shown]:
                self.shown.append(trajectory)
        for sample, trajectory in pairs:
            if trajectory is not None and _is_replaced(trajectory):
                self._next_attempt(sample, trajectory)
        return len(done)

    async def _read_closed(self) -> list[tuple[_Sample, trajectory_pb2.Trajectory | None]]:
        """The open samples, with the rollouts of those that have closed; counts the started."""
        states = await self._states()
        closed = [each for each in self._open if states is None or _is_closed(states, each)]
        read = await asyncio.gather(*(self._read(sample) for sample in closed))
        found = {each.rollout_id: each for each in read if each is not None}
        self._num_started = len(found if states is None else states)
        return [(sample, found.get(sample.rollout_id)) for sample in self._open]

    async def _states(self) -> _States | None:
        """Of the open rollouts that have started; None: the manager's release cannot tell."""
        states: dict[str, trajectory_pb2.RolloutState.ValueType] = {}
        for start in range(0, len(self._open), _SEARCH_BATCH):
            names = [each.rollout_id for each in self._open[start : start + _SEARCH_BATCH]]
            request = pb.SearchRolloutsRequest(
                run_id=self.services.run_id, rollout_ids=names, page_size=_SEARCH_BATCH
            )
            # A page may be short: of those that run the headers are read, and not of many.
            while (answer := await retrying(partial(self._search, request))) is not None:
                states |= {each.rollout_id: each.state for each in answer.rollouts}
                request.page_token = answer.next_page_token
                if not request.page_token:
                    break
            else:
                return None
        return states

    async def _search(self, request: pb.SearchRolloutsRequest) -> pb.SearchRolloutsResponse | None:
        try:
            return await self.services.trajectories.SearchRollouts(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise

    async def _read(self, sample: _Sample) -> trajectory_pb2.Trajectory | None:
        request = pb.GetTrajectoryRequest(run_id=self.services.run_id, rollout_id=sample.rollout_id)
        try:
            answer = await retrying(lambda: self.services.trajectories.GetTrajectory(request))
        except NotFoundError:
            return None  # not leased yet
        return answer.trajectory

    def _next_attempt(self, sample: _Sample, trajectory: trajectory_pb2.Trajectory) -> None:
        if sample.attempt == _MAX_ATTEMPTS:
            raise EvaluationFailed(
                f"task {sample.task.name!r} failed {_MAX_ATTEMPTS} times, last: "
                f"{trajectory.failure.message}"
            )
        sample.attempt += 1

    def _check_version(self, trajectory: trajectory_pb2.Trajectory) -> None:
        spans = [span for turn in trajectory.turns for span in turn.tokens.spans]
        other = [
            span.weight_version
            for span in spans
            if span.origin == tokens_pb2.ORIGIN_POLICY
            and span.weight_version != self.weight_version
        ]
        if other:
            raise EvaluationFailed(
                f"rollout {trajectory.rollout_id!r} was sampled by weight version {other[0]} "
                f"instead of {self.weight_version}: a process of another release does not pin tasks"
            )

    def _no_agent(self) -> str:
        return (
            f"no agent took one of its {len(self._open)} rollouts for {self.start_patience:g} s: "
            "all are busy with training, which waits for the rollout server of the evaluation; "
            "give another rollout server, or agents that lease evaluation tasks alone"
        )

    def _silence(self) -> str:
        return (
            f"none of {len(self._open)} rollouts finished for {self.patience:g} s; "
            "do agents run? See their log"
        )


async def cancel(services: Clients, task_ids: set[str]) -> None:
    """Take tasks back, as far as the trajectory manager answers."""
    names = sorted(task_ids)
    for start in range(0, len(names), _CANCEL_BATCH):
        request = task_pb.CancelTasksRequest(
            run_id=services.run_id, task_ids=names[start : start + _CANCEL_BATCH]
        )
        with suppress(SeamflowError, grpc.aio.AioRpcError):
            await services.tasks.CancelTasks(request, timeout=10.0)


def _is_closed(states: _States, sample: _Sample) -> bool:
    running = trajectory_pb2.ROLLOUT_STATE_RUNNING
    return states.get(sample.rollout_id, running) != running


def _is_done(trajectory: trajectory_pb2.Trajectory | None) -> bool:
    """Whether it counts: with rewards, or as a failure of the policy."""
    return trajectory is not None and (
        trajectory.state == trajectory_pb2.ROLLOUT_STATE_FINISHED
        or trajectory.failure.failure_class == tokens_pb2.FAILURE_CLASS_POLICY
    )


def _is_replaced(trajectory: trajectory_pb2.Trajectory) -> bool:
    return trajectory.state == trajectory_pb2.ROLLOUT_STATE_FAILED and not _is_done(trajectory)


def _has_rewards(trajectory: trajectory_pb2.Trajectory) -> bool:
    is_finished = trajectory.state == trajectory_pb2.ROLLOUT_STATE_FINISHED
    return is_finished and not trajectory.rewards.policy_failure


def _chosen(trajectory: trajectory_pb2.Trajectory) -> str:
    """The metric, where no setting names it."""
    names = {reward.name for reward in trajectory.rewards.rewards}
    if len(names) == 1:
        return names.pop()
    return "reward" if "reward" in names and "success" not in names else "success"


def _reward(trajectory: trajectory_pb2.Trajectory, name: str) -> float:
    """The rollout's reward of that name plus those of its turns, as in training."""
    given = defaultdict[str, float](float)
    for reward in trajectory.rewards.rewards:
        given[reward.name] += reward.value
    if name not in given:
        if not _has_rewards(trajectory):
            return 0.0  # the policy's own failure
        raise ConfigError(
            f"rollout {trajectory.rollout_id!r} has rewards {sorted(given)} but no {name!r}: "
            "let the agent return it, or set success in [launcher] or metric in [evaluation]"
        )
    return given[name]
