"""What is told beside the live view: alarms, failures, and what speaks against learning."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.durations import seconds_of
from seamflow.inspect import lives
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.failure_causes import causes
from seamflow.inspect.learning import not_learning
from seamflow.inspect.progress import equal_groups_discarded, read_progress, with_counts
from seamflow.inspect.run_files import GrowingSteps
from seamflow.inspect.snapshot import Snapshot
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.service_clients import Services

_MAX_CHARACTERS = 600
_GROWTH = 4
"""The number of dead letters is shown again once it has grown by this factor."""
_SHARE = 20
"""Listing takes at most one part in this many of the time."""
List = Callable[[], AsyncIterator[trajectory_pb2.Trajectory]]
Letters = Callable[[], AsyncIterator[task_pb.DeadLetter]]
_TOO_OLD = (task_pb.DEAD_LETTER_REASON_DROPPED, task_pb.DEAD_LETTER_REASON_WITHHELD)
_STOPPED = "too old for max_staleness, as the run was stopped while they waited"
_REASONS: Mapping[int, str] = {
    task_pb.DEAD_LETTER_REASON_FAILURES: "with rollouts that failed too often",
    **dict.fromkeys(_TOO_OLD, "too old for max_staleness"),
    task_pb.DEAD_LETTER_REASON_ZERO_VARIANCE: "with equal rewards",
    task_pb.DEAD_LETTER_REASON_DELIVERIES: "in a step that ended several trainers",
    task_pb.DEAD_LETTER_REASON_REJECTED: "that the trainer cannot train",
}
_FILES = ("metrics.jsonl", "evaluation.jsonl", lives.FILE)


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def stopping_note(reason: str, seen: Snapshot, steps: Sequence[Mapping[str, Any]]) -> str:
    """What a stop drops and cuts, and where --resume goes on; `seen` is the newest look."""
    trainer, ready = seen.trainer, seen.readiness
    parts = [f"stopping ({reason})"]
    if ready is not None and ready.num_running_rollouts:
        parts.append(f"{ready.num_running_rollouts} running rollouts are cut")
    if trainer is not None and trainer.state != trainer_pb.TRAINER_STATE_FINISHED:
        saved = trainer.checkpoint_step
        step = max([trainer.step, *(each["step"] for each in steps[-1:])])
        again = f" and repeats {_steps(step - saved)} on their samples" if step > saved else ""
        begin = f"from the checkpoint of step {saved}" if saved else "from the start"
        parts.append(f"step {step + 1} of {trainer.num_steps}, in progress, is dropped")
        parts.append(f"--resume goes on {begin}{again}")
    return f"{'; '.join(parts)}. Waiting for all processes to end; Ctrl-C again ends them at once"


class ReadyNotes:
    """Notices the first answer of each rollout server and of the trainer."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, snapshot: Snapshot) -> list[str]:
        """A line for each rollout server, and the trainer, that has not answered before."""
        ready = [f"the rollout server of {name}" for name in snapshot.answering_servers]
        ready += [] if snapshot.trainer is None else ["the trainer"]
        new = [each for each in ready if each not in self._told]
        self._told.update(new)
        return [f"{each} has loaded its model" for each in new]


class WaitNotes:
    """Notices what `seamflow why-stuck` would say that requires action."""

    def __init__(self, find: Callable[[Snapshot], list[Finding]], seconds: float) -> None:
        """A finding of `find` is told once it has been found for `seconds`."""
        self._find, self._seconds = find, seconds
        self._found: dict[tuple[str, str], _Found] = {}

    def look(self, snapshot: Snapshot, now: float) -> list[str]:
        """A line for each finding, and for each that is over; `now` of a monotonic clock."""
        findings = {(each.rule, each.subject): each for each in self._find(snapshot)}
        lines = [
            f"no longer: {each.finding.sentence}"
            for key, each in self._found.items()
            if key not in findings and each.is_told
        ]
        self._found = {
            key: _Found(finding, *self._before(key, now)) for key, finding in findings.items()
        }
        for each in self._found.values():
            if not each.is_told and now - each.since >= self._seconds:
                each.is_told = True
                lines.append(
                    f"waiting ({each.finding.rule}): {each.finding.sentence} {each.finding.cure}"
                )
        return lines

    def _before(self, key: tuple[str, str], now: float) -> tuple[float, bool]:
        known = self._found.get(key)
        return (now, False) if known is None else (known.since, known.is_told)


@dataclass(slots=True)
class _Found:
    finding: Finding
    since: float
    is_told: bool


