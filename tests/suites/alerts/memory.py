"""MemoryGrows by what was scraped from a real process: six hours do not pass in a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.suites.alerts.rule_test import agrees

ALERT = "MemoryGrows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a real process had, in bytes."""

    before: float
    after: float


def memory_grows(folder: Path, memory: Memory) -> bool:
    """Whether the alert fires hours after the growth, and not of a process that begins with it."""
    grown = f"{memory.before:.0f}+0x60 {memory.after:.0f}+0x24"  # ten hours, four more
    begun = f"{memory.before:.0f} {memory.after:.0f}+0x83"
    return _agrees(folder, grown, {"9h": False, "11h": True}) and _agrees(
        folder, begun, {f"{hour}h": False for hour in range(14)}
    )


def _agrees(folder: Path, values: str, fires: dict[str, bool]) -> bool:
    start = {"process_start_time_seconds": "1+0x84"}
    return agrees(folder, ALERT, {"process_resident_memory_bytes": values, **start}, fires, 10)
