"""Messages of any size through the key-value store of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

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
    """Leave a message."""
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)  # type: ignore[arg-type] # its stub knows str only
    # Last, so that a reader that sees it finds every piece.
    store.set(key, str(len(pieces)))


def receive(store: Store, key: str) -> bytes:
    """Take a message that has arrived."""
    names = [f"{key}/{index}" for index in range(int(store.get(key)))]
    data = b"".join(store.get(name) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return data
