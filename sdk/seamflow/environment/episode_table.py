"""The open episodes of an environment server: as many as fit, each on its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc

from seamflow.environment.call_error import CallError
from seamflow.environment.episode import Episode

_RETRY_SECONDS = 1.0


class EpisodeTable:
    """Open episodes by name."""

    def __init__(self, max_episodes: int, idle_seconds: float) -> None:
        """Episodes without a call for `idle_seconds` make room for others."""
        self._max_episodes = max_episodes
        self._idle_seconds = idle_seconds
        self._episodes: dict[str, Episode] = {}
        self._reserved: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, name: str) -> Episode:
        """The episode of this name.

        Raises:
            CallError: NOT_FOUND.
        """
        if name not in self._episodes:
            raise CallError(
                grpc.StatusCode.NOT_FOUND,
                "NOT_FOUND",
                f"episode {name!r} does not exist: it was closed, was idle for more than "
                f"{self._idle_seconds:g} s, or the server was restarted; reset it again",
                metadata={"what": "episode", "name": name},
            )
        return self._episodes[name]

    def get_or_open(self, name: str, make: Callable[[], Episode]) -> Episode:
        """The episode of this name; a new one if there is none.

        Raises:
            CallError: RESOURCE_EXHAUSTED with a RetryInfo while all places are taken.
        """
        if name not in self._episodes:
            self.reserve(name)
            self._reserved.discard(name)
            self._episodes[name] = make()
        return self._episodes[name]

    def reserve(self, name: str) -> None:
        """Take a place for an episode that runs by itself, until `release`.

        Raises:
            CallError: ALREADY_EXISTS while it runs; RESOURCE_EXHAUSTED as in `get_or_open`.
        """
        if name in self._reserved:
            message = f"episode {name!r} runs already"
            raise CallError(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", message)
        if self._num_open() >= self._max_episodes:
            self._close_idle()
        if self._num_open() >= self._max_episodes:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_REQUESTS",
                f"all {self._max_episodes} episodes are taken; raise max_episodes for more",
                retry_after=_RETRY_SECONDS,
            )
        self._reserved.add(name)

    def release(self, name: str) -> None:
        """Give the place of `reserve` back."""
        self._reserved.discard(name)

    def close(self, name: str) -> None:
        """Close an episode, if it is open; its place is free at once."""
        episode = self._episodes.pop(name, None)
        if episode is not None:
            closing = asyncio.create_task(episode.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close_all(self, timeout: float) -> None:
        """Close all episodes, waiting for them at most `timeout` seconds."""
        for name in list(self._episodes):
            self.close(name)
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout)

    def _num_open(self) -> int:
        return len(self._episodes) + len(self._reserved)

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for name in [n for n, e in self._episodes.items() if e.last_call < oldest]:
            self.close(name)
