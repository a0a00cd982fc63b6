"""Training when trainers die: on recorded samples, with live producers, and on other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from google.protobuf.duration_pb2 import Duration
from seamflow.trajectory.v1 import sample_service_pb2

from tests.chaos.calls import Caller, call_retrying
from tests.chaos.trainer.checker import History, Verdict, check_delivery, check_recorded
from tests.chaos.trainer.kills import Kills, Pace, Strikes, await_step
from tests.chaos.trainer.producers import Agents
from tests.chaos.trainer.rig import STEPS, Job, Rig
from tests.chaos.trainer.samples import GROUP_SIZE, GROUPS_PER_STEP
from tests.chaos.trainer.weights import compare, greatest_difference

STREAMED = ("--batch.stream-groups=1",)
"""Flags of a trainer that begins a step with its first group."""
SPARSE = ("--checkpoint.every=4",)
"""Flags of a trainer that repeats up to four steps after a kill."""
PPO = (
    "--algorithm.name=ppo",
    "--critic=model",
    "--algorithm.num-epochs=2",
    "--algorithm.num-mini-batches=4",
)
"""Flags of PPO with a critic of its own and eight updates in a step."""
PPO_PIPELINE = (*PPO, "--backend=pipeline")
"""The same in a fused pipeline, a stage of each model on each rank."""
_LIVE_STALENESS = 3
"""Producers are at most so many steps ahead, so that the trainer waits for them at times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario found."""

    verdict: Verdict = field(default_factory=Verdict)
    """Violations."""
    kills: Kills = field(default_factory=Kills)
    """Of trainers at work."""
    kills_missed: int = 0
    """Kills that found the run done, or never came."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Additional figures by name."""
    raw: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Samples behind them."""

    def __add__(self, other: Outcome) -> Outcome:
        """Both together."""
        return Outcome(
            verdict=self.verdict + other.verdict,
            kills=self.kills + other.kills,
            kills_missed=self.kills_missed + other.kills_missed,
            figures={**self.figures, **other.figures},
            raw={**self.raw, **other.raw},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A run that nothing disturbed."""

    job: Job
    """Where its weights and checkpoints are."""
    history: History
    """What it trained."""
    pace: Pace
    """How quick it was."""


class References:
    """Undisturbed runs, each made when it is first needed."""

    def __init__(self, rig: Rig) -> None:
        """On the services of `rig`."""
        self.rig = rig
        self._made: dict[tuple[int, tuple[str, ...]], Reference] = {}

    def of(self, world_size: int, flags: tuple[str, ...] = ()) -> Reference:
        """That of a trainer on so many ranks, with these flags of its own."""
        key = (world_size, flags)
        if key not in self._made:
            self._made[key] = self._make(f"reference-{len(self._made)}", world_size, flags)
        return self._made[key]

    def _make(self, name: str, world_size: int, flags: tuple[str, ...]) -> Reference:
        job = self.rig.recorded(name, *flags)
        with job.life(world_size) as gang:
            gang.finish()
        served, times = gang.serving_time, job.step_times()
        pace = Pace(
            start=served - gang.start_time,
            first_step=times[0] - served,
            step=(times[-1] - times[0]) / (len(times) - 1),
        )
        return Reference(job=job, history=job.history(), pace=pace)


def recorded(
    references: References, name: str, kills: int, world_size: int, flags: tuple[str, ...] = ()
) -> Outcome:
    """A recording is trained on through many kills, and once without any: bit for bit the same."""
    reference = references.of(world_size, flags)
    job = references.rig.recorded(name, *flags)
    strikes = struck(job, reference.pace, kills, world_size)
    with job.life(world_size) as gang:
        gang.finish()
    return _outcome(judged(job, reference), strikes, kills)


