"""Lives of ranks: a rank that was killed begins another one, and says so in the command store.

A life is named "rank.number", from 1; `Rank0` decides which lives make a process group. With
replicas a rank runs in a child process, and in a new one when a signal killed that; torchrun, which
restarts all ranks when one dies, watches the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

_NUM_LOST = "num_lost"


def life_name(rank: int, number: int) -> str:
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


def end_process(code: int) -> NoReturn:
    """End now with this exit code, when everything is closed.

    The interpreter's own end would destroy the objects of torch.distributed beside their threads;
    now and then it aborted there ("terminate called without an active exception"), and a process
    that had done its work looked like one that crashed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def keep_rank(work: Callable[[int], None]) -> int:
    """Run a rank until it ends by itself, or by a signal that this process got; its exit code.

    A child is forked with all that is imported, so that it begins at once. It ends with this
    process.

    Args:
        work: of the rank; its argument is the number of the life, from 1.
    """
    keeper = _Keeper()
    for life in count(1):
        code = keeper.run(work, life)
        if code >= 0 or keeper.is_ending:
            return code if code >= 0 else 128 - code
    raise AssertionError


class _Keeper:
    """Runs one child after the other, and hands signals on."""

    def __init__(self) -> None:
        self.is_ending = False
        """Whether this process got a signal to end."""
        self._child = 0
        for number in _SIGNALS:
            signal.signal(number, self._hand_on)

    def run(self, work: Callable[[int], None], life: int) -> int:
        """The exit code of a child; negative: the signal that killed it, or kept it from living."""
        keeper = os.getpid()
        # A signal that comes before either side can act on it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if not self.is_ending:
            self._child = os.fork()
            if self._child == 0:
                _live(work, life, keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if not self._child:
            return -signal.SIGTERM
        code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._child = 0
        return code

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.is_ending = True
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def _live(work: Callable[[int], None], life: int, keeper: int) -> NoReturn:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it ended before that
        end_process(1)
    try:
        work(life)
    except SystemExit as exit_:
        end_process(int(exit_.code or 0))
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)
