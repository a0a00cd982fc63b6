"""Spaces of Gymnasium as text: what an action looks like, which action a text is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from adapters.replies import UnreadableAction

__all__ = ["ActionText", "to_text"]

_INTEGER = re.compile(r"(?<![\w.-])-?\d{1,18}(?![\w]|\.\d)")
_DIGITS = 4


class ActionText:
    """The actions of a space as text. `names` are those of a discrete space, from its start."""

    def __init__(self, space: spaces.Space[Any], names: Sequence[str] = ()) -> None:
        if names and not isinstance(space, spaces.Discrete):
            raise ValueError(
                f"action_names is {list(names)}: only discrete actions have names, not {space}"
            )
        if isinstance(space, spaces.Discrete) and names and len(names) != space.n:
            raise ValueError(
                f"action_names has {len(names)} names: give {space.n}, one for each action"
            )
        self._space = space
        self._names = list(names)

    def description(self) -> str:
        """What the policy is to answer, for its prompt."""
        if self._names:
            return f"one of the words {', '.join(self._names)}"
        if isinstance(self._space, spaces.Discrete):
            first, last = int(self._space.start), int(self._space.start + self._space.n - 1)
            return f"one integer from {first} to {last}"
        return f"a JSON value of the space {self._space}, such as {self._example()}"

    def schema(self) -> dict[str, Any]:
        """JSON Schema of an action."""
        if self._names:
            return {"type": "string", "enum": self._names}
        if isinstance(self._space, spaces.Discrete):
            first, last = int(self._space.start), int(self._space.start + self._space.n - 1)
            return {"type": "integer", "minimum": first, "maximum": last}
        if isinstance(self._space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            return {"type": "array", "description": self.description()}
        return {"description": self.description()}

    def of_text(self, text: str) -> Any:
        """The last action that `text` names.

        Raises:
            UnreadableAction: it names none.
        """
        if not isinstance(self._space, spaces.Discrete):
            return self.of_value(_last_json(text))
        if self._names:
            words = "|".join(re.escape(name) for name in self._names)
            named = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
            if named:
                return self.of_value(named[-1])
        integers = _INTEGER.findall(text)
        if not integers:
            raise self._unreadable(text)
        return self.of_value(int(integers[-1]))

    def of_value(self, value: object) -> Any:
        """The action of a JSON value.

        Raises:
            UnreadableAction: it is outside the space.
        """
        if isinstance(self._space, spaces.Discrete):
            return self._discrete(value)
        try:
            action = self._space.from_jsonable([value])[0]
            contained = self._space.contains(action)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
            contained = False
        if not contained:
            raise self._unreadable(value)
        return action

    def _discrete(self, value: object) -> int:
        space = self._space
        assert isinstance(space, spaces.Discrete)
        if isinstance(value, str) and value.lower() in [name.lower() for name in self._names]:
            return int(space.start) + [n.lower() for n in self._names].index(value.lower())
        if isinstance(value, bool) or not isinstance(value, int) or not space.contains(value):
            raise self._unreadable(value)
        return value

    def _example(self) -> str:
        self._space.seed(0)
        return to_text(self._space.sample())

    def _unreadable(self, value: object) -> UnreadableAction:
        shown = repr(value)[:80]
        return UnreadableAction(f"{shown} is no action: answer with {self.description()}.")


def to_text(value: Any) -> str:
    """A value of a space as JSON, numbers rounded to 4 digits; a text as it is."""
    return value if isinstance(value, str) else json.dumps(_plain(value), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value


def _last_json(text: str) -> object:
    """The last JSON list, object or number of a text."""
    decoder, found = json.JSONDecoder(), []
    position = 0
    while position < len(text):
        if text[position] in "[{-0123456789":
            try:
                value, position = decoder.raw_decode(text, position)
                found.append(value)
                continue
            except (ValueError, RecursionError):
                pass
        position += 1
    if not found:
        raise UnreadableAction("The answer has no JSON value: write the action as JSON.")
    return found[-1]
