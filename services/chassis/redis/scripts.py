"""Lua scripts as atomic steps, on one server or on all servers of a cluster.

The write path of a service: `Scripts.call_each` groups calls by cluster slot, `ScriptBatcher`
(group commit) sends what all callers wait for as one batch, `Pipeline` writes it to the socket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis import exceptions

from services.chassis.errors import Reason, ServiceError, unavailable
from services.chassis.redis.connect import store_errors
from services.chassis.redis.pipeline import Command, Pipeline, Pipelines, slot_of

_MAX_COMMANDS = 1024

__all__ = ["RUN_ID", "Call", "Scripts"]

_MAX_REDIRECTS = 5
_REQUIRES = "-- requires:"


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


class Scripts:
    """The Lua scripts of a folder by name: `await scripts.call("append", keys=[...], args=[...])`.

    A script may start with a line "-- requires: _a _b": the libraries _a.lua and _b.lua are
    prepended. Libraries are the files that begin with "_". All keys of a call share a cluster slot.
    """

    def __init__(self, pipelines: Pipelines, folder: Path) -> None:
        """Read every script in `folder`.

        Raises:
            ValueError: the folder holds none.
            FileNotFoundError: a required library does not exist.
        """
        self._sources = {path.stem: _source(path) for path in sorted(folder.glob("[!_]*.lua"))}
        if not self._sources:
            raise ValueError(f"folder {folder} holds no *.lua file")
        self.refusal = ""
        """Why all calls are refused now; empty: they are not."""
        self._pipelines = pipelines
        self._batchers: dict[Pipeline, ScriptBatcher] = {}

    async def call(
        self, name: str, *, keys: Sequence[str | bytes], args: Sequence[Any] = ()
    ) -> Any:
        """Run the script `name` atomically and return its raw reply.

        Raises:
            ServiceError: the store is unavailable or full.
            redis.exceptions.ResponseError: the script itself failed.
        """
        (reply,) = await self.call_many(name, [(keys, args)])
        if isinstance(reply, ServiceError):
            raise reply
        return reply

    async def call_many(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Run `name` for each of `calls`; a reply may be a ServiceError: the store is unavailable.

        Calls are independent of each other: one may fail and the next be executed.

        Raises:
            redis.exceptions.ResponseError: the script itself failed.
        """
        if not calls:
            return []
        replies: list[Any] = [None] * len(calls)
        missing: Sequence[int] = range(len(calls))
        for _ in range(_MAX_REDIRECTS):
            await self._send(name, calls, missing, replies)
            missing = [i for i in missing if isinstance(replies[i], exceptions.MovedError)]
            if not missing:
                break
            for index in missing:
                await self._pipelines.moved(replies[index])
        return [_translated(name, reply) for reply in replies]

    async def call_each(
        self, name: str, parts: Sequence[Call], common: Sequence[Any] = ()
    ) -> list[Any]:
        """Run `name` once for all `parts` that share a server, or in a cluster a slot.

        The script finds the KEYS of its parts one after the other, and their ARGV after `common`.
        It returns a list with a reply for each; a reply is a ServiceError where the store was
        unavailable or full.

        Raises:
            redis.exceptions.ResponseError: the script itself failed.
        """
        groups = self._by_slot(parts)
        calls = [_joined([parts[index] for index in group], common) for group in groups]
        replies: list[Any] = [None] * len(parts)
        for group, answer in zip(groups, await self.call_many(name, calls), strict=True):
            each = [answer] * len(group) if isinstance(answer, ServiceError) else answer
            for index, reply in zip(group, each, strict=True):
                replies[index] = reply
        return replies

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """The reply to each plain command, whose second word is its key.

        Example: await scripts.read([("HGETALL", "a"), ("LRANGE", "b", 0, -1)])

        Raises:
            ServiceError: the store is unavailable.
        """
        replies = await self.call_many(PLAIN, [((words[1],), words) for words in commands])
        for reply in replies:
            if isinstance(reply, ServiceError):
                raise reply
        return replies

    def _by_slot(self, parts: Sequence[Call]) -> Sequence[Sequence[int]]:
        """Indexes of the parts that may be in one call."""
        if not self._pipelines.are_many:
            return [range(len(parts))] if parts else []
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index, (part_keys, _) in enumerate(parts):
            groups[slot_of(part_keys[0])].append(index)
        return list(groups.values())

    async def _send(
        self, name: str, calls: Sequence[Call], indexes: Iterable[int], replies: list[Any]
    ) -> None:
        if self.refusal:
            refused = unavailable(Reason.STORE_UNAVAILABLE, self.refusal)
            replies[:] = [refused if reply is None else reply for reply in replies]
            return
        by_server: defaultdict[ScriptBatcher, list[int]] = defaultdict(list)
        try:
            if not self._pipelines.are_many:
                by_server[await self._batcher(calls[0][0][0])].extend(indexes)
            else:
                for index in indexes:
                    by_server[await self._batcher(calls[index][0][0])].append(index)
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            replies[:] = [error if reply is None else reply for reply in replies]
            return
        sent = [
            (own, batcher.send(name, [calls[i] for i in own])) for batcher, own in by_server.items()
        ]
        for own, replied in sent:
            for index, reply in zip(own, await replied, strict=True):
                replies[index] = reply

    async def _batcher(self, key: str | bytes) -> ScriptBatcher:
        pipeline = await self._pipelines.of(key)
        if pipeline not in self._batchers:
            self._batchers[pipeline] = ScriptBatcher(pipeline, self._sources)
        return self._batchers[pipeline]


def _source(script: Path) -> str:
    """The text of `script` after that of the libraries it requires."""
    text = script.read_text()
    first, _, _ = text.partition("\n")
    names = first.removeprefix(_REQUIRES).split() if first.startswith(_REQUIRES) else []
    return "".join([(script.parent / f"{name}.lua").read_text() for name in names]) + text


def _joined(parts: Sequence[Call], common: Sequence[Any]) -> Call:
    keys: list[str | bytes] = []
    args = [*common]
    for part_keys, part_args in parts:
        keys += part_keys
        args += part_args
    return keys, args


def _translated(name: str, reply: Any) -> Any:
    """The reply; an exception as a ServiceError."""
    if not isinstance(reply, Exception):
        return reply
    try:
        with store_errors(name):
            # The same exception may be the reply to many commands: each gets its own traceback.
            raise reply.with_traceback(None)
    except ServiceError as error:
        return error
