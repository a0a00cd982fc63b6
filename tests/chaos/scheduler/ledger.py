"""What happened to the nodes, in one order: an append-only file that every process writes to.

It is also the store that takes the effects of gang work, and it fences as the trajectory manager
does: the gang's driver takes its work over when nodes were granted, and from then on only the
members of that grant, under their epochs, have their effects accepted. One lock covers the check
and the line, so the order of the lines is the order of the effects; times are those of the
machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.store.history import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line.

    hold, let_go     a worker took its device or gave it back       node, tag, epoch
    effect           an effect was accepted                         node, epoch, gang
    take, close      a driver took its gang's work over, ended it   gang, members
    grant            what the scheduler granted                     gang, members, asked
    partial          a gang was seen with some of its nodes         gang
    freeze, wake, cut, heal, death, start, kill, back               node; the scheduler: ""
    """

    kind: str
    """See above."""
    time: float
    """Seconds of the machine's monotonic clock."""
    node: str = ""
    """Node it happened to."""
    tag: str = ""
    """Activity."""
    epoch: int | None = None
    """Assignment; None: the worker's contract carries none."""
    gang: str = ""
    """Gang."""
    members: Mapping[str, int] = field(default_factory=dict)
    """Epoch by node."""
    asked: int = 0
    """Nodes the gang asked for."""


class Ledger:
    """A folder of three files: the history, who may have effects now, and a lock.

    Args:
        folder: shared by all processes of a scenario.
        fenced: False accepts effects of any epoch: the negative control.
    """

    def __init__(self, folder: Path, *, fenced: bool = True) -> None:
        self.path = folder / "history.jsonl"
        self._members = folder / "members.json"
        self._fenced = fenced
        self._log = Log(self.path)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        os.close(self._lock)

    def record(self, event: str, **facts: Any) -> None:
        """Add a line."""
        with self._alone():
            self._write(event, **facts)

    def take(self, gang: str, members: Mapping[str, int]) -> None:
        """From now on the work of `gang` is done by `members`, under these epochs, and by nobody
        else."""
        with self._alone():
            self._save({**self._load(), gang: dict(members)})
            self._write("take", gang=gang, members=dict(members))

    def end(self, gang: str) -> None:
        """The work of `gang` is done."""
        with self._alone():
            self._save({name: who for name, who in self._load().items() if name != gang})
            self._write("close", gang=gang)

    def effect(self, node: str, epoch: int) -> bool:
        """Whether an effect of gang work is accepted from `node` under `epoch`."""
        with self._alone():
            gangs = [name for name, who in self._load().items() if who.get(node) == epoch]
            accepted = bool(gangs) or not self._fenced
            if accepted:
                self._write("effect", node=node, epoch=epoch, gang="".join(gangs))
            return accepted

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # The kernel gives the lock back when its holder is killed.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _write(self, event: str, **facts: Any) -> None:
        self._log.write(event, time=time.monotonic(), **facts)

    def _load(self) -> dict[str, dict[str, int]]:
        if not self._members.exists():
            return {}
        members: dict[str, dict[str, int]] = json.loads(self._members.read_text())
        return members

    def _save(self, members: Mapping[str, Mapping[str, int]]) -> None:
        partial = self._members.with_suffix(".partial")
        partial.write_text(json.dumps(members))
        partial.replace(self._members)


def read_events(path: Path) -> list[Event]:
    """All lines of a history, in order."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Event(kind=line.pop("event"), **line) for line in lines]
