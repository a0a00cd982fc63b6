"""Negative controls: what makes training exact is taken away, and the checker must see it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from seamflow.trajectory.v1 import sample_service_pb2

from tests.chaos.calls import call_retrying
from tests.chaos.trainer.checker import Verdict
from tests.chaos.trainer.gang import Gang
from tests.chaos.trainer.kills import await_step
from tests.chaos.trainer.rig import STEPS, Job
from tests.chaos.trainer.scenarios import References, judged
from tests.chaos.trainer.weights import forget_momentum

_CRASH_STEP = STEPS // 2
_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A run without a safety rule."""

    run: Callable[[References, str], Verdict]
    """Makes a job of that name and judges it."""
    finds: tuple[str, ...]
    """Fields of the verdict that must not be 0."""

    def seen(self, verdict: Verdict) -> bool:
        """Whether the checker saw what is wrong."""
        return all(getattr(verdict, name) > 0 for name in self.finds)


def momentum_forgotten(references: References, name: str) -> Verdict:
    """The newest checkpoint loses AdamW's mean gradients before the trainer starts again."""
    job = references.rig.recorded(name)
    _crash_at(job, _CRASH_STEP)
    forget_momentum(job.checkpoint(job.newest_step))
    return _finished(job, references)


def older_checkpoint(references: References, name: str) -> Verdict:
    """The trainer resumes from a checkpoint before the one whose samples were committed."""
    job = references.rig.recorded(name)
    _crash_at(job, _CRASH_STEP)
    committed = committed_step(job)
    for step in job.checkpoint_steps():
        if step >= committed:
            shutil.rmtree(job.checkpoint(step))
    return _finished(job, references)


def committed_first(references: References, name: str) -> Verdict:
    """A step is committed when it is leased, and the trainer dies before its checkpoint."""
    module = "tests.chaos.trainer.commit_at_lease"
    job = references.rig.recorded(name)
    with job.life(1, module) as gang:
        await_step(job, gang, _CRASH_STEP)
        while gang.running and committed_step(job) <= job.newest_step:
            time.sleep(_LOOK_SECONDS)
        _crash(job, gang)
    return _finished(job, references, module)


def data_from_the_start(references: References, name: str) -> Verdict:
    """The trainer keeps no account of its samples, and begins its data anew after a crash."""
    module = "tests.chaos.trainer.skip_reconcile"
    job = references.rig.recorded(name)
    _crash_at(job, _CRASH_STEP, module)
    return _finished(job, references, module)


def controls() -> dict[str, Control]:
    """Every control by name."""
    return {
        "momentum-forgotten": Control(run=momentum_forgotten, finds=("tensors_unequal",)),
        "older-checkpoint": Control(
            run=older_checkpoint, finds=("samples_skipped", "tensors_unequal")
        ),
        "committed-first": Control(
            run=committed_first, finds=("samples_skipped", "tensors_unequal")
        ),
        "data-from-the-start": Control(
            run=data_from_the_start, finds=("samples_committed_twice", "samples_skipped")
        ),
    }


def committed_step(job: Job) -> int:
    """Newest step that the ledger consumed."""
    request = sample_service_pb2.GetReadinessRequest(run_id=job.run_id)
    with job.caller() as caller:
        return int(call_retrying(caller.samples.GetReadiness, request).readiness.committed_step)


def _crash_at(job: Job, step: int, module: str = "trainer") -> None:
    """One life on one rank, killed when a checkpoint covers `step`."""
    with job.life(1, module) as gang:
        await_step(job, gang, step)
        _crash(job, gang)


def _crash(job: Job, gang: Gang) -> None:
    """Kill it in the middle of its work.

    Raises:
        RuntimeError: it had done that already, and whatever is found would prove nothing.
    """
    if not gang.crash() or job.newest_step >= STEPS:
        raise RuntimeError(f"{job.run_id} was done before it was killed: run again")


def _finished(job: Job, references: References, module: str = "trainer") -> Verdict:
    """Train to the last step, and check."""
    with job.life(1, module) as gang:
        gang.finish()
    return judged(job, references.of(1))
