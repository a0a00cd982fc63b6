"""Work that goes on beside training, and ends it at once if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["Beside", "beside"]

_LOOK_SECONDS = 1.0
"""Work that begins while training is waited for is looked at by then."""


class Beside:
    """One kind of work, a piece after the other. Once one has failed it stays so."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._piece: asyncio.Task[None] | None = None

    def begin(self, piece: Coroutine[Any, Any, None]) -> None:
        """Begin; nothing is under way, and nothing failed."""
        assert self._piece is None, "a piece is under way"
        self._piece = asyncio.create_task(piece)

    async def end(self) -> None:
        """Wait until nothing is under way. Raises what it failed with, to whoever asks."""
        piece = self._piece
        if piece is None:
            return
        await asyncio.wait({piece})  # whoever waits may be cancelled, the piece goes on
        piece.result()
        if self._piece is piece:
            self._piece = None

    @property
    def living(self) -> set[asyncio.Task[None]]:
        """What is under way, to be waited for."""
        return {piece for piece in self.pieces if not piece.done()}

    @property
    def pieces(self) -> set[asyncio.Task[None]]:
        """What is under way, or was last and failed."""
        return set() if self._piece is None else {self._piece}

    def raise_if_failed(self) -> None:
        """Raise what it ended with, if it failed."""
        if self._piece is not None and self._piece.done() and not self._piece.cancelled():
            self._piece.result()


async def beside(training: Coroutine[Any, Any, None], *works: Beside) -> None:
    """Train; whichever of `works` fails ends it at once, with its error."""
    task = asyncio.ensure_future(training)
    try:
        while not task.done():
            living = {piece for work in works for piece in work.living}
            await asyncio.wait(
                {task, *living}, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for work in works:
                work.raise_if_failed()
        await task
    finally:
        await _given_up({task, *(piece for work in works for piece in work.pieces)})


async def _given_up(tasks: set[asyncio.Future[None]]) -> None:
    """Cancel what is not done, and wait for it. What came of it is asked at the next start."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
