"""What rank 0 tells the other ranks to do, as bytes: JSON for words, .npy arrays for numbers."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trainer.data.micro_batch import MicroBatch

__all__ = [
    "Accumulate",
    "Command",
    "Exit",
    "Gather",
    "Load",
    "Optimize",
    "Release",
    "Restore",
    "Save",
    "Written",
    "decode",
    "encode",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add the gradient of a part of a step to that of the parts before it."""

    weight_version: int
    """Newest version published: what staleness is counted from."""
    num_tokens: int
    """Trainable tokens of the part, over all ranks."""
    denominator: float
    """What the part adds to that by which the step's weighted token losses are divided."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's; every rank has the same number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimize:
    """Take an optimizer step with the gradient of all its parts."""

    step: int
    """1 is the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Copy this rank's shard of the training state, and begin to write it into `folder`."""

    folder: str
    """Exists already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Say whether what was begun in `folder` is durable: "written" is 1 or 0."""

    folder: str
    """Of an earlier `Save`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Take over the training state in `folder`, whatever the number of ranks that wrote it."""

    folder: str
    """A complete checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Put the parameters together on rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Move device state to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Move device state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the process."""


Command = Accumulate | Optimize | Save | Written | Load | Gather | Release | Restore | Exit
_KINDS: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (Accumulate, Optimize, Save, Written, Load, Gather, Release, Restore, Exit)
}


def encode(command: Command) -> bytes:
    """The command as bytes that hold no code."""
    batches = command.micro_batches if isinstance(command, Accumulate) else ()
    words = {
        "kind": type(command).__name__,
        "num_micro_batches": len(batches),
        "fields": {
            entry.name: getattr(command, entry.name)
            for entry in fields(command)
            if entry.name != "micro_batches"
        },
    }
    arrays: dict[str, Any] = {
        f"{number}.{entry.name}": getattr(batch, entry.name)
        for number, batch in enumerate(batches)
        for entry in fields(MicroBatch)
    }
    buffer = io.BytesIO()
    np.savez(buffer, words=np.frombuffer(json.dumps(words).encode(), np.uint8), **arrays)
    return buffer.getvalue()


def decode(data: bytes) -> Command:
    """The command that `encode` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        words = json.loads(arrays["words"].tobytes())
        kind, values = _KINDS[words["kind"]], words["fields"]
        if kind is Accumulate:
            values["micro_batches"] = tuple(
                MicroBatch(
                    **{entry.name: arrays[f"{number}.{entry.name}"] for entry in fields(MicroBatch)}
                )
                for number in range(words["num_micro_batches"])
            )
        return kind(**values)