class AlarmNotes:
    """Remembers which alarms were told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, trainer: trainer_pb.GetStatusResponse | None) -> list[str]:
        """A line for each alarm that was not told yet."""
        alarms = () if trainer is None else trainer.alarms
        new = [alarm for alarm in dict.fromkeys(alarms) if alarm not in self._told]
        self._told.update(new)
        return [f"alarm: {alarm}" for alarm in new]


class FailureNotes:
    """Looks at failures when their number has grown."""

    def __init__(
        self,
        listed: List,
        letters: Letters,
        settled: Callable[[], float] = lambda: 0.0,
        stops: Sequence[lives.Period] = (),
    ) -> None:
        """Look at a run.

        Args:
            listed: gives its rollouts, without their tokens.
            letters: gives its dead letters.
            settled: when the run had caught up after a stop, in Unix seconds; a group that began
                before was held up by it.
            stops: of the run so far; what failed in one was cut off.
        """
        self._stops = stops
        self._listed, self._letters, self._settled = listed, letters, settled
        self._num_replaced = 0
        self._shown: set[str] = set()
        self._next = 0.0
        self._next_dead_letters = 1

    async def look(self, readiness: sample_pb.Readiness | None) -> list[str]:
        """A line for each cause not shown yet, and one if the number of dead letters has grown."""
        began = time.monotonic()
        if readiness is None or began < self._next:
            return []
        number = readiness.num_replaced_samples + readiness.num_dead_letters
        if number == self._num_replaced:
            return []
        self._num_replaced = number
        rollouts = [each async for each in self._listed()]
        lines = self._new(rollouts)
        lines += await self._dead_letters(readiness.num_dead_letters, rollouts)
        self._next = time.monotonic() + _SHARE * (time.monotonic() - began)
        return lines

    async def _dead_letters(
        self, number: int, rollouts: Sequence[trajectory_pb2.Trajectory]
    ) -> list[str]:
        if number < self._next_dead_letters:
            return []
        self._next_dead_letters = _GROWTH * number
        settled = self._settled()
        held_up = {r.group_id for r in rollouts if seconds_of(r.create_time) < settled}
        why = Counter(
            _STOPPED
            if letter.reason in _TOO_OLD and letter.task.task_id in held_up
            else _REASONS.get(letter.reason, letter.message)
            for letter in [each async for each in self._letters()]
        )
        if why.keys() == {_STOPPED}:
            return [f"{number} groups are not trained, {_STOPPED}; other tasks take their place."]
        reasons = "".join(f"; {count} {reason}" for reason, count in why.most_common())
        return [
            f"dead letters: {number}, tasks that left the run without being trained{reasons}; "
            "`seamflow dead-letters` says more of each."
        ]

    def _new(self, trajectories: Iterable[trajectory_pb2.Trajectory]) -> list[str]:
        new = [cause for cause in causes(trajectories, self._stops) if cause.key not in self._shown]
        self._shown |= {cause.key for cause in new}
        return [f"{cause.line[:_MAX_CHARACTERS]}. {cause.cure}" for cause in new]


class HealthNotes:
    """Looks at a run whenever its files or counts have changed."""

    def __init__(self, folder: Path, services: Services) -> None:
        self._folder, self._services = folder, services
        self._steps = GrowingSteps(folder / "metrics.jsonl")
        self._seen: tuple[int, ...] = ()
        self._found: dict[str, Finding] = {}

    async def look(self, ready: sample_pb.Readiness | None) -> list[str]:
        """A line for each new finding, and for each that is over."""
        seen = (*map(self._size, _FILES), *_counts(ready))
        if seen == self._seen or ready is None:
            return []
        self._seen = seen
        return self._news({finding.rule: finding for finding in await self.findings(ready)})

    async def findings(self, ready: sample_pb.Readiness | None) -> list[Finding]:
        """All of now; without the counts if the trajectory manager does not answer."""
        progress, number = read_progress(self._folder, self._steps), 0
        with suppress(grpc.aio.AioRpcError):
            tasks, run_id = self._services.tasks, self._services.run_id
            number = await equal_groups_discarded(tasks, run_id, progress, ready)
        return not_learning(with_counts(progress, ready, number))

    def _news(self, found: dict[str, Finding]) -> list[str]:
        new = [finding for name, finding in found.items() if name not in self._found]
        begun = [f"health ({each.rule}): {each.sentence} {each.cure}" for each in new]
        over = [f"health ({name}): over" for name in self._found if name not in found]
        self._found = found
        return begun + over

    def _size(self, name: str) -> int:
        file = self._folder / name
        return file.stat().st_size if file.is_file() else 0


def _counts(ready: sample_pb.Readiness | None) -> tuple[int, ...]:
    return () if ready is None else (ready.num_discarded_groups, ready.num_replaced_samples)
