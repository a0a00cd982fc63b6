"""`make chaos-ranks`: ranks that are killed in mid-step cost the gang no restart.

Four ranks under torchrun, two replicas. In each of five steps a rank other than the first is killed
in its backward pass. The gradients of these steps are compared with those of an undisturbed run,
the processes of the others are counted, and the time from the kill to the new process group is
taken. Control: such a kill with one replica ends all ranks, which begin again from the checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Report
from tests.chaos.suite import Suite, broken_limits, exit_if_broken
from tests.chaos.trainer.checker import check_recorded
from tests.chaos.trainer.rig import STEPS, Job, Rig, rig
from tests.chaos.trainer.weights import gradient_difference, greatest_difference

_MODULE = "tests.chaos.ranks.dying_trainer"
_RANKS = 4
_DEATHS = ((4, 3), (8, 1), (12, 2), (16, 1), (20, 3))
"""Step and rank."""
_CONTROL = _DEATHS[2]
_FLAGS = ("--dtype=float64", "--checkpoint.every=1", "--checkpoint.keep=30")
_REPLICATED = (*_FLAGS, "--replicas=2")
_MOST = {
    "gradient_max_relative_difference": 1e-6,
    "weights_max_difference": 1e-6,
    "reform_seconds_max": 10.0,
}
_NONE = ("survivors_restarted", "kills_missed", "samples_moved", "steps_wrong")
_END_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What the ranks of a run left."""

    events: Sequence[Mapping[str, Any]]
    """In the order of time."""

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """The events of a kind."""
        return [each for each in self.events if each["event"] == event]

    def processes(self, rank: int) -> int:
        """How many processes a rank was."""
        return len({each["pid"] for each in self.of("began") if each["rank"] == rank})

    def restarted(self) -> int:
        """Processes beyond the first of each rank that did not follow a death of the rank."""
        deaths = [each["rank"] for each in self.of("died")]
        return sum(self.processes(rank) - 1 - deaths.count(rank) for rank in range(_RANKS))

    def seconds_until(self, event: str, death: Mapping[str, Any], **values: object) -> float:
        """From a death to an event of rank 0."""
        times = [
            each["time"]
            for each in self.of(event)
            if each["rank"] == 0
            and each["time"] > death["time"]
            and all(each[name] == value for name, value in values.items())
        ]
        return float(min(times) - death["time"])


def read_story(folder: Path) -> Story:
    """Of all ranks that ran in this folder."""
    lines = (folder / "ranks.jsonl").read_text().splitlines()
    return Story(events=sorted(map(json.loads, lines), key=lambda each: float(each["time"])))


def prepared(
    services: Rig, name: str, flags: Sequence[str], deaths: Sequence[Sequence[int]]
) -> Job:
    """A job in which ranks die so."""
    job = services.recorded(name, *flags)
    (job.folder / "deaths.json").write_text(json.dumps(deaths))
    return job


def trained(services: Rig, name: str, deaths: Sequence[Sequence[int]]) -> Job:
    """One life of a gang with replicas, to its end."""
    job = prepared(services, name, _REPLICATED, deaths)
    with job.life(_RANKS, _MODULE) as gang:
        gang.finish()
    return job


def control(services: Rig) -> dict[str, float]:
    """Without replicas: all ranks end, and begin again from the checkpoint before the step."""
    job = prepared(services, "control", _FLAGS, [_CONTROL])
    with job.life(_RANKS, _MODULE) as gang:
        limit = time.monotonic() + _END_SECONDS
        while gang.running and time.monotonic() < limit:
            time.sleep(0.01)
        has_ended = not gang.running
    with job.life(_RANKS, _MODULE) as gang:
        gang.finish()
    story = read_story(job.folder)
    restarted = story.restarted()
    return {
        "control_processes_restarted": restarted,
        "control_seconds_to_end_of_step": _after(story, "optimized", step=_CONTROL[0])[0],
        "negative_controls": 1,
        "negative_controls_failed": int(has_ended and restarted == _RANKS - 1),
    }


def _after(story: Story, event: str, **values: object) -> list[float]:
    """Seconds from each death."""
    return [story.seconds_until(event, death, **values) for death in story.of("died")]


def figures_of(services: Rig, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Run all; the figures. `seconds` gets those of each kill."""
    whole = trained(services, "undisturbed", [])
    job = trained(services, "lost", _DEATHS)
    story, verdict = read_story(job.folder), check_recorded(job.history(), whole.history())
    seconds["reform_seconds"] = _after(story, "formed", num_ranks=_RANKS - 1)
    seconds["rejoin_seconds"] = _after(story, "formed", num_ranks=_RANKS)
    gradients = [
        gradient_difference(*(run.checkpoint(n) for run in (job, whole) for n in (step - 1, step)))
        for step, _ in _DEATHS
    ]
    return {
        "kills_in_backward": len(story.of("died")),
        "kills_missed": len(_DEATHS) - len(story.of("died")),
        "gradient_max_relative_difference": max(gradients),
        "weights_max_difference": greatest_difference(job.published(), whole.published()),
        "survivors_restarted": story.restarted(),
        "groups_formed": len([each for each in story.of("formed") if each["rank"] == 0]),
        "reform_seconds_max": max(seconds["reform_seconds"]),
        "rejoin_seconds_max": max(seconds["rejoin_seconds"]),
        "samples_moved": verdict.samples_moved,
        "steps_wrong": verdict.steps_wrong,
        "steps": STEPS,
        **control(services),
    }


def main() -> None:
    """Run, print and write the figures; exit 1 if a limit is broken."""
    seconds: dict[str, list[float]] = {}
    suite = Suite[Any].from_arguments(__doc__, lambda _: {"lost-ranks": figures_of})
    with suite.setting() as setting:
        with rig(setting) as services:
            figures = figures_of(services, seconds)
        folder = suite.report_folder(setting)
        Report(bench="chaos_ranks", figures=figures, raw=seconds, seeds=[suite.seed]).publish(
            folder
        )
    exit_if_broken(broken_limits(figures, _MOST, _NONE))


if __name__ == "__main__":
    main()
