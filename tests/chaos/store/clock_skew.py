"""Clocks that are ten minutes off: leases go by the clock of the store alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from seamflow.trajectory.v1 import sample_service_pb2, task_service_pb2

from bench.harness import processes
from bench.harness.processes import Server
from tests.chaos.calls import Caller, call_retrying
from tests.chaos.store.rig import RUN, Outcome, Setting, rules

_LEASE_SECONDS = 4.0
_MARGIN_SECONDS = 1.0
_SKEWS = ("-10m", "+10m")


def skew(setting: Setting, leases: int = 40) -> Outcome:
    """Managers ten minutes behind and ahead sweep one store: no lease ends early or late."""
    library = _faketime()
    if library is None:
        setting.progress.console.print("clock skew skipped: install faketime (libfaketime.so.1)")
        return Outcome()
    redis_server = processes.redis_server(setting.folder / "redis")
    with ExitStack() as stack:
        stack.enter_context(redis_server)
        callers = []
        for offset in _SKEWS:
            manager = stack.enter_context(_skewed(setting, redis_server, library, offset))
            callers.append(stack.enter_context(Caller.at(manager.address, RUN)))
        callers[0].create_run(rules(group_size=leases, lease_seconds=_LEASE_SECONDS))
        callers[0].submit("task")
        changes = _changed_leases(setting, callers, leases) + _changed_epochs(callers)
    figures = {"skewed_leases": float(leases), "lease_changes_under_skew": float(changes)}
    return Outcome(figures=figures)


def _changed_leases(setting: Setting, callers: Sequence[Caller], leases: int) -> int:
    """Leases that were lost too early, or held too long, at any manager."""
    held = [callers[i % len(callers)].lease() for i in range(leases)]
    tokens = [lease.lease_token for lease in held if lease is not None]
    assert len(tokens) == leases, f"{len(tokens)} of {leases} tasks were leased"
    changes = 0
    for _ in setting.progress.track(range(3), description="leases on skewed clocks"):
        time.sleep(_LEASE_SECONDS - _MARGIN_SECONDS)
        changes += sum(_lost(caller, tokens) for caller in callers)
    time.sleep(_LEASE_SECONDS + _MARGIN_SECONDS)
    return changes + sum(leases - _lost(caller, tokens) for caller in callers)


def _lost(caller: Caller, tokens: Sequence[str]) -> int:
    request = task_service_pb2.ExtendTasksRequest(run_id=RUN, lease_tokens=tokens)
    return len(call_retrying(caller.tasks.ExtendTasks, request).lost_lease_tokens)


def _changed_epochs(callers: Sequence[Caller]) -> int:
    """Trainers that take over by turns: each must get a newer epoch than the one before."""
    epochs = []
    for number in range(10):
        request = sample_service_pb2.ReconcileRequest(run_id=RUN, trainer_id=f"trainer-{number}")
        caller = callers[number % len(callers)]
        epochs.append(call_retrying(caller.samples.Reconcile, request).epoch)
    return sum(later <= earlier for earlier, later in pairwise(epochs))


def _skewed(setting: Setting, redis_server: Server, library: Path, offset: str) -> Server:
    extra = {
        "LD_PRELOAD": str(library),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    return processes.manager(setting.folder, processes.redis_url(redis_server), extra=extra)


def _faketime() -> Path | None:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return found[0] if found else None