def live(references: References, name: str, kills: int) -> Outcome:
    """The trainer is killed while producers write: nothing is trained twice or left out."""
    rig, pace = references.rig, references.of(1, STREAMED).pace
    job = rig.live(name, *STREAMED, max_staleness=_LIVE_STALENESS)
    agents = Agents(job, rig.setting.seed)
    with agents.playing():
        strikes = struck(job, pace, kills, world_size=1)
        with job.life(1) as gang:
            gang.finish()
    with job.caller() as caller:
        available = still_available(caller)
    verdict = check_delivery(
        job.history(),
        num_steps=STEPS,
        finished=agents.finished,
        available=available,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
    )
    return _outcome(verdict, strikes, kills)


def resized(references: References, name: str) -> Outcome:
    """Two ranks, one and two again, a kill between each: to rounding the weights of two ranks."""
    reference = references.of(2)
    job = references.rig.recorded(name)
    strikes = Strikes(job, reference.pace, Random(references.rig.setting.seed))
    for world_size, step in ((2, STEPS // 3), (1, 2 * STEPS // 3)):
        with job.life(world_size) as gang:
            await_step(job, gang, step)
            strikes.end(gang)
    with job.life(2) as gang:
        gang.finish()
    difference = greatest_difference(job.published(), reference.job.published())
    outcome = _outcome(check_recorded(job.history(), reference.history), strikes, kills=2)
    return outcome + Outcome(figures={"resized_weights_max_difference": difference})


def moved(references: References, name: str) -> Outcome:
    """FSDP, a pipeline and FSDP again, a kill between each: to rounding the weights of FSDP."""
    reference = references.of(2, PPO)
    job = references.rig.recorded(name)
    strikes = Strikes(job, reference.pace, Random(references.rig.setting.seed))
    for flags, step in ((PPO, STEPS // 3), (PPO_PIPELINE, 2 * STEPS // 3)):
        with replace(job, flags=flags).life(2) as gang:
            await_step(job, gang, step)
            strikes.end(gang)
    with replace(job, flags=PPO).life(2) as gang:
        gang.finish()
    difference = greatest_difference(job.published(), reference.job.published())
    outcome = _outcome(check_recorded(job.history(), reference.history), strikes, kills=2)
    return outcome + Outcome(figures={"moved_weights_max_difference": difference})


def struck(job: Job, pace: Pace, kills: int, world_size: int) -> Strikes:
    """So many lives of a trainer, each killed at a moment of its own."""
    setting = job.rig.setting
    strikes = Strikes(job, pace, Random(f"{setting.seed}/{job.run_id}"))
    bar = setting.progress.track(range(kills), description=f"{job.run_id}: SIGKILL")
    for number in bar:
        strikes.strike(world_size, kills - number)
    return strikes


def judged(job: Job, reference: Reference) -> Verdict:
    """A finished run on the recording against the undisturbed one: samples, weights, checkpoint."""
    theirs = reference.job
    return (
        check_recorded(job.history(), reference.history)
        + compare(job.published(), theirs.published())
        + compare(job.checkpoint(STEPS), theirs.checkpoint(STEPS))
    )


def still_available(caller: Caller) -> list[str]:
    """The samples that the ledger gives to the next trainer, to the last group that is complete."""
    reconcile = sample_service_pb2.ReconcileRequest(
        run_id=caller.run_id, step=STEPS, trainer_id="auditor"
    )
    epoch = call_retrying(caller.samples.Reconcile, reconcile).epoch
    found: list[str] = []
    step = STEPS
    while True:
        step += 1
        request = sample_service_pb2.LeaseSamplesRequest(
            run_id=caller.run_id, epoch=epoch, step=step, min_groups=1, wait=Duration()
        )
        page = call_retrying(caller.samples.LeaseSamples, request)
        if not page.lease_token:
            return found
        found += [sample.sample_id for sample in page.samples]


def _outcome(verdict: Verdict, strikes: Strikes, kills: int) -> Outcome:
    return Outcome(
        verdict=verdict,
        kills=strikes.kills,
        kills_missed=kills - strikes.kills.total,
        raw={f"{strikes.run_id}_killed_after_s": strikes.seconds},
    )
