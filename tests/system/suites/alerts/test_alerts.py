"""Two alerts on a real Prometheus; `make suite NAME=alerts` causes them all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.suites.alerts.__main__ import FACTOR, NEVER, faulty
from tests.suites.alerts.faults import FAULTS
from tests.suites.alerts.memory import Memory, memory_grows
from tests.suites.alerts.prometheus import PACKAGE, missing_programs
from tests.suites.alerts.rule_test import agrees

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"no {' and '.join(missing_programs())}: apt-get install {PACKAGE}",
    ),
]


@pytest.mark.long(short="tests/unit/suites/alerts/test_alert_faults.py")
def test_an_alert_fires_by_its_fault_and_others_are_silent(tmp_path: Path) -> None:
    """Negative control: one whose expression names a label that no process has does not."""
    faults = tuple(fault for fault in FAULTS if fault.fires == {"GroupsDiscarded"})
    outcome = asyncio.run(faulty(tmp_path / "faulty", FACTOR, faults))
    assert outcome.fired == {"GroupsDiscarded"}
    assert NEVER not in outcome.fired
    assert outcome.false == {faults[0].name: set()}


def test_memory_that_grows_is_told_from_a_process_that_starts(tmp_path: Path) -> None:
    """Rules as they are, on hours of values."""
    assert memory_grows(tmp_path, Memory(before=3e8, after=2.7e9))


def test_memory_that_grows_to_little_is_silent(tmp_path: Path) -> None:
    """Negative control: what is below two gigabytes does not fire."""
    assert not memory_grows(tmp_path, Memory(before=3e8, after=1.7e9))


@pytest.mark.parametrize(
    ("steps", "finished", "fires"),
    [
        ("1+0x60", "0x60", {"30m": False, "40m": True}),
        ("1+0x90", "0x20 1+0x70", {"40m": False, "60m": False, "90m": False}),
        ("_x20 1+0x29 2+0x60", "0x90", {"26m": False, "45m": False, "49m": False, "70m": False}),
        ("1+0x20 _x60", "0x20 _x60", {"40m": False, "60m": False}),
    ],
    ids=["stalled", "finished", "a second step after half an hour", "gone"],
)
def test_a_stalled_trainer_is_told_from_a_slow_one(
    tmp_path: Path, steps: str, finished: str, fires: dict[str, bool]
) -> None:
    """Minute by minute; a trainer shows its step from the end of its first one on."""
    series = {"seamflow_trainer_step": steps, "seamflow_trainer_finished": finished}
    assert agrees(tmp_path, "TrainerStalled", series, fires, 1)
