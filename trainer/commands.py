"""Commands of rank 0 to all ranks, and their encoding: JSON, and .npy for arrays."""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.data.micro_batch import MicroBatch, weightless


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add the gradient of a chunk to the gradient of the step."""

    weight_version: int
    """Base version of the step: staleness is relative to it."""
    num_tokens: int
    """Trainable tokens of the chunk, over all ranks."""
    denominator: float
    """The chunk's term in the denominator of the step's loss."""
    micro_batches: tuple[MicroBatch, ...]
    """The rank's micro-batches; every rank has the same number. None with a mini-batch: those of
    its `Predict`, which the rank has."""
    actions: tuple[tuple[int, int, int], ...] = ()
    """In a pipeline, the rank's tasks in order: model, kind, micro-batch (`trainer/pipeline`)."""
    mini_batch: int | None = None
    """Number of the mini-batch of an earlier `Predict`; None: the step has one update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Keep the log-probs and values of a mini-batch under the weights at the start of a step."""

    mini_batch: int
    """Its number, from 0; what an earlier step kept under it is forgotten."""
    micro_batches: tuple[MicroBatch, ...]
    actions: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Compute loss and gradient norms of the step: each rank can then update its weights alone."""

    step: int
    """Number of the step, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimize:
    """Update the weights with the accumulated gradient."""

    step: int
    """Number of the step, from 1."""
    rows: Literal["keep", "send", "drop"] = "drop"
    """What to do with the values of trained tokens: keep them for a later update of the step, send
    those of all its updates to rank 0, or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Forget the accumulated gradient, after computing the loss and gradient norm it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Copy this rank's shard of the training state, and start writing it into `folder`."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Ask whether this rank's shard in `folder` is durable: "written" is 1 or 0."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load the training state in `folder`, written by any number of ranks."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form a new process group, and take the training state over from ranks that have it.

    The gradient of the step in progress is forgotten.
    """

    number: int
    """Of the group, unlike those before."""
    members: tuple[str, ...]
    """Lives of ranks (`trainer/ranks/lives.py`), in the order of their new ranks."""
    replicas: int
    """Copies of the models in the new group."""
    sources: tuple[int, ...]
    """New ranks of those that have the parts of each tensor, in order."""
    num_lost: int
    """Losses of ranks that it takes into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Leave the process group, drop models and state, and wait for a `Form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Copy this rank's part of what is published to the host, where `WriteBuckets` finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBuckets:
    """Write the buckets of the snapshot beside the commands that follow, and report each."""

    attempt: int
    """Number of this attempt, unlike any before."""
    weight_version: int = 0
    """Of the files; 0: compute their checksums and write nothing."""
    epoch: int = 0
    """Of the trainer; 0: nothing is sent."""
    spool: str = ""
    """Folder for files that are sent."""
    folder: str = ""
    """The weights service's, for ranks that see it; empty: it offers none."""
    probe: tuple[str, str] = ("", "")
    """Name of the probe in that folder, and its content as hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Move the device state to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Move the device state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the process."""


Command = (
    Accumulate
    | Predict
    | Measure
    | Optimize
    | Discard
    | Save
    | Written
    | Load
    | Form
    | Leave
    | TakeSnapshot
    | WriteBuckets
    | Release
    | Restore
    | Exit
)
_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in get_args(Command)}


def encode(command: Command) -> bytes:
    """The command as bytes, without pickle."""
    words = {
        "kind": type(command).__name__,
        "fields": {
            entry.name: getattr(command, entry.name)
            for entry in fields(command)
            if entry.name != "micro_batches"
        },
    }
    batches = command.micro_batches if isinstance(command, Accumulate | Predict) else ()
    columns = to_columns(batches)
    buffer = io.BytesIO()
    np.savez(buffer, words=np.frombuffer(json.dumps(words).encode(), np.uint8), **columns)  # type: ignore[arg-type]
    return buffer.getvalue()


def decode(data: bytes) -> Command:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        words = json.loads(arrays["words"].tobytes())
        kind, values = _KINDS[words["kind"]], words["fields"]
        if kind in (Accumulate, Predict):
            values["micro_batches"] = from_columns(arrays)
            values["actions"] = tuple(map(tuple, values.get("actions", ())))
        if kind is Form:
            values |= {name: tuple(values[name]) for name in ("members", "sources")}
        if kind is WriteBuckets:
            values["probe"] = tuple(values["probe"])
        return kind(**values)


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
    """Micro-batches as few bytes: an array for each field over all rows, without padding.

    A field with one value for all tokens is that value, and whole numbers have the smallest type
    that holds them.
    """
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


_PIECE_BYTES = 4 << 20
"""The store rejects values above 8 MiB."""
_POLL = timedelta(seconds=1)


def arrived(store: Store, key: str) -> bool:
    """Whether there is a message; waits a second for it."""
    try:
        store.wait([key], _POLL)
    except dist.DistStoreError:
        return False
    return True


def send(store: Store, key: str, data: bytes) -> None:
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)  # type: ignore[arg-type] # its stub knows str only
    # Last, so that a reader that sees it finds every piece.
    store.set(key, str(len(pieces)))


def receive(store: Store, key: str) -> bytes:
    names = [f"{key}/{index}" for index in range(int(store.get(key)))]
    data = b"".join(store.get(name) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return data
