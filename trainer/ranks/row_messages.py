"""Values of trained tokens, from each rank to rank 0 through the store of the commands.

Beside the commands that follow: a thread of each rank waits for its device and sends.

Shape suffixes: B rows, N trainable tokens of all rows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.commands import arrived, receive, send
from trainer.policy.forward import TokenValues, TrainedRows

_END_SECONDS = 5.0
_Arrays = Mapping[str, NDArray[Any]]


class RowSender:
    """Of one rank."""

    def __init__(self, store: Store) -> None:
        self._commands = store
        self._store: Store | None = None
        self._thread: Thread | None = None

    def start(self, step: int, rows: Sequence[TrainedRows]) -> None:
        """Send the rows of a step in a thread; those of the step before are sent first."""
        if self._store is None:
            # A connection of its own, as a waiting request blocks its connection.
            self._store = self._commands.clone()  # type: ignore[attr-defined]
        key, number = _key(step, _rank()), _num_ranks()
        work = (self._store, key, number, rows, self._thread)
        self._thread = Thread(target=_send, args=work, daemon=True, name="trained rows")
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread: a process that ends meanwhile aborts."""
        if self._thread is not None:
            self._thread.join(_END_SECONDS)


def _send(
    store: Store, key: str, num_ranks: int, rows: Sequence[TrainedRows], before: Thread | None
) -> None:
    if before is not None:
        before.join()
    buffer = io.BytesIO()
    np.savez(buffer, num_ranks=np.array(num_ranks), **_columns(rows))  # type: ignore[arg-type]
    with suppress(RuntimeError):  # the trainer ends
        send(store, key, buffer.getvalue())


class RowReceiver:
    """Of rank 0. Used by one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]

    def receive(self, step: int, seconds: float) -> dict[int, TokenValues]:
        """By number of a step's sequence its values; those of a rank that was lost are missing."""
        found, rank, num_ranks, deadline = dict[int, TokenValues](), 0, 1, monotonic() + seconds
        while rank < num_ranks and monotonic() < deadline:
            if arrived(self._store, _key(step, rank)):
                with np.load(io.BytesIO(receive(self._store, _key(step, rank)))) as arrays:
                    found |= _values(arrays)
                    num_ranks = int(arrays["num_ranks"])
                rank += 1
        return found


def _columns(rows: Sequence[TrainedRows]) -> dict[str, NDArray[Any]]:
    """All rows as one array for each field, in the types that are recorded."""
    if not rows:
        return {}
    columns: dict[str, NDArray[Any]] = {
        "sequences": np.concatenate([each.sequences_B for each in rows]),
        "num_tokens": np.concatenate([each.num_tokens_B for each in rows]),
        "logprob_differences": _halves([each.logprob_differences_N for each in rows]),
    }
    advantages = [each.advantages_N for each in rows]
    known = [each for each in advantages if each is not None]
    return columns | ({"advantages": _halves(known)} if len(known) == len(rows) else {})


def _halves(parts: Sequence[torch.Tensor]) -> NDArray[np.float16]:
    # Halves hold up to 65,504; what is beyond is infinite then.
    return torch.cat(list(parts)).to("cpu", torch.float16).numpy()


def _values(arrays: _Arrays) -> dict[int, TokenValues]:
    if "sequences" not in arrays:
        return {}
    ends = np.cumsum(arrays["num_tokens"])[:-1]
    differences = np.split(arrays["logprob_differences"], ends)
    advantages: Sequence[NDArray[np.float16] | None] = [None] * len(differences)
    if "advantages" in arrays:
        advantages = np.split(arrays["advantages"], ends)
    values = map(TokenValues, differences, advantages)
    numbered = zip(arrays["sequences"].tolist(), values, strict=True)
    return {number: each for number, each in numbered if number >= 0}


def _key(step: int, rank: int) -> str:
    return f"rows/{step}/{rank}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
