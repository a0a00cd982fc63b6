"""Spaces of Gymnasium as text: what an action looks like, which action a text is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from adapters.replies import UnreadableAction

Space = spaces.Space[Any]
_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)

_INTEGER = re.compile(r"(?<![\w.-])-?\d{1,18}(?![\w]|\.\d)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DIGITS = 4


def json_of(space: Space, action: Any) -> Any:
    """An action as `json.dumps` takes it; `action_of` gives it back."""
    if isinstance(space, spaces.Discrete):
        return int(action)
    if isinstance(space, spaces.Text):
        return str(action)
    if isinstance(space, spaces.Dict):
        return {str(name): json_of(each, action[name]) for name, each in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [json_of(each, part) for each, part in zip(space.spaces, action, strict=True)]
    if isinstance(space, spaces.OneOf):
        return [int(action[0]), json_of(space.spaces[action[0]], action[1])]
    if isinstance(space, spaces.Sequence):
        parts = iterate(space.stacked_feature_space, action) if space.stack else action
        return [json_of(space.feature_space, part) for part in parts]
    if isinstance(space, _ARRAYS):
        return _numbers(np.asarray(action))
    return space.to_jsonable([action])[0]


def action_of(space: Space, value: Any) -> Any:
    """The action that a JSON value is.

    Raises:
        ValueError: it is none, by its form or by the bounds of the space; the text says what is
            wrong, for the policy.
    """
    action = _action(space, value)
    if not space.contains(action):
        raise ValueError(f"{value!r} is outside {space}")
    return action


def kind_of(space: Space) -> type | tuple[type, ...]:
    """The types of JSON values that may be an action, as `isinstance` takes them."""
    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return int
    if isinstance(space, _ARRAYS):
        return list if space.shape else (int, float)
    return dict if isinstance(space, spaces.Dict) else list


def schema_of(space: Space) -> dict[str, Any]:
    """JSON Schema of an action."""
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        return {"type": "integer", "minimum": first, "maximum": last}
    if isinstance(space, spaces.Text):
        return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    if isinstance(space, spaces.Dict):
        properties = {str(name): schema_of(each) for name, each in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    if isinstance(space, spaces.Tuple):
        parts = [schema_of(each) for each in space.spaces]
        return {"type": "array", "prefixItems": parts, **_length(len(parts))}
    if isinstance(space, spaces.Sequence):
        return {"type": "array", "items": schema_of(space.feature_space)}
    if isinstance(space, spaces.OneOf):
        choices = [
            {"type": "array", "prefixItems": [{"const": i}, schema_of(each)], **_length(2)}
            for i, each in enumerate(space.spaces)
        ]
        return {"anyOf": choices}
    return _array_schema(space) if isinstance(space, _ARRAYS) else {}


def _action(space: Space, value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        named = _of_type(value, Mapping, "an object")
        names = {str(name): name for name in space.spaces}
        if named.keys() != names.keys():
            raise ValueError(f"the fields are {', '.join(names)}, not {', '.join(named)}")
        return {names[text]: action_of(space.spaces[names[text]], named[text]) for text in names}
    if isinstance(space, spaces.Tuple):
        parts = _of_type(value, list, "a list")
        if len(parts) != len(space.spaces):
            raise ValueError(f"the list has {len(parts)} items, not {len(space.spaces)}")
        return tuple(action_of(each, part) for each, part in zip(space.spaces, parts, strict=True))
    if isinstance(space, spaces.OneOf):
        return _one_of(space, value)
    if isinstance(space, spaces.Sequence):
        return _sequence(space, _of_type(value, list, "a list"))
    if isinstance(space, _ARRAYS):
        return _array(space, value)
    if isinstance(space, spaces.Discrete):
        return _of_type(value, int, "an integer")
    if isinstance(space, spaces.Text):
        return _of_type(value, str, "a text")
    try:
        return space.from_jsonable([value])[0]
    except (TypeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        raise ValueError(f"{value!r} is no value of {space}") from error


def _one_of(space: Any, value: Any) -> tuple[Any, Any]:
    pair = _of_type(value, list, "a list")
    if len(pair) != 2 or pair[0] not in range(len(space.spaces)) or isinstance(pair[0], bool):
        last = len(space.spaces) - 1
        raise ValueError(f"{value!r} is no list of a number from 0 to {last} and its value")
    index = int(pair[0])
    return np.int64(index), action_of(space.spaces[index], pair[1])


def _sequence(space: spaces.Sequence, values: list[Any]) -> Any:
    parts = tuple(action_of(space.feature_space, each) for each in values)
    if not space.stack:
        return parts
    empty: Any = create_empty_array(space.feature_space, len(parts))
    return concatenate(space.feature_space, parts, empty)


def _array(space: Any, value: Any) -> Any:
    """An array of the space's type, none of whose numbers had to be changed for it."""
    try:
        given = np.array(value)
    except (ValueError, OverflowError) as error:  # lists of different lengths
        raise ValueError(f"{value!r} is no list of the shape {space.shape}") from error
    wanted = "iufb" if space.dtype.kind == "f" else "iub"
    if given.size and given.dtype.kind not in wanted:
        raise ValueError(f"{value!r} holds what is no {'number' if 'f' in wanted else 'integer'}")
    with np.errstate(over="ignore"):
        array = given.astype(space.dtype).reshape(given.shape)
    if space.dtype.kind != "f" and not np.array_equal(array, given):
        raise ValueError(f"{value!r} is outside {space}")
    return array


def _of_type(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{value!r} is not {name}")
    return value


def _numbers(array: Any) -> Any:
    """Lists of numbers, each with as few digits as give it back."""
    if array.dtype.kind != "f":
        return array.tolist()
    if array.ndim == 0:
        return float(str(array[()]))
    return [_numbers(each) for each in array]


def _array_schema(space: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number" if space.dtype.kind == "f" else "integer"}
    for length in reversed(space.shape):
        schema = {"type": "array", "items": schema, **_length(length)}
    return schema


def _length(number: int) -> dict[str, int]:
    return {"minItems": number, "maxItems": number}


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
