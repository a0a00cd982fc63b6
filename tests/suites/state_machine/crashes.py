"""Managers that are killed between two steps on their store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trajectory_manager.store.redis.connect import Store


class KilledError(Exception):
    """The manager ended here."""


class Fuse:
    """Lets `steps` calls through to the store; the next one never happens."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.called: list[str] = []

    def burn(self, name: str) -> None:
        """One call more.

        Raises:
            KilledError: the manager did not live to make it.
        """
        self.called.append(name)
        if self._left == 0:
            raise KilledError
        self._left -= 1


class _Dying:
    """A part of a store as a manager with a fuse sees it."""

    def __init__(self, part: Any, fuse: Fuse) -> None:
        self._part = part
        self._fuse = fuse

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._part, name)

        async def call(*args: Any, **facts: Any) -> Any:
            self._fuse.burn(name)
            return await method(*args, **facts)

        return call


def dying(store: Store, fuse: Fuse) -> Store:
    """`store`, for a manager that is killed when the fuse is burnt."""
    parts: dict[str, Any] = {
        name: _Dying(getattr(store, name), fuse)
        for name in ("tokens", "runs", "ledger", "columns", "retention", "inspection")
    }
    return replace(store, **parts)
