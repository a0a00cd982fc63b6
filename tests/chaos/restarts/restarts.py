"""Which process is ended by which signal, one after the other."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.suites.mixed.changes import Change
from tests.suites.mixed.source_tree import ROOT, SourceTree

PRESENT = SourceTree(name="present", root=ROOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Change):
    """One process is ended, and started again as it was; all others go on."""

    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.process} by {self.signal.name}"


def restarts(processes: Sequence[str], *, terms: int, kills: int, seed: int) -> list[Restart]:
    """Each process `terms` times by SIGTERM and `kills` times by SIGKILL, in a drawn order."""
    signals = [signal.SIGTERM] * terms + [signal.SIGKILL] * kills
    made = [
        Restart(phase="restart", process=name, tree=PRESENT, signal=number)
        for name in processes
        for number in signals
    ]
    return Random(seed).sample(made, len(made))
