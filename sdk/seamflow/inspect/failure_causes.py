"""Why rollouts failed: their failures, put together by cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of
from seamflow.enum_names import enum_name
from seamflow.inspect.lives import Period
from seamflow.trajectory.v1 import trajectory_pb2

_CURES = {
    tokens_pb2.FAILURE_CLASS_ENVIRONMENT: "Correct the agent, the environment, the reward "
    "function or the task; the log of the process that raised it has the whole traceback.",
    tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE: "Check that the named server runs and can be reached.",
    tokens_pb2.FAILURE_CLASS_TIMEOUT: "Find what it waits for, or raise the timeout that the "
    "message names.",
}
_LEASE_EXPIRED = "its lease expired"
_SILENT_AGENT = (
    "Nothing is wrong if its agent was stopped meanwhile: another rollout takes its place. "
    "Otherwise see the log of the agent for why it stopped calling the gateway."
)
_CHANGING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{32}|\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Failures that differ in names and numbers only."""

    failure_class: str
    """Such as "ENVIRONMENT"."""
    message: str
    rollout_id: str
    """Of the last one."""
    number: int
    key: str
    """Equal for all of them."""
    cure: str

    @property
    def line(self) -> str:
        """All of it but the cure, in one line."""
        text = " ".join(self.message.split())
        return f"failure {self.failure_class} of rollout {self.rollout_id}: {text}"


def causes(
    trajectories: Iterable[trajectory_pb2.Trajectory], stops: Sequence[Period] = ()
) -> list[Cause]:
    """Causes of the failed ones among `trajectories`, the most frequent first.

    Cancelled rollouts, and those that failed during one of `stops`, when nothing else could be
    reached any more, are left out: nothing is wrong with them.
    """
    found: dict[str, list[trajectory_pb2.Trajectory]] = {}
    for each in trajectories:
        if each.HasField("failure") and not was_stopped(each, stops):
            found.setdefault(_key(each), []).append(each)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [_cause(key, failed) for key, failed in ordered]


def was_stopped(trajectory: trajectory_pb2.Trajectory, stops: Sequence[Period] = ()) -> bool:
    """Whether a failed rollout was cancelled, or failed while the run was being stopped."""
    when = seconds_of(trajectory.finish_time)
    is_failure = trajectory.failure.failure_class in _CURES
    return not is_failure or any(begin <= when <= end for begin, end in stops)


def _cause(key: str, failed: Sequence[trajectory_pb2.Trajectory]) -> Cause:
    last = failed[-1]
    return Cause(
        failure_class=enum_name(tokens_pb2.FailureClass, last.failure.failure_class),
        message=last.failure.message,
        rollout_id=last.rollout_id,
        number=len(failed),
        key=key,
        cure=_cure(last.failure),
    )


def _cure(failure: tokens_pb2.Failure) -> str:
    if failure.message.startswith(_LEASE_EXPIRED):  # the manager's own words for a silent agent
        return _SILENT_AGENT
    return _CURES[failure.failure_class]


def _key(trajectory: trajectory_pb2.Trajectory) -> str:
    """The failure without the names and numbers that differ from rollout to rollout."""
    message = trajectory.failure.message
    for name in (trajectory.rollout_id, trajectory.group_id):
        message = message.replace(name, "…") if name else message
    return f"{trajectory.failure.failure_class} {_CHANGING.sub('#', message)}"
