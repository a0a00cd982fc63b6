"""The ranks of one trainer: rank 0 leads, the others follow.

Commands travel through the store of torch.distributed. A rank that has nothing to do waits on the
store, never inside a collective: a gang may be suspended for longer than a collective may take.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainer.config import TrainerConfig
from trainer.policy.commands import Command, Exit, decode, encode
from trainer.ranks.worker import Worker

__all__ = ["Leader", "RankFailedError", "Ranks", "follow", "join"]

_PIECE_BYTES = 4 << 20
"""The store refuses values above 8 MiB."""
_POLL = timedelta(seconds=1)


class RankFailedError(RuntimeError):
    """Another rank could not carry out a command."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    world_size: int
    store: Store
    """For commands; apart from the collectives' own keys."""


def join(config: TrainerConfig) -> Ranks:
    """Join the process group of torchrun's environment; alone without one."""
    torch.set_num_threads(config.threads)
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = next(rendezvous("env://"))[0] if "RANK" in os.environ else HashStore()
    dist.init_process_group(
        "nccl" if config.device == "cuda" else "gloo",
        store=PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
    )
    return Ranks(rank, world_size, PrefixStore("commands", store))


class Leader:
    """Rank 0's side: gives commands to all ranks, itself included. Used by one thread."""

    def __init__(self, ranks: Ranks, worker: Worker) -> None:
        self._ranks = ranks
        self._worker = worker
        self._number = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    @property
    def worker(self) -> Worker:
        """Rank 0's own worker."""
        return self._worker

    def do(self, command: Command) -> list[dict[str, float]]:
        """Give all ranks the same command; their answers in rank order."""
        return self.do_each([command] * self.world_size)

    def do_each(self, commands: Sequence[Command]) -> list[dict[str, float]]:
        """Give each rank its own command; their answers in rank order, when all are done.

        Raises:
            RankFailedError: another rank failed; the gang restarts from its checkpoint.
        """
        # Counted even if our own part fails: the others have this one, and wait for the next.
        number, self._number = self._number, self._number + 1
        for rank, command in enumerate(commands[1:], start=1):
            _send(self._ranks.store, f"command/{number}/{rank}", encode(command))
        answers = [self._worker.do(commands[0])]
        if not isinstance(commands[0], Exit):  # a rank that is gone answers no more
            answers += [self._answer(number, rank) for rank in range(1, self.world_size)]
        return answers

    def _answer(self, number: int, rank: int) -> dict[str, float]:
        key = f"answer/{number}/{rank}"
        while not _arrived(self._ranks.store, key):
            pass
        answer = json.loads(_receive(self._ranks.store, key))
        if "storage" in answer:
            raise OSError(f"rank {rank}: {answer['storage']}")
        if "error" in answer:
            raise RankFailedError(f"rank {rank}: {answer['error']}")
        numbers: dict[str, float] = answer
        return numbers


def follow(ranks: Ranks, worker: Worker, grace_seconds: float) -> None:
    """Carry out rank 0's commands until it says Exit.

    After SIGTERM rank 0 gets `grace_seconds` to finish its step and say so.
    """
    leaving = _Leaving(grace_seconds)
    number = 0
    while not leaving.due():
        key = f"command/{number}/{ranks.rank}"
        if not _arrived(ranks.store, key):
            continue
        command = decode(_receive(ranks.store, key))
        answer = f"answer/{number}/{ranks.rank}"
        try:
            numbers = worker.do(command)
        except Exception as error:
            kind = "storage" if isinstance(error, OSError) else "error"
            failure = {kind: f"{type(error).__name__}: {error}"}
            _send(ranks.store, answer, json.dumps(failure).encode())
            raise
        if isinstance(command, Exit):
            return
        _send(ranks.store, answer, json.dumps(numbers).encode())
        number += 1


class _Leaving:
    """Turns SIGTERM and SIGINT into a deadline: signals reach all ranks, but rank 0 decides."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._deadline = float("inf")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def due(self) -> bool:
        """True when rank 0 had its time."""
        return time.monotonic() > self._deadline

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self._grace_seconds)


def _arrived(store: Store, key: str) -> bool:
    try:
        store.wait([key], _POLL)
    except dist.DistStoreError:
        return False
    return True


def _send(store: Store, key: str, data: bytes) -> None:
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        store.set(f"{key}/{index}", piece)  # type: ignore[arg-type] # its stub knows str only
    # Last, so that whoever sees it finds every piece.
    store.set(key, str(len(pieces)))


def _receive(store: Store, key: str) -> bytes:
    names = [f"{key}/{index}" for index in range(int(store.get(key)))]
    data = b"".join(store.get(name) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return data
