"""When a trainer is killed, and what it was doing.

Of each life a moment is drawn: a quarter of them in its start, or more when steps run short, the
others after it, within so many steps that the last one is not reached before the last kill.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from random import Random

from seamflow.trajectory.v1 import sample_service_pb2

from tests.chaos.calls import call_retrying
from tests.chaos.trainer.gang import Gang
from tests.chaos.trainer.rig import STEPS, Job

_START_SHARE = 0.25
_STEP_SECONDS = 120.0
_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an undisturbed run took, in seconds."""

    start: float
    """From its start until it served."""
    first_step: float
    """From then until its first step was done."""
    step: float
    """Each further step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """SIGKILLs that a trainer at work was sent, by what they interrupted."""

    kills_in_start: int = 0
    """Imports, process group, model."""
    kills_in_step: int = 0
    """A step's samples were leased; reading the checkpoint, gradient or optimizer step."""
    kills_in_checkpoint: int = 0
    """A checkpoint was being written."""
    kills_before_commit: int = 0
    """It was durable, and its step not committed."""
    kills_before_publish: int = 0
    """The step was committed, and its weights not published."""
    kills_between_steps: int = 0
    """All of that was done."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, entry.name) for entry in fields(self))

    def __add__(self, other: Kills) -> Kills:
        """Both together."""
        return Kills(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class Strikes:
    """Draws the moments of a run's kills, and counts what each interrupted."""

    def __init__(self, job: Job, pace: Pace, random: Random) -> None:
        """`pace` is that of an undisturbed run of the same kind."""
        self._job = job
        self._pace = pace
        self._random = random
        self.run_id = job.run_id
        """Of the run."""
        self.kills = Kills()
        """Those that found the trainer at work."""
        self.seconds: list[float] = []
        """How old its process was at each."""

    def strike(self, world_size: int, still: int) -> None:
        """One life of a trainer, and its end; `still` kills are left, this one included."""
        with self._job.life(world_size) as gang:
            remaining = STEPS - 1 - self._job.newest_step
            if self._random.random() < max(_START_SHARE, 1 - remaining / still):
                time.sleep(self._random.uniform(0, self._pace.start))
            else:
                gang.wait()
                self._let_train(gang, remaining // still)
            self.end(gang)

    def end(self, gang: Gang) -> None:
        """Kill it now, and count that unless it had done all its work."""
        age = time.time() - gang.start_time
        if gang.crash() and self._job.newest().step < STEPS:
            self.kills += interrupted(self._job, gang)
            self.seconds.append(age)

    def _let_train(self, gang: Gang, most_steps: int) -> None:
        """Wait for a checkpoint, at most so many steps from here, and then a part of a step."""
        num_steps = self._random.randint(0, most_steps)
        if num_steps:
            await_step(self._job, gang, self._job.newest_step + num_steps)
        pace = self._pace.step if num_steps else self._pace.first_step
        time.sleep(self._random.uniform(0, pace))


def interrupted(job: Job, gang: Gang) -> Kills:
    """What the life that just ended was doing."""
    if not gang.serving:
        return Kills(kills_in_start=1)
    with job.caller() as caller:
        request = sample_service_pb2.GetReadinessRequest(run_id=job.run_id)
        counts = call_retrying(caller.samples.GetReadiness, request).readiness
    done = job.newest_step
    if _writes_checkpoint(job, gang):
        return Kills(kills_in_checkpoint=1)
    if counts.committed_step < done:
        return Kills(kills_before_commit=1)
    if job.newest().step < done:  # publishing continues during the next step
        return Kills(kills_before_publish=1)
    if counts.leased_step > done:
        return Kills(kills_in_step=1)
    return Kills(kills_between_steps=1)


def await_step(job: Job, gang: Gang, step: int) -> None:
    """Return as soon as a checkpoint covers `step`.

    Raises:
        RuntimeError: the trainer ended before, or came to no such step in time.
    """
    limit = time.monotonic() + _STEP_SECONDS
    while job.newest_step < step:
        if not gang.running or time.monotonic() > limit:
            raise RuntimeError(f"no checkpoint of step {step}, see {gang.log}")
        time.sleep(_LOOK_SECONDS)


def _writes_checkpoint(job: Job, gang: Gang) -> bool:
    """Whether this life left a checkpoint half written; those of earlier ones lie there too."""
    partial = job.checkpoints.glob(".partial_*")
    return any(path.stat().st_mtime > gang.start_time for path in partial)
