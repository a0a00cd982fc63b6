"""Rows of Parquet files and datasets as JSON has them."""

from __future__ import annotations

import json
import struct
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings, strategies

from services.lib.tasks.sources.arrow_rows import json_rows

FLOAT, MAP = pyarrow.float32(), pyarrow.map_(pyarrow.string(), pyarrow.float32())


def values(column: pyarrow.Array) -> list[Any]:
    """What the rows of a table with this column have."""
    rows = json_rows(pyarrow.table({"x": column}), range(len(column)), "file")
    return [row.values["x"] if not row.problem else row.problem for row in rows]


@pytest.mark.parametrize(
    ("kind", "given", "right"),
    [
        (FLOAT, 0.1, 0.1),
        (pyarrow.float16(), 0.5, 0.5),
        (pyarrow.float64(), 0.1 + 0.2, 0.1 + 0.2),
        (pyarrow.list_(FLOAT), [0.1, None], [0.1, None]),
        (pyarrow.list_(FLOAT, 2), [0.1, 0.7], [0.1, 0.7]),
        (pyarrow.large_list(FLOAT), [0.3], [0.3]),
        (pyarrow.struct({"a": FLOAT}), {"a": 0.1}, {"a": 0.1}),
        (pyarrow.list_(pyarrow.struct({"a": MAP})), [{"a": {"k": 0.1}}], [{"a": {"k": 0.1}}]),
        (MAP, {"k": 0.1}, {"k": 0.1}),
        (MAP, {"k": None}, {"k": None}),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "a", "a"),
    ],
)
def test_values_are_those_of_json(kind: pyarrow.DataType, given: Any, right: Any) -> None:
    """A float32 as it was written, a map as an object, also within others; null stays null."""
    column = pyarrow.array([given, None], kind)
    assert values(column) == [right, None]
    json.dumps(values(column))


def test_structs_have_their_own_keys() -> None:
    """Not those that Arrow adds to the rows of a column, which all have one type."""
    rows = [{"a": 1, "b": {"c": [{"d": 1}, {"e": "x"}]}}, {"b": {"f": 0}}, {}]
    assert values(pyarrow.array(rows)) == rows


def test_text_with_the_type_of_json_is_read() -> None:
    """As datasets stores objects of different kinds; a null that it has is kept."""
    texts = pyarrow.array(['{"a": null}', "[1]"])
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), texts)
    assert values(column) == [{"a": None}, [1]]


def test_a_row_that_is_no_json_is_named_alone() -> None:
    """A map with a key twice; the row after it is read."""
    column = pyarrow.array([[("k", 1.0), ("k", 2.0)], [("k", 3.0)]], MAP)
    first, second = values(column)
    assert first.startswith("file row 1 cannot be read")
    assert second == {"k": 3.0}


@settings(max_examples=200, deadline=None)
@given(strategies.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float32_is_read_as_the_number_that_it_is_nearest_to(number: float) -> None:
    """The shortest one: it is the same in float32, and no digit could be left out."""
    (found,) = values(pyarrow.array([number], FLOAT))
    assert struct.pack("f", found) == struct.pack("f", number)
    digits = len(repr(found).replace("-", "").partition("e")[0].replace(".", "").strip("0"))
    shorter = f"{found:.{max(digits - 2, 0)}e}"
    assert digits <= 1 or struct.pack("f", float(shorter)) != struct.pack("f", number)
