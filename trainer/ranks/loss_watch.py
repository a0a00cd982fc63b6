"""Notices that a rank of the process group was lost, and frees this one from its collectives.

By itself a rank notices the death of one that it waits for. If it waits for one that waits for the
dead, it would do so until the timeout of the group: a thread closes what connects it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from services.chassis.log import get_logger
from trainer.ranks.lives import announcement, end_process

_STUCK_SECONDS = 30
"""A rank that does not come out of its command ends its process, and so the gang."""
_POLL_SECONDS = 0.1
_SOCKETS = Path("/proc/self/fd")


class LossWatch:
    """Watches from the start of a process group until `stop`."""

    def __init__(
        self, store: Store, num_lost: int, working: Event, *, device: str, rank: int
    ) -> None:
        """Watch in a thread.

        Args:
            store: of the commands.
            num_lost: losses that are known already.
            working: is set while a command is carried out.
            device: of the ranks.
            rank: this one.
        """
        self.lost = Event()
        """Set when a further rank was lost."""
        # Of its own, as a connection serves one thread at a time.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._key = announcement(num_lost + 1)
        self._working, self._stopped = working, Event()
        self._device, self._rank = device, rank
        self._kept = _open_sockets()
        Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        with suppress(dist.DistNetworkError):  # all ends
            while not self._store.check([self._key]):
                if self._stopped.wait(_POLL_SECONDS):
                    return
            self._act()

    def _act(self) -> None:
        self.lost.set()
        self._leave()
        self._end_if_stuck()

    def _leave(self) -> None:
        """Let every collective fail."""
        if self._device == "cuda":
            dist.distributed_c10d._abort_process_group()
        elif self._rank:
            # Gloo cannot abort. Rank 0 has connections of services too, and waits for no rank that
            # does not come here.
            for number in _open_sockets() - self._kept:
                _shut_down(number)

    def _end_if_stuck(self) -> None:
        seconds = 0
        while not self._stopped.wait(1.0):
            seconds = seconds + 1 if self._working.is_set() else 0
            if seconds >= _STUCK_SECONDS:
                get_logger().error("stuck_after_the_loss_of_a_rank", rank=self._rank)
                end_process(1)


def _open_sockets() -> frozenset[tuple[int, str]]:
    """File number and inode of each socket of this process."""
    found = set[tuple[int, str]]()
    for entry in _SOCKETS.iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found.add((int(entry.name), target))
    return frozenset(found)


def _shut_down(entry: tuple[int, str]) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(entry[0])) as connection:
        connection.getpeername()  # raises for one that listens, which gloo would not survive
        connection.shutdown(socket.SHUT_RDWR)
