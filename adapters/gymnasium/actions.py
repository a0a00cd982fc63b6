"""Actions of Gymnasium's spaces as JSON values, and JSON values as actions; spaces may nest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

Space = spaces.Space[Any]
_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


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
