"""Lives of ranks: a rank that was killed begins another one, and says so in the command store.

A rank's life is named "rank.number", from 1; `Rank0` decides which lives make a process group.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import Store  # type: ignore[attr-defined]

_NUM_LOST = "num_lost"


def life_name(rank: int, number: int) -> str:
    """The name of a life."""
    return f"{rank}.{number}"


def life_of(name: str) -> tuple[int, int]:
    """Rank and number of a life."""
    rank, _, number = name.partition(".")
    return int(rank), int(number)


def announcement(number: int) -> str:
    """The key of announcement `number`, counted from 1."""
    return f"lost/{number}"


def announce(store: Store, name: str) -> None:
    """Say that a life begins: the one before it was lost."""
    store.set(announcement(store.add(_NUM_LOST, 1)), name)


def announced(store: Store, after: int) -> Iterator[str]:
    """The lives announced since the first `after` announcements, in order."""
    while store.check([announcement(after + 1)]):
        after += 1
        yield store.get(announcement(after)).decode()
