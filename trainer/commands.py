"""Commands of rank 0 to all ranks, and their encoding: JSON, and .npy for arrays."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_columns import from_columns, to_columns


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
    """As those of `Accumulate`."""
    actions: tuple[tuple[int, int, int], ...] = ()
    """As those of `Accumulate`."""


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
    """An existing folder."""


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
    """The command that `encode` wrote."""
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
