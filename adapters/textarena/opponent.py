"""A simple opponent: any legal move."""

from __future__ import annotations

import random
import re

from seamflow.environment import EnvironmentFailed

_LISTED = re.compile(r"(?:available|valid|legal|possible)\s+(?:moves|actions)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")


def random_move(observation: str, chance: random.Random) -> str:
    """A move of those that the observation lists last, such as "Available Moves: '[0]', '[1]'".

    Raises:
        EnvironmentFailed: it lists none.
    """
    lists = list(_LISTED.finditer(observation))
    line = observation[lists[-1].end() :].lstrip(": \n").partition("\n")[0] if lists else ""
    moves: list[str] = _MOVE.findall(line)
    if not moves:
        raise EnvironmentFailed(
            "the observation lists no legal moves for the opponent: give a function that knows the "
            f"game as `opponent`; it ends with {observation[-200:]!r}"
        )
    return chance.choice(moves)
