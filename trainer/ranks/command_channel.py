"""Commands from rank 0 to all ranks, through the key-value store of torch.distributed.

An idle rank waits on the store, never inside a collective: a trainer may be suspended for longer
than the timeout of a collective.
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

__all__ = ["Rank0", "RankFailedError", "RankInfo", "check_nodes", "join", "worker_loop"]

_PIECE_BYTES = 4 << 20
"""The store rejects values above 8 MiB."""
_POLL = timedelta(seconds=1)


class RankFailedError(RuntimeError):
    """Another rank failed to execute a command."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's rank, and the store that connects it with the others."""

    rank: int
    world_size: int
    store: Store
    """For commands; its keys do not collide with those of the collectives."""
    nodes: tuple[str, ...] = ("",)
    """The node of each rank; empty names: not given."""


def join(config: TrainerConfig) -> RankInfo:
    """Join the process group of torchrun's environment; without one, a group of one rank.

    Raises:
        ValueError: the ranks run on other nodes than the gang has.
    """
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
    commands = PrefixStore("commands", store)
    nodes = _nodes(commands, config.gang.node_id, rank, world_size)
    check_nodes(nodes, config.gang.nodes)
    return RankInfo(rank, world_size, commands, nodes)


def check_nodes(nodes: Sequence[str], number: int) -> None:
    """Check the node of each rank against the number of nodes of the gang.

    Raises:
        ValueError: there are more or fewer, or some of several have no name.
    """
    names = sorted(set(nodes))
    if names == [""] and number == 1:
        return
    if "" in names or len(names) != number:
        where = ", ".join(name or "a node without a name" for name in names)
        raise ValueError(
            f"trainer.gang.nodes is {number} and the ranks run on {where}: "
            "give each rank the trainer.gang.node_id of its node"
        )


class Rank0:
    """Rank 0: gives commands to all ranks, itself included. Used by one thread."""

    def __init__(self, ranks: RankInfo, worker: Worker) -> None:
        self._ranks = ranks
        self._worker = worker
        self._number = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank; empty names: not given."""
        return self._ranks.nodes

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
            RankFailedError: another rank failed; the trainer restarts from its checkpoint.
        """
        # Incremented even if rank 0 fails: the other ranks have got this command.
        number, self._number = self._number, self._number + 1
        for rank, command in enumerate(commands[1:], start=1):
            _send(self._ranks.store, f"command/{number}/{rank}", encode(command))
        answers = [self._worker.do(commands[0])]
        if not isinstance(commands[0], Exit):  # ranks end without answering it
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
        results: dict[str, float] = answer
        return results


def worker_loop(ranks: RankInfo, worker: Worker, grace_seconds: float) -> None:
    """Execute rank 0's commands until Exit.

    After SIGTERM, rank 0 has `grace_seconds` to finish its step and send Exit.
    """
    graceful_exit = _GracefulExit(grace_seconds)
    number = 0
    while not graceful_exit.is_due():
        key = f"command/{number}/{ranks.rank}"
        if not _arrived(ranks.store, key):
            continue
        command = decode(_receive(ranks.store, key))
        answer = f"answer/{number}/{ranks.rank}"
        try:
            results = worker.do(command)
        except Exception as error:
            kind = "storage" if isinstance(error, OSError) else "error"
            failure = {kind: f"{type(error).__name__}: {error}"}
            _send(ranks.store, answer, json.dumps(failure).encode())
            raise
        if isinstance(command, Exit):
            return
        _send(ranks.store, answer, json.dumps(results).encode())
        number += 1


class _GracefulExit:
    """Turns SIGTERM and SIGINT into a deadline: all ranks get the signal, but rank 0 decides."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._deadline = float("inf")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def is_due(self) -> bool:
        """True when the grace period after a signal is over."""
        return time.monotonic() > self._deadline

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._deadline = min(self._deadline, time.monotonic() + self._grace_seconds)


def _nodes(store: Store, node_id: str, rank: int, world_size: int) -> tuple[str, ...]:
    """The node of each rank, after telling the others this one's."""
    store.set(f"node/{rank}", node_id)
    return tuple(store.get(f"node/{other}").decode() for other in range(world_size))


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
    # Last, so that a reader that sees it finds every piece.
    store.set(key, str(len(pieces)))


def _receive(store: Store, key: str) -> bytes:
    names = [f"{key}/{index}" for index in range(int(store.get(key)))]
    data = b"".join(store.get(name) for name in names)
    for name in (key, *names):
        store.delete_key(name)
    return data
