"""Tells of a trainer's alarms in the terminal: each once."""

from __future__ import annotations

from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb


class AlarmNotes:
    """Remembers which alarms were told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, trainer: trainer_pb.GetStatusResponse | None) -> list[str]:
        """A line for each alarm that was not told yet."""
        alarms = () if trainer is None else trainer.alarms
        new = [alarm for alarm in dict.fromkeys(alarms) if alarm not in self._told]
        self._told.update(new)
        return [f"alarm: {alarm}" for alarm in new]
