"""Spaces of Gymnasium as text: what an action looks like, which action a text is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from adapters.gymnasium.actions import action_of, json_of, kind_of, schema_of
from adapters.replies import UnreadableAction

_INTEGER = re.compile(r"(?<![\w.-])-?\d{1,18}(?![\w]|\.\d)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
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
        schema = schema_of(self._space)
        is_plain = isinstance(self._space, spaces.Discrete)
        return schema if is_plain else {**schema, "description": self.description()}

    def of_text(self, text: str) -> Any:
        """The last action that `text` names.

        Raises:
            UnreadableAction: it names none.
        """
        if isinstance(self._space, spaces.Text):
            return self._text(text)
        if not isinstance(self._space, spaces.Discrete):
            return self.of_value(_last_json(text, kind_of(self._space)))
        if self._names:
            longest_first = sorted(self._names, key=len, reverse=True)
            words = "|".join(re.escape(name) for name in longest_first)
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
        if isinstance(value, str) and (index := self._index(value)) is not None:
            return index
        try:
            return action_of(self._space, value)
        except ValueError as error:
            raise self._unreadable(value, str(error)) from error

    def _index(self, text: str) -> int | None:
        """The discrete action of a name; None: there is none of this name."""
        names = [name.lower() for name in self._names]
        if text.lower() not in names:
            return None
        assert isinstance(self._space, spaces.Discrete)
        return int(self._space.start) + names.index(text.lower())

    def _text(self, text: str) -> str:
        """The action of a space of texts: a JSON string, or the text itself."""
        for each in (_json_text(text), text, text.strip(), _last_string(text)):
            if each is not None and self._space.contains(each):
                return each
        raise self._unreadable(text, "it is outside the space")

    def _example(self) -> str:
        self._space.seed(0)
        return json.dumps(json_of(self._space, self._space.sample()), ensure_ascii=False)

    def _unreadable(self, value: object, why: str = "") -> UnreadableAction:
        shown = repr(value)[:80]
        reason = f" ({why[:200]})" if why else ""
        return UnreadableAction(f"{shown} is no action{reason}: answer with {self.description()}.")


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


def _json_text(text: str) -> str | None:
    """The JSON string that a text is, if it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _last_string(text: str) -> str | None:
    """The last JSON string of a text."""
    strings = _STRING.findall(text)
    return _json_text(strings[-1]) if strings else None


def _last_json(text: str, kind: type | tuple[type, ...]) -> object:
    """The last JSON value of a text that is of a type, such as `list`."""
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
    of_kind = [value for value in found if isinstance(value, kind)]
    if not of_kind:
        raise UnreadableAction("The answer has no such JSON value: write the action as JSON.")
    return of_kind[-1]
