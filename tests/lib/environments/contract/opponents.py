"""Opponents for games of TextArena."""

from __future__ import annotations

import random
import re


def first_free(observation: str, chance: random.Random) -> str:
    """The first cell that is listed last."""
    return re.findall(r"'(\[\d\])'", observation.rpartition("Available Moves")[2])[0]  # type: ignore[no-any-return]


def cheats(observation: str, chance: random.Random) -> str:
    """No move at all."""
    return "[99]"
