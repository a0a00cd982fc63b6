"""People are told what stands still, once, and that it is over."""

from __future__ import annotations

from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.snapshot import Snapshot

from services.launcher.report.notes import WaitNotes

FOUND = Finding(rule="process_stopped", sentence="It stands.", cure="Wake it.", subject="a")


def test_a_finding_is_told_once_it_has_lasted_and_once_it_is_over() -> None:
    """A wait of a moment is not told, nor its end."""
    found = [FOUND]
    notes = WaitNotes(lambda _: found, seconds=4.0)
    told = [notes.look(Snapshot(), float(now)) for now in (0, 3, 4, 5)]
    assert told == [[], [], ["waiting (process_stopped): It stands. Wake it."], []]
    found.clear()
    assert notes.look(Snapshot(), 6.0) == ["no longer: It stands."]
    found.append(FOUND)
    assert notes.look(Snapshot(), 7.0) == []
    found.clear()
    assert notes.look(Snapshot(), 8.0) == []


def test_two_processes_are_told_each() -> None:
    """By rule and subject."""
    other = Finding(rule="process_stopped", sentence="So does b.", cure="", subject="b")
    notes = WaitNotes(lambda _: [FOUND, other], seconds=0.0)
    assert len(notes.look(Snapshot(), 0.0)) == 2
