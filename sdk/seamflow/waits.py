"""What this process cannot go on without now: each call that is repeated, and each refusal of the
store or of a disk; other processes read it through `ProcessService.GetWaits`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Wait", "Waiting", "current", "in_background", "note", "waiting"]

_log = logging.getLogger(__name__)

_FORGET_SECONDS = 8.0
"""Longer than the pause between two attempts at anything."""
_MOMENT_SECONDS = 1.0
_CURE = "This is an error of the program: restart the process, and report the traceback of its log."


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that is needed and not got."""

    reason: str
    """What is needed, with the last error."""
    cure: str = ""
    """What to do; empty: the reason says it."""
    since: float = 0.0
    """Seconds of `time.monotonic`."""
    until: float = float("inf")
    """When it is forgotten, by the same clock."""


_waits: dict[object, Wait] = {}


def note(subject: str, reason: str, cure: str = "", *, forgets: bool = True) -> None:
    """Say that something was refused: it is forgotten unless it is said again soon.

    Args:
        subject: what refuses, such as "store": a newer reason takes the place of an older one.
        reason: as in `Wait`.
        cure: as in `Wait`.
        forgets: False for what does not come back by itself, such as a task that has ended.
    """
    now = time.monotonic()
    known = _waits.get(subject)
    since = now if known is None or known.until < now else known.since
    _waits[subject] = Wait(reason, cure, since, now + _FORGET_SECONDS if forgets else float("inf"))


class Waiting:
    """One wait; before the first reason nothing is waited for."""

    def say(self, reason: str) -> None:
        known = _waits.get(self)
        _waits[self] = Wait(reason, since=time.monotonic() if known is None else known.since)


@contextmanager
def waiting() -> Iterator[Waiting]:
    """A wait that is over when the context is left, however it is left."""
    wait = Waiting()
    try:
        yield wait
    finally:
        _waits.pop(wait, None)


def current() -> list[Wait]:
    """Each that has lasted for more than a moment, once for each reason, oldest first."""
    now = time.monotonic()
    for subject in [each for each, wait in _waits.items() if wait.until < now]:
        del _waits[subject]
    found: dict[str, Wait] = {}
    for wait in _waits.values():
        if now - wait.since >= _MOMENT_SECONDS:
            known = found.get(wait.reason, wait)
            found[wait.reason] = replace(wait, since=min(wait.since, known.since))
    return sorted(found.values(), key=lambda wait: wait.since)


def in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start `work`; an error that ends it is logged, and said in `ProcessService.GetWaits`.

    Args:
        work: what nobody awaits while it runs.
        name: what it does, such as "polling a rollout server".
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    _log.error("%s has ended", task.get_name(), exc_info=error)
    reason = f"its task '{task.get_name()}', which has ended by {type(error).__name__}: {error}"
    note(f"task {task.get_name()}", reason, _CURE, forgets=False)
