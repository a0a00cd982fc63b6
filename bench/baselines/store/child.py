"""A driver's other processes: the reader, and the server where a store has none of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_SECONDS = 120.0


class Child:
    """Runs `target(connection, *arguments)`, which may send words to the one who waits for them."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        """Prepare it; `with` starts it, and ends it whatever it does."""
        # A fresh interpreter: gRPC, Ray and Reverb do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(target=target, args=(self._theirs, *arguments), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()  # so that its end is seen here
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()

    def receive(self) -> Any:
        """The next word it sends.

        Raises:
            TimeoutError: it said nothing for two minutes.
            EOFError: it ended without a word; its traceback is on stderr.
        """
        if not self._ours.poll(_SECONDS):
            raise TimeoutError(f"no word from {self._process.name} within {_SECONDS:g} s")
        return self._ours.recv()
