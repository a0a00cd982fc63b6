"""Tells in the terminal when each process with a model is ready, which may take minutes."""

from __future__ import annotations

from seamflow.inspect.snapshot import Snapshot


class ReadyNotes:
    """Notices the first answer of each."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, snapshot: Snapshot) -> list[str]:
        """A line for each rollout server, and the trainer, that has not answered before."""
        ready = [f"the rollout server of {name}" for name in snapshot.answering_servers]
        ready += [] if snapshot.trainer is None else ["the trainer"]
        new = [each for each in ready if each not in self._told]
        self._told.update(new)
        return [f"{each} has loaded its model" for each in new]
