"""A supervised SGLang server, and its state from one start to its failure.

The process has a group, a port and an environment of its own, and its output goes to our log.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import re
import signal
import socket
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rollout.server.engines.engine import EngineFailed, PauseMode
from rollout.server.engines.sglang import process_guard
from rollout.server.engines.sglang.http_client import Connection, ConnectionLost, Refused
from rollout.server.engines.sglang.sglang_turn import Weights
from services.chassis.log import get_logger

_GUARD = Path(process_guard.__file__)
_KEPT_LINES = 1000
_LINE_BYTES = 1 << 20
_STOP_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.2
_ARGPARSE_ERROR = 2
# Without a worker SGLang has failed, but runs for another minute to collect diagnostics.
_WORKER_LOST = "SIGQUIT received"


class SGLangProcess:
    """One SGLang server process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, label: str) -> None:
        """Use `start`."""
        self.url = url
        self.label = label
        self._process = process
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log = get_logger()
        self._ended = asyncio.create_task(self._follow(), name="sglang-process")

    @classmethod
    async def start(cls, command: Sequence[str]) -> SGLangProcess:
        """Start `command` at a free port of loopback; it answers some ten seconds later."""
        port = str(_free_port())
        # This start's alone, so that a server that took the port before ours is not taken for it.
        label = f"0-{uuid.uuid4().hex[:8]}"
        # The pipe to the guard's standard input is what dies with us. Isolated (-I), because the
        # guard needs nothing of our environment; its child gets all of it.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(_GUARD)),
            *(*command, "--weight-version", label, "--host", "127.0.0.1", "--port", port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        return cls(process, f"http://127.0.0.1:{port}", label)

    async def until_ready(self, connection: Connection) -> None:
        """Wait until it serves weights named `label`. Raises `ValueError` if it ends before."""
        while not self.ended:
            with contextlib.suppress(ConnectionLost, Refused, TimeoutError):
                ours = (await connection.model_info())["weight_version"] == self.label
                if ours and await connection.is_ready():
                    return
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        raise ValueError(await self._why_it_did_not_start())

    async def _follow(self) -> int:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than _LINE_BYTES; what was too much has been dropped
                continue
            if not line:
                break
            self.lines.append(line.decode(errors="replace").rstrip())
            self._log.info("sglang", line=self.lines[-1])
            if _WORKER_LOST in self.lines[-1]:
                self._kill()
        code = await self._process.wait()
        self._kill()
        return code

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> str:
        """Wait for its exit; returns a description of it."""
        code = await asyncio.shield(self._ended)
        number = -code if code < 0 else code - process_guard.BY_SIGNAL
        how = f"by signal {number}" if 0 < number < signal.NSIG else f"with exit code {code}"
        last = next((line for line in reversed(self.lines) if line.strip()), "no output")
        return f"SGLang ended {how}: {last[:500]}"

    async def _why_it_did_not_start(self) -> str:
        """Return the cure that its output suggests."""
        ended = await self.wait()
        code = self._ended.result()
        if code == process_guard.NOT_FOUND:
            return f"sglang_command: {self.lines[-1]}"
        refused = re.search(r"error: unrecognized arguments: (--\S+)", ended)
        if code != _ARGPARSE_ERROR or refused is None:
            return ended
        known = sorted(set(re.findall(r"--[a-z0-9-]+", "\n".join(self.lines))) - {refused[1]})
        near = difflib.get_close_matches(refused[1], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"sglang_flags: SGLang knows no {refused[1]}{hint}"

    async def stop(self) -> None:
        """Terminate it, and kill its process group if it does not exit."""
        if self._process.returncode is None:
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self._ended)
        self.kill()
        await self._ended

    def kill(self) -> None:
        if not self.ended:
            self._kill()

    def _kill(self) -> None:
        # The group outlives its leader as long as any worker of SGLang does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


T = TypeVar("T")

_ABORT_AGAIN_SECONDS = 0.05  # a request on its way to the scheduler outlives an abort


class ServerLifetime:
    """State that a restart resets. Needs a running event loop."""

    def __init__(
        self, connection: Connection, weights: Weights, process: SGLangProcess | None = None
    ) -> None:
        """`weights` are its initial ones; `process` is None for a server that we did not start."""
        self.connection = connection
        self.weights = weights
        self.process = process
        self.failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        """Set to the cause once the server has failed."""
        self.paused: PauseMode | None = None
        self.released = False
        self.running = 0
        """Requests without a final answer."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.open = asyncio.Event()
        """Set while new requests may be sent."""

    async def call(self, call: Awaitable[T]) -> T:
        """Await a control call; a server that does not answer has failed."""
        try:
            return await call
        except TimeoutError as error:
            cure = "raise sglang_control_seconds if it compiles kernels for that long"
            raise self.fail(f"SGLang does not answer in time: {cure}") from error
        except ConnectionLost as error:
            raise self.fail(f"SGLang does not answer: {error or type(error).__name__}") from error

    async def drain(self, seconds: float) -> None:
        """End all requests; a server that has not ended them after `seconds` has failed."""
        try:
            async with asyncio.timeout(seconds):
                while self.running:
                    await self.call(self.connection.abort_all())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.idle.wait(), _ABORT_AGAIN_SECONDS)
        except TimeoutError:
            raise self.fail(
                f"SGLang did not end its requests in {seconds:g} s: raise sglang_drain_seconds if "
                "a step of it takes that long"
            ) from None
        if self.failed.done():
            raise self.failed.result()

    def fail(self, why: str) -> EngineFailed:
        """Mark the server failed and kill its process; returns the first cause."""
        if not self.failed.done():
            self.failed.set_result(EngineFailed(why))
            if self.process is not None:
                self.process.kill()
        return self.failed.result()

    async def end(self) -> None:
        """Disconnect, and stop the process if we started it."""
        await self.connection.close()
        if self.process is not None:
            await self.process.stop()
        self.fail("SGLang is stopped")
