"""What the terminal tells of a trainer's alarms: each once."""

from __future__ import annotations

from seamflow.trainer.v1.trainer_service_pb2 import GetStatusResponse

from services.launcher.report.notes import AlarmNotes


def test_each_alarm_is_told_once() -> None:
    """Also after a restart of the trainer, which has forgotten it or raises it again."""
    notes = AlarmNotes()
    assert notes.look(None) == []
    assert notes.look(GetStatusResponse(alarms=["a", "b", "a"])) == ["alarm: a", "alarm: b"]
    assert notes.look(GetStatusResponse()) == []
    assert notes.look(GetStatusResponse(alarms=["b", "c"])) == ["alarm: c"]
