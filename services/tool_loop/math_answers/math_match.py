"""Whether two answers are the same number or expression: math-verify in a child process."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed

from services.chassis.log import get_logger

__all__ = ["MathMatch"]

_log = get_logger()
_COMMAND = (sys.executable, "-m", "services.tool_loop.math_answers.math_worker")
_ATTEMPTS = 2
_START_SECONDS = 60.0
_MAX_LINE = 16 << 20


class MathMatch:
    """One comparison at a time. A child that takes too long is killed and started anew."""

    def __init__(self, timeout: float, command: Sequence[str] = _COMMAND) -> None:
        """A comparison takes at most `timeout` seconds; `command` starts the child."""
        self._timeout = timeout
        self._command = command
        self._turn = asyncio.Lock()
        self._child: Process | None = None

    async def check(self) -> None:
        """Start the child and compare something.

        Raises:
            EnvironmentFailed: it cannot be started.
        """
        async with self._turn:
            with suppress(TimeoutError):
                await self._asked(["1/2"], "$0.5$", _START_SECONDS)
                return
        raise self._failed("it gave no answer")

    async def is_right(self, expected: Sequence[str], answer: str) -> bool:
        """Whether `answer` equals one of `expected`; False too if that takes too long to find out.

        Raises:
            EnvironmentFailed: an expected answer cannot be parsed, or the child cannot be started.
        """
        async with self._turn:
            try:
                found = await self._asked(expected, answer, self._timeout)
            except TimeoutError:
                _log.warning("answer not compared in time", seconds=self._timeout)
                return False
        if "error" in found:
            raise EnvironmentFailed(
                f"the expected answer {found['error']}: correct the task, or use another reward "
                'than "math"'
            )
        return bool(found["right"])

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _asked(
        self, expected: Sequence[str], answer: str, timeout: float
    ) -> dict[str, object]:
        line = json.dumps({"expected": list(expected), "answer": answer}).encode() + b"\n"
        for _ in range(_ATTEMPTS):
            child = await self._started()
            try:
                async with asyncio.timeout(timeout):
                    reply = await _exchanged(child, line)
            except BaseException:  # the reply may still come: it must not answer another question
                await self.close()
                raise
            if reply:
                found: dict[str, object] = json.loads(reply)
                return found
            await self.close()  # it died, such as by its limit of memory
        raise self._failed("it ended")

    async def _started(self) -> Process:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_MAX_LINE
            )
            hello = b'{"expected": ["1"], "answer": "1"}\n'
            async with asyncio.timeout(_START_SECONDS):
                await _exchanged(self._child, hello)  # its imports take seconds
        return self._child

    def _failed(self, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"the process that compares answers ({' '.join(self._command)}): {why}; is "
            "math-verify installed (extra tool-loop)?",
            tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
        )


async def _exchanged(child: Process, line: bytes) -> bytes:
    """The reply to a line; empty: the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        await child.stdin.drain()
        return await child.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return b""
