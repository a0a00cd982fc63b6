"""Renders chat templates within limits of time and memory, in processes that are killed at them.

A thread can be neither ended nor bounded in memory, and a chat template, which comes with a model,
is a program. Processes are forked when they are needed and kept; they know nothing of a model.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from services.lib.rendering import render_process
from services.lib.rendering.render_process import (
    REFUSED,
    TEXT,
    TEXT_SHARE,
    TOO_LARGE,
    TOO_LONG,
)

_START_SECONDS = 120.0
_FROZEN_SECONDS = 60.0
"""A process that does not answer for this long beyond its time is not on a processor: frozen."""
_TRIES = 2


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What rendering once may take."""

    seconds: float = 5.0
    """Time on a processor."""
    num_bytes: int = 512 << 20
    """Memory."""


class RenderError(ValueError):
    """The template cannot render what it was given."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        """Name of the exception that it raised."""


class RenderLimitError(RenderError):
    """The template takes too long or too much memory."""


class Renderer:
    """Any number of threads may use it; each that renders has a process."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._idle: deque[_Process] = deque()
        self._forks: _Forks | None = None
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start a process, which gets ready meanwhile, if there is none."""
        if not self._idle:
            self._idle.append(self._started())

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; all is plain JSON.

        `variables` are further variables of the template, none of them in `reserved_names`.

        Raises:
            RenderError: the template cannot render it.
            RenderLimitError: it takes too long or too much memory.
            RuntimeError: the process ended twice, killed by others.
        """
        request: dict[str, Any] = {
            "template": template,
            "messages": messages,
            "tools": tools or None,
        }
        request |= {"add_prompt": add_prompt, "variables": variables or {}}
        try:
            return self._text(self._answer(json.dumps(request).encode()))
        except RecursionError as error:
            raise RenderError("they are nested too deeply") from error

    def close(self) -> None:
        """End the processes that are idle; those that render end with their answer."""
        while self._idle:
            self._idle.pop().close()
        if self._forks is not None:
            self._forks.close()

    def _answer(self, request: bytes) -> bytes:
        for _ in range(_TRIES):
            process = self._taken()
            answer = process.answer(request)
            if answer is not None:
                self._idle.append(process)
                return answer
            process.close()
        raise RuntimeError("processes that render chat templates are killed: see the log")

    def _taken(self) -> _Process:
        try:
            return self._idle.pop()
        except IndexError:
            return self._started()

    def _started(self) -> _Process:
        with self._lock:
            if self._forks is not None and not self._forks.is_running():
                self._forks.close()
                self._forks = None
            if self._forks is None:
                self._forks = _Forks(self._limits)
            return _Process(self._forks.connect(), self._limits)

    def _text(self, answer: bytes) -> str:
        if answer == TOO_LARGE:
            raise RenderLimitError(self._too_large())
        if answer == TOO_LONG:
            raise RenderLimitError(self._too_long())
        if answer.startswith(REFUSED):
            kind, _, text = answer[1:].decode().partition(":")
            raise RenderError(text, kind)
        return answer.removeprefix(TEXT).decode(errors="surrogatepass")

    def _too_long(self) -> str:
        return f"took {self._limits.seconds:g} s of a processor, all it may (max_render_seconds)"

    def _too_large(self) -> str:
        most = self._limits.num_bytes
        return (
            f"needs more than {most} bytes of memory, or writes a text of more than "
            f"{most // TEXT_SHARE} (max_render_bytes, and a sixteenth of it)"
        )


class _Forks:
    """The process that forks those that render, so that each starts at once."""

    def __init__(self, limits: RenderLimits) -> None:
        self._connections, theirs = socket.socketpair()
        figures = (str(theirs.fileno()), str(limits.seconds), str(limits.num_bytes))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", render_process.__file__, *figures],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> Connection:
        """A connection to a process of its own; closed at once where this one has just ended."""
        ours, theirs = Pipe()
        with theirs, suppress(OSError):
            socket.send_fds(self._connections, [b"."], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self._connections.close()
        self._process.kill()
        self._process.wait()


class _Process:
    """One that renders, at the other end of a connection, and ends when that is closed."""

    def __init__(self, connection: Connection, limits: RenderLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._is_ready = False

    def answer(self, request: bytes) -> bytes | None:
        """None: it has ended, or does not answer."""
        try:
            if not self._is_ready:
                self._received(_START_SECONDS)
                self._is_ready = True
            self._connection.send_bytes(request)
            return self._received(self._limits.seconds + _FROZEN_SECONDS)
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self._connection.close()

    def _received(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise EOFError
        return self._connection.recv_bytes()


def _environment() -> dict[str, str]:
    """This process's own, without what a template must not know."""
    secret = ("SEAMFLOW_", "REDIS_URL")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(secret)}
    return {**ours, "OMP_NUM_THREADS": "1"}


@cache
def shared_renderer(limits: RenderLimits) -> Renderer:
    """The renderer of this process with these limits, closed at exit."""
    renderer = Renderer(limits)
    atexit.register(renderer.close)
    return renderer


@cache
def reserved_names() -> frozenset[str]:
    """Names that no variable of an agent may have.

    They are parameters of the functions that render and encode, which must not be chosen from
    outside, and what the tokenizer or the template's environment defines.
    """
    from inspect import signature

    from jinja2.defaults import DEFAULT_NAMESPACE
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    functions: tuple[Any, ...] = (
        PreTrainedTokenizerBase.apply_chat_template,
        PreTrainedTokenizerBase.__call__,
        render_jinja_template,
    )
    parameters = (name for function in functions for name in signature(function).parameters)
    special = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    others = ("messages", "raise_exception", "strftime_now", "loop", "caller", "varargs")
    return frozenset((*parameters, *DEFAULT_NAMESPACE, *special, *others))
