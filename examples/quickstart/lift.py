"""The quickstart's lift as the environment of a tool agent: the model rides it by tool calls."""

from __future__ import annotations

from typing import Any

from examples.quickstart import task

__all__ = ["RIDE", "Lift"]

RIDE: dict[str, Any] = {
    "name": "ride",
    "description": "Ride the lift; it answers with the next call.",
    "parameters": {
        "type": "object",
        "properties": {
            "floors": {
                "type": "string",
                "description": 'Every floor to pass, the called one last: "13 14 15".',
            }
        },
        "required": ["floors"],
    },
}
"""The tool, as a JSON Schema."""


class Lift:
    """The lift of one task."""

    def __init__(self, payload: task.Payload) -> None:
        """`payload` is the task's: {"start": floor, "calls": [floor, ...]}."""
        self._payload = payload
        self._rides: list[str] = []

    def call(self) -> str:
        """The call that waits, such as "at 12 up to 19"; "idle": there is none."""
        if len(self._rides) >= len(self._payload["calls"]):
            return "idle"
        return task.user_message(self._payload, len(self._rides))

    def ride(self, floors: object) -> str:
        """Ride past `floors`; returns the next call."""
        self._rides.append(str(floors))
        return self.call()

    def rewards(self) -> dict[str, float]:
        """{"reward": 0..1, "success": 0 or 1} of all rides."""
        reward, success = task.score(self._payload, self._rides)
        return {"reward": reward, "success": float(success)}
