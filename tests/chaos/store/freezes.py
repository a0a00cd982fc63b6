"""SIGSTOPs past a lease: who was taken over while frozen must find the door closed."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from seamflow.trajectory.v1 import (
    sample_service_pb2,
    task_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)

from bench.harness import processes
from bench.harness.processes import Child, Server
from tests.chaos.calls import Caller, call_retrying
from tests.chaos.store.checker import Verdict
from tests.chaos.store.processes import frozen_client
from tests.chaos.store.rig import Outcome, Setting, rules

LEASE_SECONDS = 1.0
# Turns are what is held most.
HOLDS = ("turn", "turn", "turn", "task", "trainer")
_VICTIMS = 10
_IDS_APART = 10_000
_USURPER_IDS = 1 << 30
_LEASE_WAIT_SECONDS = 30


class Victim(Child):
    """A process that holds something when told, see `victim.py`."""

    _pipes: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it with pipes to it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=processes.ROOT,
            )

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a victim ended:\n{self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(slots=True, kw_only=True)
class Holder:
    """A victim that holds something."""

    frozen_client: Victim
    """Its process."""
    caller: Caller
    """Calls of the one who takes over."""
    number: int
    """Counts freezes."""
    held: dict[str, Any]
    """What the victim said it holds."""


Afterwards = Callable[[], int]
"""Counts the stale writes that the store itself shows, once the victim has given up."""


def freeze(setting: Setting, freezes: int = 100) -> Outcome:
    """Freeze holders of turns, tasks and steps, take over, and wake them.

    Then freeze a manager with their writes in it: what it wakes up with is as stale.
    """
    holders, managers = setting.part("holders"), setting.part("managers")
    rounds = max(1, freezes // _VICTIMS)
    verdict = freeze_holders(holders, freezes)
    verdict += freeze_holders(managers, rounds * _VICTIMS, holds=("turn",), freeze_manager=True)
    figures = {"freezes": float(freezes), "manager_freezes": float(rounds)}
    return Outcome(verdict=verdict, figures=figures)


def freeze_holders(
    setting: Setting,
    freezes: int,
    *,
    holds: Sequence[str] = HOLDS,
    freeze_manager: bool = False,
    module: str = "trajectory_manager",
    extra: Mapping[str, str] | None = None,
) -> Verdict:
    """Take over from holders that stand still, or from those whose manager does.

    `module` runs the managers, with `extra` in their environment.
    """
    redis_server = processes.redis_server(setting.folder / "redis")
    url = processes.redis_url(redis_server)
    theirs, ours = (
        processes.manager(setting.folder, url, module=module, extra=extra) for _ in range(2)
    )
    with ExitStack() as stack:
        for server in (redis_server, theirs, ours):
            stack.enter_context(server)
        victims = [stack.enter_context(_victim(setting, theirs, i)) for i in range(_VICTIMS)]
        frozen_manager = theirs if freeze_manager else None
        takers = _Takers(manager=ours, holds=holds, frozen_manager=frozen_manager)
        bar = setting.progress.add_task("SIGSTOP past a lease", total=freezes)
        stale = 0
        for first in range(0, freezes, _VICTIMS):
            numbers = range(first, min(first + _VICTIMS, freezes))
            stale += takers.take(victims, numbers)
            setting.progress.advance(bar, len(numbers))
    setting.progress.console.print(f"stale holders were refused with {dict(takers.reasons)}")
    return Verdict(stale_writes_accepted=stale)


@dataclass(slots=True, kw_only=True)
class _Takers:
    """Those who take over, through a manager of their own."""

    manager: Server
    holds: Sequence[str]
    frozen_manager: Server | None
    reasons: Counter[str] = field(default_factory=Counter)

    def take(self, victims: Sequence[Victim], numbers: Sequence[int]) -> int:
        """Freeze all, take over from all, wake all; the stale writes that were accepted."""
        with ExitStack() as calls:
            holders = [
                self._begun(process, number, calls)
                for process, number in zip(victims, numbers, strict=False)
            ]
            for holder in holders:
                holder.held = holder.frozen_client.answer()
                if self.frozen_manager is None:
                    holder.frozen_client.send(signal.SIGSTOP)
            if self.frozen_manager is not None:
                self.frozen_manager.send(signal.SIGSTOP)
            time.sleep(LEASE_SECONDS)
            taken = []
            for holder in holders:
                afterwards = TAKE_OVER[self._kind(holder.number)](holder)
                taken.append((holder, time.monotonic(), afterwards))
            for stopped in [self.frozen_manager] if self.frozen_manager else victims:
                stopped.send(signal.SIGCONT)
            return sum(itertools.starmap(self._stale, taken))

    def _kind(self, number: int) -> str:
        return self.holds[number % len(self.holds)]

    def _begun(self, process: Victim, number: int, calls: ExitStack) -> Holder:
        run_id = f"frozen-{number}"
        caller = calls.enter_context(Caller.at(self.manager.address, run_id))
        kind = self._kind(number)
        _prepare(caller, kind)
        process.tell({"holds": kind, "run_id": run_id, "first_id": 1 + number * _IDS_APART})
        return Holder(frozen_client=process, caller=caller, number=number, held={})

    def _stale(self, holder: Holder, since: float, afterwards: Afterwards) -> int:
        answer = holder.frozen_client.answer()
        self.reasons[answer["refused"] or "nothing"] += 1
        accepted: list[float] = answer["accepted"]
        return sum(sent > since for sent in accepted) + afterwards()


def _prepare(caller: Caller, kind: str) -> None:
    """A run with what the victim needs: nothing, a task, or two complete groups."""
    durability = trajectory_pb2.DURABILITY_DURABLE
    seconds = LEASE_SECONDS if kind == "task" else 60.0
    caller.create_run(rules(durability, group_size=1, groups_per_step=1, lease_seconds=seconds))
    if kind == "task":
        caller.submit("task")
    if kind == "trainer":
        caller.submit("first", "second")
        for _ in range(2):
            _play(caller, _lease(caller))


def _take_turn(holder: Holder) -> Afterwards:
    """Another gateway takes the turn over; every second one writes before the victim wakes."""
    caller, rollout_id = holder.caller, holder.held["rollout_id"]
    opened = frozen_client.begin(caller, rollout_id, "usurper")
    recorded = len(opened.tokens.token_ids) // 4
    writes = frozen_client.appends(caller, rollout_id, opened.epoch, _USURPER_IDS, recorded)
    if holder.number % 2:
        call_retrying(*next(writes))

    def afterwards() -> int:
        refused = bool(caller.refusal(*next(writes)))
        request = trajectory_service_pb2.GetTrajectoryRequest(
            run_id=caller.run_id, rollout_id=rollout_id
        )
        trajectory = call_retrying(caller.trajectories.GetTrajectory, request).trajectory
        behind = trajectory.turns[0].tokens.token_ids[recorded:]
        stale: int = sum(token_id < _USURPER_IDS for token_id in behind)
        return stale + int(refused)

    return afterwards


def _take_task(holder: Holder) -> Afterwards:
    """The lease ran out: another agent plays the replacement."""
    lease = _lease(holder.caller)
    assert lease.rollout_id != holder.held["rollout_id"], "the sample was not replaced"
    _play(holder.caller, lease)
    return lambda: 0


def _take_step(holder: Holder) -> Afterwards:
    """Another trainer takes over, gets the same samples, and commits them."""
    caller, samples = holder.caller, holder.caller.samples
    reconcile = sample_service_pb2.ReconcileRequest(run_id=caller.run_id, trainer_id="usurper")
    epoch = call_retrying(samples.Reconcile, reconcile).epoch
    first = _leased_step(caller, epoch, 1)
    commit = sample_service_pb2.CommitStepRequest(run_id=caller.run_id, epoch=epoch, step=1)
    call_retrying(samples.CommitStep, commit)

    def afterwards() -> int:
        second = _leased_step(caller, epoch, 2)
        return int(first != holder.held["sample_ids"]) + int(bool(set(first) & set(second)))

    return afterwards


TAKE_OVER: dict[str, Callable[[Holder], Afterwards]] = {
    "turn": _take_turn,
    "task": _take_task,
    "trainer": _take_step,
}


def _lease(caller: Caller) -> task_service_pb2.TaskLease:
    lease = caller.lease(_LEASE_WAIT_SECONDS)
    assert lease is not None, f"no task of {caller.run_id} to lease"
    return lease


def _play(caller: Caller, lease: task_service_pb2.TaskLease) -> None:
    """One whole rollout of one turn."""
    frozen_client.start_rollout(caller, lease.rollout_id, lease.lease_token)
    epoch = frozen_client.begin(caller, lease.rollout_id, "player").epoch
    calls: Iterator[frozen_client.Call] = iter(
        [
            next(frozen_client.appends(caller, lease.rollout_id, epoch, _USURPER_IDS)),
            frozen_client.ended(caller, lease.rollout_id, epoch),
            frozen_client.finished(caller, lease.rollout_id),
        ]
    )
    for call, request in calls:
        call_retrying(call, request)


def _leased_step(caller: Caller, epoch: int, step: int) -> list[str]:
    request = sample_service_pb2.LeaseSamplesRequest(run_id=caller.run_id, epoch=epoch, step=step)
    answer = call_retrying(caller.samples.LeaseSamples, request)
    return [sample.sample_id for sample in answer.samples]


def _victim(setting: Setting, manager: Server, number: int) -> Victim:
    command = processes.python(
        "tests.chaos.store.processes.frozen_client", "--target", manager.address
    )
    return Victim(f"victim-{number}", command, setting.folder, processes.environment())
