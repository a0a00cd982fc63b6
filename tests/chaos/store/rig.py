"""A run under load: Redis, a manager, writers and a trainer, and the count at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import sample_service_pb2, trajectory_pb2

from bench.harness import processes
from bench.harness.processes import Child, Server
from tests.chaos.calls import Caller, call_retrying
from tests.chaos.store.checker import (
    Verdict,
    check_steps,
    check_tokens,
    stored_tokens,
    untrained_groups,
)
from tests.chaos.store.history import new_acks, read_history
from tests.chaos.store.processes.modelless_trainer import REFUSED, committed_steps

GROUP_SIZE = 2
_GROUPS_PER_STEP = 2
_MAX_STALENESS = 15
_LEASE_SECONDS = 60.0
_SETTLE_SECONDS = 60.0
_ACK_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_WRITERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every scenario is given."""

    folder: Path
    """Where its logs and data go."""
    seed: int
    """Seed of everything random in it."""
    progress: Progress
    """Bars for people."""

    def part(self, name: str) -> Setting:
        """The same with a new folder of its own."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        return replace(self, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario found."""

    verdict: Verdict = field(default_factory=Verdict)
    """Violations."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of its own, by name."""
    raw: dict[str, list[float]] = field(default_factory=dict)
    """Samples behind them."""

    def __add__(self, other: Outcome) -> Outcome:
        """Both together."""
        return Outcome(
            verdict=self.verdict + other.verdict,
            figures={**self.figures, **other.figures},
            raw={**self.raw, **other.raw},
        )


def rules(
    durability: trajectory_pb2.Durability.ValueType = trajectory_pb2.DURABILITY_DURABLE,
    *,
    group_size: int = GROUP_SIZE,
    groups_per_step: int = _GROUPS_PER_STEP,
    lease_seconds: float = _LEASE_SECONDS,
) -> trajectory_pb2.RunConfig:
    """Rules of a run that keeps everything and drops nothing."""
    return trajectory_pb2.RunConfig(
        group_size=group_size,
        groups_per_step=groups_per_step,
        max_staleness=_MAX_STALENESS,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=to_duration(lease_seconds),
        durability=durability,
    )


@dataclass(slots=True)
class Rig:
    """The processes of a run; scenarios kill them."""

    setting: Setting
    manager: Server
    writers: Child
    trainer: Child
    log: Path
    checkpoints: Path

    def log_size(self) -> int:
        """Bytes in the log of acknowledgements."""
        return self.log.stat().st_size if self.log.exists() else 0

    def first_ack(self, read: int = 0, after: float = 0.0, seconds: float = _ACK_SECONDS) -> float:
        """Monotonic time of the first acknowledgement of a call that was sent after `after`.

        Looks at the log from its byte `read` on.

        Raises:
            RuntimeError: there was none within `seconds`, or a process of the load ended.
        """
        limit = time.monotonic() + seconds
        while True:
            for child in (self.writers, self.trainer):
                if not child.running:
                    raise RuntimeError(f"{child.log} ended:\n{child.log.read_text()[-2000:]}")
            acks, read = new_acks(self.log, read)
            for ack in acks:
                if ack.sent > after:
                    return ack.received
            if time.monotonic() > limit:
                raise RuntimeError(
                    f"nothing was acknowledged in {seconds:g} s, see {self.manager.log}"
                )
            time.sleep(_LOOK_SECONDS)

    def finish(self) -> Verdict:
        """Let the writers end their rollouts and the trainer its steps, then count."""
        verdict = self.count_tokens()
        with Caller.at(self.manager.address, RUN) as caller:
            still_ready = _drained(caller)
        self.trainer.stop()
        steps, finished = committed_steps(self.checkpoints), read_history(self.log).finished
        trained = [sample_id.split("#")[0] for ids in steps.values() for sample_id in ids]
        lost = untrained_groups(finished, trained, GROUP_SIZE, still_ready)
        return verdict + check_steps(steps) + lost + self._refused_steps()

    def _refused_steps(self) -> Verdict:
        refused = read_history(self.checkpoints / REFUSED).abandoned
        if refused:
            self.setting.progress.console.print(f"the trainer was refused: {dict(refused)}")
        return Verdict(steps_refused=sum(refused.values()))

    def count_tokens(self) -> Verdict:
        """Let the writers end their rollouts, and hold their log against the store."""
        self.writers.stop()
        with Caller.at(self.manager.address, RUN) as caller:
            stored = stored_tokens(caller.trajectories_stored())
        history = read_history(self.log)
        if history.abandoned:
            self.setting.progress.console.print(f"rollouts given up: {dict(history.abandoned)}")
        return check_tokens(history, stored)


RUN = "chaos"


@contextmanager
def under_load(
    setting: Setting,
    *,
    redis: AbstractContextManager[Any],
    manager: Server,
    durability: trajectory_pb2.Durability.ValueType = trajectory_pb2.DURABILITY_DURABLE,
    writer_flags: Sequence[str] = (),
    lease_seconds: float = _LEASE_SECONDS,
) -> Iterator[Rig]:
    """Start everything, with writers and a trainer at work; end it all afterwards.

    Writers extend no lease: give `lease_seconds` where the store is away for long.
    """
    with ExitStack() as stack:
        stack.enter_context(redis)
        stack.enter_context(manager)
        with Caller.at(manager.address, RUN) as caller:
            caller.create_run(rules(durability, lease_seconds=lease_seconds))
        log, checkpoints = setting.folder / "acks.jsonl", setting.folder / "checkpoints"
        common = ("--target", manager.address, "--run-id", RUN, "--seed", str(setting.seed))
        writers = processes.python(
            "tests.chaos.store.processes.writers",
            *common,
            "--log",
            str(log),
            "--writers",
            str(_WRITERS),
            *writer_flags,
        )
        trainer = processes.python(
            "tests.chaos.store.processes.modelless_trainer",
            *common,
            "--checkpoints",
            str(checkpoints),
        )
        plain = processes.environment()
        rig = Rig(
            setting=setting,
            manager=manager,
            writers=stack.enter_context(Child("writers", writers, setting.folder, plain)),
            trainer=stack.enter_context(Child("trainer", trainer, setting.folder, plain)),
            log=log,
            checkpoints=checkpoints,
        )
        rig.first_ack()
        yield rig


def _drained(caller: Caller) -> int:
    """Wait until the trainer has trained every full step; the groups that remain ready."""
    request = sample_service_pb2.GetReadinessRequest(run_id=caller.run_id)
    limit = time.monotonic() + _SETTLE_SECONDS
    while True:
        counts = call_retrying(caller.samples.GetReadiness, request).readiness
        trained = counts.leased_step == counts.committed_step
        if trained and counts.num_ready_groups < counts.groups_per_step:
            return int(counts.num_ready_groups)
        if time.monotonic() > limit:
            raise RuntimeError(f"the trainer stands still after the load ended: {counts}")
        time.sleep(_LOOK_SECONDS)
