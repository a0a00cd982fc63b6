"""Random state of a game: TextArena draws from the global one of the process."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any

import numpy as np

_using = threading.Lock()


class OwnRandom:
    """While it is entered, the global random state of Python and numpy is this game's own.

    One game at a time: others wait.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()
        self._numpy_state: Any = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        _using.acquire()
        random.setstate(self._state)
        np.random.set_state(self._numpy_state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state = random.getstate()
        self._numpy_state = np.random.get_state()
        _using.release()
