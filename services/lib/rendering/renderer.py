"""Renders chat templates within limits of time and memory, in processes that are killed at them.

A thread can be neither ended nor bounded in memory, and a chat template, which comes with a model,
is a program. Processes are started when they are needed and kept; they know nothing of a model.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from typing import Any

from services.lib.rendering import render_process
from services.lib.rendering.render_process import REFUSED, TEXT, TEXT_SHARE, TOO_LARGE

__all__ = [
    "RenderError",
    "RenderLimitError",
    "RenderLimits",
    "Renderer",
    "reserved_names",
    "shared_renderer",
]

_START_SECONDS = 120.0
_FROZEN_SECONDS = 60.0
"""A process that does not answer for this long beyond its time is not on a processor: frozen."""
_END_SECONDS = 2.0
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

    def warm(self) -> None:
        """Start a process, which gets ready meanwhile, if there is none."""
        if not self._idle:
            self._idle.append(_Process(self._limits))

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
            return self._text(json.dumps(request).encode())
        except RecursionError as error:
            raise RenderError("they are nested too deeply") from error

    def close(self) -> None:
        """End the processes that are idle."""
        while self._idle:
            self._idle.pop().kill()

    def _text(self, request: bytes) -> str:
        for _ in range(_TRIES):
            process = self._taken()
            answer = process.answer(request)
            if answer is not None and answer != TOO_LARGE:
                self._idle.append(process)
                if answer.startswith(REFUSED):
                    kind, _, text = answer[1:].decode().partition(":")
                    raise RenderError(text, kind)
                return answer.removeprefix(TEXT).decode(errors="surrogatepass")
            code = process.ended()
            self._idle.appendleft(_Process(self._limits))  # ready when it is needed
            if answer == TOO_LARGE:
                raise RenderLimitError(self._too_large())
            if code == -signal.SIGPROF:
                raise RenderLimitError(self._too_long())
        raise RuntimeError(f"processes that render end with code {code}: see the log")

    def _taken(self) -> _Process:
        try:
            return self._idle.pop()
        except IndexError:
            return _Process(self._limits)

    def _too_long(self) -> str:
        return f"took {self._limits.seconds:g} s of a processor, all it may (max_render_seconds)"

    def _too_large(self) -> str:
        most = self._limits.num_bytes
        return (
            f"needs more than {most} bytes of memory, or writes a text of more than "
            f"{most // TEXT_SHARE} (max_render_bytes, and a sixteenth of it)"
        )


class _Process:
    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._connection, theirs = Pipe()
        figures = (str(theirs.fileno()), str(limits.seconds), str(limits.num_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-P", render_process.__file__, *figures],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        theirs.close()
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

    def ended(self) -> int:
        """Its exit code, or minus the signal that ended it; killed if it has not ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self.kill()

    def kill(self) -> int:
        """Kill it, unless it has ended; its exit code, or minus the signal that ended it."""
        self._connection.close()
        self._process.kill()
        return self._process.wait()

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
