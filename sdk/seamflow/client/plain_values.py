"""Values of other libraries as those of JSON: numbers, arrays and texts that agents return.

By their own protocols (`item`, `tolist`, `__float__`), so that no such library is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any


def named_rewards(what: str, returned: object) -> dict[str, float]:
    """Rewards by name; a number alone is named "reward".

    Numbers are those of Python, numpy, torch and others: also of one element, fractions, decimals
    and truth values.

    Raises:
        ValueError: a name is no text, or a value no finite number; `what` returned it.
    """
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    rewards: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"{what} returned a reward named {name!r}: use a text as name")
        number = _number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"{what} returned {_shown(value)} as reward {name!r}: return a finite float"
            )
        rewards[whole_text(str(name))] = number
    return rewards


def plain(value: Any) -> Any:
    """A value of one element as one of Python, such as True for `numpy.bool_`; others as given."""
    if not callable(getattr(value, "item", None)) or isinstance(value, Mapping):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):  # it has several elements
        return value


def to_json_value(value: Any) -> Any:
    """A value that `json.dumps` takes: arrays as lists, numbers as such, whole texts.

    As in protobuf's JSON, numbers that are not finite are the texts "NaN", "Infinity" and
    "-Infinity". What it does not know is given back as it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        return {_key(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    if callable(getattr(value, "tolist", None)):  # also those without an element
        return to_json_value(value.tolist())
    if isinstance(value, int):
        return int(value)
    number = _number(value)
    return value if number is None else _finite(number)


def whole_text(text: str) -> str:
    """The text with "\ufffd" for each half of a character: such a surrogate is no text in UTF-8.

    >>> whole_text("a\\ud83d")
    'a\ufffd'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _number(value: Any) -> float | None:
    """The value as a float; None: it is no real number."""
    value = plain(value)
    if not isinstance(value, Real) and not _is_decimal(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _is_decimal(value: Any) -> bool:
    """Whether it is a number that is no `Real` of Python, as `decimal.Decimal` is not."""
    is_number = hasattr(value, "__float__") and hasattr(value, "__abs__")
    return is_number and not isinstance(value, complex)


def _key(key: Any) -> Any:
    key = plain(key)
    return whole_text(key) if isinstance(key, str) else key


def _finite(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
