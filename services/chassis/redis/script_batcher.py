"""Group commit: the calls of all callers to one server, sent as one batch at a time.

A caller awaits its own replies. While a batch is in flight the next one gathers, so that the cost
of a round trip (and under `appendfsync always` of an fsync) is shared by all waiting callers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis import exceptions

from services.chassis.redis.pipeline import Command, Pipeline

_MAX_COMMANDS = 1024


class _RunId:
    """Placeholder in arguments for the run_id of the server that the command is sent to."""


RUN_ID: Final = _RunId()

Call = tuple[Sequence[str | bytes], Sequence[Any]]
"""KEYS and ARGV of one call."""

PLAIN: Final = ""
"""Script name of a call whose ARGV is a plain command."""

_Step = tuple[str, Sequence[str | bytes], Sequence[Any]]


@dataclass(slots=True)
class _Pending:
    """Calls of one caller, and the future of their replies."""

    name: str
    calls: Sequence[Call]
    replies: asyncio.Future[list[Any]]


class ScriptBatcher:
    """Batches the script calls of all callers to one server."""

    def __init__(self, pipeline: Pipeline, sources: Mapping[str, str]) -> None:
        """`sources` are the scripts by name."""
        self._pipeline = pipeline
        self._sources = sources
        self._digests = {
            name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for name, source in sources.items()
        }
        self._pending: deque[_Pending] = deque()
        self._loaded: set[str] = set()
        self._loaded_on = ""
        self._task: asyncio.Task[None] | None = None

    def send(self, name: str, calls: Sequence[Call]) -> asyncio.Future[list[Any]]:
        """The reply to each of `calls`, exceptions among them; sent in the order of the calls."""
        pending = _Pending(name, calls, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if self._task is None:
            self._task = asyncio.create_task(self._flush())
        return pending.replies

    async def _flush(self) -> None:
        try:
            while self._pending:
                batch = self._next_batch()
                replies = iter(await self._execute(batch))
                for pending in batch:
                    own = [next(replies) for _ in pending.calls]
                    if not pending.replies.done():
                        pending.replies.set_result(own)
        finally:
            self._task = None

    def _next_batch(self) -> list[_Pending]:
        batch = [self._pending.popleft()]
        size = len(batch[0].calls)
        while self._pending and size + len(self._pending[0].calls) <= _MAX_COMMANDS:
            batch.append(self._pending.popleft())
            size += len(batch[-1].calls)
        return batch

    async def _execute(self, batch: Sequence[_Pending]) -> list[Any]:
        steps = [(pending.name, *call) for pending in batch for call in pending.calls]
        try:
            replies = await self._send_steps(steps)
            missing = [
                index
                for index, reply in enumerate(replies)
                if isinstance(reply, exceptions.NoScriptError)
            ]
            if missing:
                # The script cache was flushed. These calls were not executed.
                self._loaded.clear()
                again = await self._send_steps([steps[index] for index in missing])
                for index, reply in zip(missing, again, strict=True):
                    replies[index] = reply
        except Exception as error:  # every caller gets it, whatever it is
            return [error] * len(steps)
        return replies

    async def _send_steps(self, steps: Sequence[_Step]) -> list[Any]:
        run_id = await self._pipeline.run_id()
        if run_id != self._loaded_on:
            # A restarted server has an empty script cache.
            self._loaded_on = run_id
            self._loaded.clear()
        commands = [self._command(*step, run_id) for step in steps]
        replies = await self._pipeline.execute(commands, run_id)
        for name in {step[0] for step in steps} - self._loaded:
            of_script = (
                reply for step, reply in zip(steps, replies, strict=True) if step[0] == name
            )
            if not all(isinstance(reply, Exception) for reply in of_script):
                self._loaded.add(name)
        return replies

    def _command(
        self, name: str, keys: Sequence[str | bytes], args: Sequence[Any], run_id: str
    ) -> Command:
        if name == PLAIN:
            return tuple(args)
        given = [run_id if arg is RUN_ID else arg for arg in args]
        if name in self._loaded:
            return ("EVALSHA", self._digests[name], len(keys), *keys, *given)
        return ("EVAL", self._sources[name], len(keys), *keys, *given)
