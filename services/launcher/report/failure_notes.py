"""Tells of failed rollouts in the terminal: once for each cause."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable

from seamflow.failure_causes import causes
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2

_MAX_CHARACTERS = 600
_GROWTH = 4
"""The number of dead letters is shown again once it has grown by this factor."""
_SHARE = 20
"""Listing takes at most one part in this many of the time."""

List = Callable[[], AsyncIterator[trajectory_pb2.Trajectory]]


class FailureNotes:
    """Looks at failures when their number has grown."""

    def __init__(self, listed: List) -> None:
        """`listed` gives the rollouts of the run, without their tokens."""
        self._listed = listed
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
        lines = self._new([each async for each in self._listed()])
        lines += self._dead_letters(readiness.num_dead_letters)
        self._next = time.monotonic() + _SHARE * (time.monotonic() - began)
        return lines

    def _dead_letters(self, number: int) -> list[str]:
        if number < self._next_dead_letters:
            return []
        self._next_dead_letters = _GROWTH * number
        return [
            f"dead letters: {number}, tasks that left the run without being trained: rollouts that "
            "failed too often, samples too old; `seamflow dead-letters` says why each."
        ]

    def _new(self, trajectories: Iterable[trajectory_pb2.Trajectory]) -> list[str]:
        new = [cause for cause in causes(trajectories) if cause.key not in self._shown]
        self._shown |= {cause.key for cause in new}
        return [f"{cause.line[:_MAX_CHARACTERS]}. {cause.cure}" for cause in new]
