"""What an operator must know of a trainer that goes on training."""

from __future__ import annotations

from collections import deque

from services.chassis.log import get_logger

_MAX_ALARMS = 20
_MAX_CHARACTERS = 600


class Alarms:
    """The newest alarms of this process: in the log, in GetStatus, and so in the terminal."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque(maxlen=_MAX_ALARMS)
        """Oldest first; each names what happened and the cure."""

    def add(self, text: str) -> None:
        """Raise an alarm."""
        get_logger().error("alarm", alarm=text)
        self.texts.append(text[:_MAX_CHARACTERS])
