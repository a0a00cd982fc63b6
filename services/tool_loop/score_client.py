"""Asks the process that computes rewards; kills a score at its limit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed

from services.chassis.log import get_logger
from services.tool_loop.config import BUILT_IN, REGEX
from services.tool_loop.score_process import READY, Transcript

_log = get_logger()
_COMMAND = (sys.executable, "-m", "services.tool_loop.score_process")
_MAX_LINE = 64 << 20
_CORES = os.cpu_count() or 1
LEVELS = ((0.05, 2 * _CORES), (0.2, _CORES), (5.0, max(1, _CORES // 2)))
"""Seconds of CPU that comparisons get, and how many run side by side. One that needs more begins
again a level deeper, so that it takes no place from shorter ones; most take a tenth of the first.
Five seconds are also math-verify's own limit."""


class ScoreClient:
    """Scores side by side, each in a process of its own."""

    def __init__(
        self,
        rewards: Mapping[str, str],
        answer_field: str,
        answer_pattern: str,
        timeout: float,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """Of these rewards by name; a score takes at most `timeout` seconds."""
        self._rewards = rewards
        self._given = {
            "rewards": dict(rewards),
            "answer_field": answer_field,
            "answer_pattern": answer_pattern,
        }
        self._timeout = timeout
        self._command = command
        self._starting = asyncio.Lock()
        self._levels = [(seconds, asyncio.Semaphore(places)) for seconds, places in LEVELS]
        self._process: Process | None = None
        self._control: socket.socket | None = None

    async def start(self) -> None:
        """Start the process; it has loaded all that it needs afterwards.

        Raises:
            EnvironmentFailed: it cannot be started.
        """
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await self.close()
            self._control, theirs = socket.socketpair()
            given = {**self._given, "path": sys.path}
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    json.dumps(given),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            said = await asyncio.to_thread(self._control.recv, 1 << 16)
        if said != READY:
            why = said.decode(errors="replace").strip() or "it ended"
            raise EnvironmentFailed(
                f"the process that computes rewards ({' '.join(self._command)}): {why}; is the "
                "extra tool-loop installed?",
                tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
            )

    async def score(self, name: str, task: Task, transcript: Transcript) -> dict[str, float]:
        """The reward `name`, and others that its function returns.

        Raises:
            EnvironmentFailed: the function raised or took too long, or there is no process.
        """
        how = self._rewards[name]
        is_comparison = how in BUILT_IN or how.startswith(REGEX)
        given = {"task_id": task.task_id, "payload": dict(task.payload), "train": task.train}
        request = {"name": name, "task": given, "transcript": list(transcript)}
        await self.start()
        reply = await (self._compared if is_comparison else self._called)(request)
        if "error" in reply:
            failure_class = reply.get("failure_class", tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
            raise EnvironmentFailed(reply["error"], failure_class)
        return dict(reply["rewards"])

    async def close(self) -> None:
        """End the process, and with it the scores that it computes."""
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()  # it ends then
        if process is not None:
            await process.wait()

    async def _compared(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What it says; 0 if it needs more than all levels give, or ends in the last."""
        reply, level = None, 0
        try:
            async with asyncio.timeout(self._timeout):
                for level, (seconds, places) in enumerate(self._levels):  # noqa: B007
                    async with places:
                        reply = await self._exchanged({**request, "cpu_seconds": seconds})
                    if reply is not None:
                        return reply
        except TimeoutError as error:
            if level < len(self._levels) - 1:
                raise self.too_slow(request["name"], "the machine is too busy, or") from error
        _log.warning("comparison without an end", reward=request["name"], seconds=self._timeout)
        return {"rewards": {request["name"]: 0.0}}

    async def _called(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a function returned."""
        name = request["name"]
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._exchanged({**request, "cpu_seconds": 0.0})
        except TimeoutError as error:
            raise self.too_slow(name, "make it faster, or") from error
        return reply or {"error": f"[tool_loop.rewards] {name}: its process ended"}

    def too_slow(self, name: str, cure: str) -> EnvironmentFailed:
        """What a reward raises that takes longer than its limit."""
        return EnvironmentFailed(
            f"[tool_loop.rewards] {name} took over {self._timeout:g} s: {cure} raise "
            "reward_timeout_seconds",
            tokens_pb2.FAILURE_CLASS_TIMEOUT,
        )

    async def _exchanged(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The reply of a forked process; None: it died. One that nobody waits for is killed."""
        reader, writer = await self._forked()
        pid = 0
        try:
            pid = int(await reader.readline() or 0)
            writer.write(json.dumps(request).encode() + b"\n")
            line = await reader.readline()
            pid = 0
            return dict(json.loads(line)) if line else None
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            if pid:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            writer.close()

    async def _forked(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            await self.start()
            try:
                self._send(theirs)
            except BrokenPipeError:  # the process has just been killed
                assert self._process is not None
                await self._process.wait()
                await self.start()
                self._send(theirs)
        return await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE)

    def _send(self, connection: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"x"], [connection.fileno()])
