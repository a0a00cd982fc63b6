"""Calls of the user's code: what would end the process there is an error of the call."""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from seamflow.processes.left_processes import exit_if_forked

T = TypeVar("T")

_LIBRARIES = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)


_of_user: ContextVar[bool] = ContextVar("of the user's code", default=False)


class Exited(Exception):  # noqa: N818 -- names the event
    """The user's code raised what no `except Exception` catches, such as `exit()` does."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(raised)
        self.__cause__ = raised
        self.__traceback__ = raised.__traceback__

    def __repr__(self) -> str:
        return repr(self.args[0])

    __str__ = __repr__


def ordinary(raised: BaseException) -> Exception:
    """What the user's code raised, as an exception of its call alone."""
    return raised if isinstance(raised, Exception) else Exited(raised)


async def awaited(answer: Awaitable[T]) -> T:
    """The result of the user's coroutine, which runs in this very task.

    Raises:
        Exited: it, or a task that it made, raised SystemExit, KeyboardInterrupt or the like, which
            would end the loop and with it everybody's calls.
        asyncio.CancelledError: this task was cancelled; one that the user's code raises by itself
            is `Exited`.
    """
    _guard_tasks(asyncio.get_running_loop())
    token, pid = _of_user.set(True), os.getpid()
    try:
        return await answer
    except (Exception, GeneratorExit):
        raise
    except asyncio.CancelledError as raised:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Exited(raised) from raised
    except BaseException as raised:
        raise Exited(raised) from raised
    finally:
        exit_if_forked(pid)
        _of_user.reset(token)


def _guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks of the user's code, such as those of `asyncio.gather`, end with errors alone."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_made)


def _made(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task[Any]:
    guarded = _Guarded(coroutine) if _of_user.get() else coroutine
    return asyncio.Task(guarded, loop=loop, **settings)


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine of which a task never gets SystemExit or the like, which end the loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._resumed(self._coroutine.send, value)

    def throw(self, *raised: Any) -> Any:
        return self._resumed(self._coroutine.throw, *raised)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _resumed(self, resume: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return resume(*arguments)
        except (Exception, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as raised:
            raise Exited(raised) from raised


def user_place(error: BaseException) -> str:
    """ " at file:line" of the innermost call that is the user's own; "" if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return ""
    path, line = Path(own[-1].filename), own[-1].lineno
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" at {shown}:{line}"


def _is_library(file: str) -> bool:
    """Whether a file is of seamflow, of Python, or installed."""
    path = Path(file)
    return any(path.is_relative_to(folder) for folder in _LIBRARIES) or file.startswith("<")
