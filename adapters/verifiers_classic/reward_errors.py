"""Errors of reward functions, which verifiers 0.3 itself turns into the reward 0."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["reveal", "revealed"]

_raised: ContextVar[list[str] | None] = ContextVar("raised", default=None)


def reveal(rubric: Any) -> None:
    """Let the reward functions of a rubric, and of those within it, report what they raise."""
    for part in getattr(rubric, "rubrics", ()):
        reveal(part)
    rubric.funcs[:] = [_reporting(function) for function in rubric.funcs]


@contextmanager
def revealed() -> Iterator[list[str]]:
    """What reward functions raise within, as texts."""
    raised: list[str] = []
    token = _raised.set(raised)
    try:
        yield raised
    finally:
        _raised.reset(token)


def _reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def reporting(*arguments: Any, **named: Any) -> float:
        try:
            value = function(*arguments, **named)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            raised = _raised.get()
            if raised is not None:
                name = getattr(function, "__name__", repr(function))
                raised.append(f"reward function {name} raised {error!r}")
            raise

    return reporting
