"""Notices that no task is left for another optimizer step."""

from __future__ import annotations

from seamflow.inspect.snapshot import Snapshot
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

_SECONDS = 5.0
"""All must stay so for this long: a sample may be replaced."""


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
