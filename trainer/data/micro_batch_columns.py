"""Micro-batches as few bytes: an array for each field, over all their rows, without padding.

A field with one value for all tokens (reference log-probs where there is no reference,
temperatures, turn rewards) is that one value, and whole numbers have the smallest type that holds
them. Routed experts are columns of the micro-batches that have some.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.micro_batch import MicroBatch, weightless

_ROWS = "rows"
"""Column with the number of rows of each micro-batch."""
_EXPERTS = "routed_experts_BTLK"
_LIKE = {
    entry.name: getattr(weightless(), entry.name)
    for entry in fields(MicroBatch)
    if entry.name != _EXPERTS
}
_PADDING = {"temperatures_BT": 1}


def to_columns(batches: Sequence[MicroBatch]) -> dict[str, NDArray[Any]]:
    """The columns of micro-batches, by name."""
    columns: dict[str, NDArray[Any]] = {_ROWS: np.array([len(b.lengths_B) for b in batches], int)}
    for name in _LIKE if batches else ():
        parts = [_values(batch, name) for batch in batches]
        columns[name] = _once(_narrow(np.concatenate(parts)))
    for number, batch in enumerate(batches):
        if batch.routed_experts_BTLK is not None:
            real_BT = _real(batch.lengths_B)
            columns[f"{_EXPERTS}.{number}"] = batch.routed_experts_BTLK[real_BT]
    return columns


def from_columns(columns: Mapping[str, NDArray[Any]]) -> tuple[MicroBatch, ...]:
    """The micro-batches of these columns, equal to those they were made of."""
    rows = columns[_ROWS]
    if not len(rows):
        return ()
    lengths_of = _split(columns["lengths_B"], rows, _LIKE["lengths_B"])
    tokens = np.array([each.sum() for each in lengths_of])
    split = {
        # A dump of an earlier release may lack a field.
        name: _split(columns.get(name, like), tokens if name.endswith("_BT") else rows, like)
        for name, like in _LIKE.items()
    }
    return tuple(
        MicroBatch(
            **{name: _shaped(parts[number], lengths_B, name) for name, parts in split.items()},
            routed_experts_BTLK=_experts(columns, number, lengths_B),
        )
        for number, lengths_B in enumerate(lengths_of)
    )


def _values(batch: MicroBatch, name: str) -> NDArray[Any]:
    """A field's values: of rows, or of the tokens of one row after the other."""
    values: NDArray[Any] = getattr(batch, name)
    return values[_real(batch.lengths_B)] if name.endswith("_BT") else values


def _real(lengths_B: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where rows of these lengths are not padding, [B, T]."""
    real_BT: NDArray[np.bool_] = np.arange(lengths_B.max()) < lengths_B[:, None]
    return real_BT


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers in the smallest type that holds them."""
    if values.dtype.kind != "i" or values.min() < 0:
        return values
    return values.astype(np.min_scalar_type(values.max()))


def _once(values: NDArray[Any]) -> NDArray[Any]:
    """One value, if all are the same bit for bit."""
    digits = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return values[:1] if (digits == digits[0]).all() else values


def _split(
    column: NDArray[Any], sizes: NDArray[np.int64], like: NDArray[Any]
) -> list[NDArray[Any]]:
    """The values of each micro-batch, in the type of `like`."""
    size = int(sizes.sum())
    whole = np.full(size, column[0]) if len(column) == 1 else column
    return np.split(whole.astype(like.dtype), np.cumsum(sizes)[:-1])


def _shaped(values: NDArray[Any], lengths_B: NDArray[np.int64], name: str) -> NDArray[Any]:
    """A field of a micro-batch, from its values."""
    if not name.endswith("_BT"):
        return values
    real_BT = _real(lengths_B)
    values_BT = np.full(real_BT.shape, _PADDING.get(name, 0), values.dtype)
    values_BT[real_BT] = values
    return values_BT


def _experts(
    columns: Mapping[str, NDArray[Any]], number: int, lengths_B: NDArray[np.int64]
) -> NDArray[Any] | None:
    """Routed experts of a micro-batch; None: it has none."""
    name = f"{_EXPERTS}.{number}"
    if name not in columns:
        return None
    values, real_BT = columns[name], _real(lengths_B)
    none = np.iinfo(values.dtype).max
    experts_BTLK = np.full((*real_BT.shape, *values.shape[1:]), none, values.dtype)
    experts_BTLK[real_BT] = values
    return experts_BTLK
