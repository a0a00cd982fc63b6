"""Functions of the user: loaded by name, called without holding the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from seamflow.environment.environment_class import load_object
from seamflow.environment.episode_thread import EpisodeThread
from seamflow.user_code.user_calls import awaited


def load_function(name: str, field: str) -> Any:
    """What "package.module:function" names; `field` is the setting that names it.

    Raises:
        ValueError: names field, value and what is wrong, such as what importing it raised.
    """
    try:
        return load_object(name, field)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{field} is {name!r}: importing it raised {error!r}") from error


async def call_function(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """The result of a function, sync or async; `Exited` where it would end the process."""
    if inspect.iscoroutinefunction(function):
        return await awaited(function(*arguments, **named))
    # A thread for each call: one that never returns holds nobody else.
    thread = EpisodeThread(f"call of {getattr(function, '__name__', 'a function')}")
    try:
        result = await thread.run(lambda: function(*arguments, **named))
    finally:
        thread.end()
    return await awaited(result) if inspect.isawaitable(result) else result
