"""Lua scripts as atomic steps, from all callers together: what waits goes out as one batch.

A caller awaits its own reply. While a batch is under way the next one gathers, so that the cost of
a round trip (and under `appendfsync always` of an fsync: group commit) is shared by all who wait.
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

from services.chassis.errors import ServiceError
from services.chassis.redis.connect import store_errors
from services.chassis.redis.pipeline import Command, Pipeline, Pipelines, slot_of

__all__ = ["RUN_ID", "Call", "Scripts"]

_MAX_COMMANDS = 1024
_MAX_REDIRECTS = 5
_REQUIRES = "-- requires:"


class _RunId:
    """Stands in arguments for the run_id of the server that the command is sent to."""


RUN_ID: Final = _RunId()

Call = tuple[Sequence[str | bytes], Sequence[Any]]
"""KEYS and ARGV of one call."""

_PLAIN = ""
"""Stands for the script of a call whose ARGV is a command."""

_Step = tuple[str, Sequence[str | bytes], Sequence[Any]]


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
        self._pipelines = pipelines
        self._batches: dict[Pipeline, _Batches] = {}

    async def call(
        self, name: str, *, keys: Sequence[str | bytes], args: Sequence[Any] = ()
    ) -> Any:
        """Run the script `name` atomically and return its raw reply.

        Raises:
            ServiceError: the store is away or full.
            redis.exceptions.ResponseError: the script itself failed.
        """
        (reply,) = await self.call_many(name, [(keys, args)])
        if isinstance(reply, ServiceError):
            raise reply
        return reply

    async def call_many(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Run `name` for each of `calls`; a ServiceError stands where the store was away or full.

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
        """Run `name` once for all `parts` that share a server, or a slot of a cluster.

        The script finds the KEYS of its parts one after the other, and their ARGV after `common`.
        It answers a list with a reply for each; a ServiceError stands where the store was away or
        full.

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
        """The reply to each command, whose second word is its key: a plain read costs Redis least.

        Example: await scripts.read([("HGETALL", "a"), ("LRANGE", "b", 0, -1)])

        Raises:
            ServiceError: the store is away.
        """
        replies = await self.call_many(_PLAIN, [((words[1],), words) for words in commands])
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
        by_server: defaultdict[_Batches, list[int]] = defaultdict(list)
        try:
            if not self._pipelines.are_many:
                by_server[await self._of(calls[0][0][0])].extend(indexes)
            else:
                for index in indexes:
                    by_server[await self._of(calls[index][0][0])].append(index)
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            replies[:] = [error if reply is None else reply for reply in replies]
            return
        sent = [
            (mine, batches.send(name, [calls[i] for i in mine]))
            for batches, mine in by_server.items()
        ]
        for mine, replied in sent:
            for index, reply in zip(mine, await replied, strict=True):
                replies[index] = reply

    async def _of(self, key: str | bytes) -> _Batches:
        pipeline = await self._pipelines.of(key)
        if pipeline not in self._batches:
            self._batches[pipeline] = _Batches(pipeline, self._sources)
        return self._batches[pipeline]


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
    """The reply, or the ServiceError that says why there is none."""
    if not isinstance(reply, Exception):
        return reply
    try:
        with store_errors(name):
            # The same exception may stand for many replies: each tells its own story.
            raise reply.with_traceback(None)
    except ServiceError as error:
        return error


@dataclass(slots=True)
class _Waiting:
    """Calls of one caller and where their replies go."""

    name: str
    calls: Sequence[Call]
    replies: asyncio.Future[list[Any]]


class _Batches:
    """All calls to one server, one batch at a time."""

    def __init__(self, pipeline: Pipeline, sources: Mapping[str, str]) -> None:
        self._pipeline = pipeline
        self._sources = sources
        self._digests = {
            name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for name, source in sources.items()
        }
        self._waiting: deque[_Waiting] = deque()
        self._known: set[str] = set()
        self._known_to = ""
        self._task: asyncio.Task[None] | None = None

    def send(self, name: str, calls: Sequence[Call]) -> asyncio.Future[list[Any]]:
        """The reply to each of `calls`, exceptions among them; sent in the order of the calls."""
        waiting = _Waiting(name, calls, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._flush())
        return waiting.replies

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch = self._next()
                replies = iter(await self._execute(batch))
                for waiting in batch:
                    mine = [next(replies) for _ in waiting.calls]
                    if not waiting.replies.done():
                        waiting.replies.set_result(mine)
        finally:
            self._task = None

    def _next(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].calls)
        while self._waiting and size + len(self._waiting[0].calls) <= _MAX_COMMANDS:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].calls)
        return batch

    async def _execute(self, batch: Sequence[_Waiting]) -> list[Any]:
        steps = [(waiting.name, *call) for waiting in batch for call in waiting.calls]
        try:
            replies = await self._try(steps)
            missing = [
                index
                for index, reply in enumerate(replies)
                if isinstance(reply, exceptions.NoScriptError)
            ]
            if missing:
                # Somebody emptied the script cache. These were not executed.
                self._known.clear()
                again = await self._try([steps[index] for index in missing])
                for index, reply in zip(missing, again, strict=True):
                    replies[index] = reply
        except Exception as error:  # whatever it is, every caller must hear of it
            return [error] * len(steps)
        return replies

    async def _try(self, steps: Sequence[_Step]) -> list[Any]:
        run_id = await self._pipeline.run_id()
        if run_id != self._known_to:
            # A server that started again has forgotten its scripts.
            self._known_to = run_id
            self._known.clear()
        commands = [self._command(*step, run_id) for step in steps]
        replies = await self._pipeline.execute(commands, run_id)
        for name in {step[0] for step in steps} - self._known:
            answered = (
                reply for step, reply in zip(steps, replies, strict=True) if step[0] == name
            )
            if not all(isinstance(reply, Exception) for reply in answered):
                self._known.add(name)
        return replies

    def _command(
        self, name: str, keys: Sequence[str | bytes], args: Sequence[Any], run_id: str
    ) -> Command:
        if name == _PLAIN:
            return tuple(args)
        given = [run_id if arg is RUN_ID else arg for arg in args]
        if name in self._known:
            return ("EVALSHA", self._digests[name], len(keys), *keys, *given)
        return ("EVAL", self._sources[name], len(keys), *keys, *given)
