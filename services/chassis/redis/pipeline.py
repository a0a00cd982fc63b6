"""Batches of commands on a connection of their own: the fast way into Redis.

One `Pipeline` per server: it packs a whole batch at once and reads the replies in order, without
what redis-py does for each command. `Pipelines` finds the one of a key, on any topology.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from services.chassis.redis.replication import Confirmation
from services.chassis.redis.replies import Replies

__all__ = ["Pipeline", "Pipelines", "slot_of"]

_BATCH_SECONDS = 3.0

# hiredis types its argument as a tuple of one.
Command = tuple[Any, ...]


class Pipeline:
    """A connection of its own to one server; `execute` sends a batch and waits for its replies.

    A lost connection is opened again by the next call. Nothing is ever sent twice.
    """

    def __init__(self, make: Callable[[], Connection], replicas: int = 0) -> None:
        """`make` makes a connection that is not open yet; `replicas` must confirm each batch."""
        # redis-py's types cannot say that replies are bytes.
        self._connection: Any = make()
        self._replies: Replies
        self._confirmation = Confirmation(replicas)
        self._run_id = ""
        self.broken = False
        """Whether the server is away, as far as this connection knows."""
        self._closed = False
        self._lock = asyncio.Lock()

    async def run_id(self) -> str:
        """Which start of the server this connection leads to, as that server said itself.

        Pass it to `execute` when the commands depend on it: another one may answer by then.

        Raises:
            redis.exceptions.RedisError: the server is away.
        """
        if not self._is_open():
            async with self._lock:
                await self._open()
        return self._run_id

    async def execute(self, commands: Sequence[Command], run_id: str | None = None) -> list[Any]:
        """The reply to each of `commands`, in order; an exception where there is none.

        A ConnectionError or TimeoutError says that the command may or may not have been executed.
        With replicas, all replies of a batch that they did not confirm are `NotReplicated`.
        MOVED and ASK stay errors: that command was not executed, and its key is elsewhere.

        Args:
            commands: name and arguments of each; their keys share a server.
            run_id: nothing is sent unless this is still the server's.
        """
        if not commands:
            return []
        confirmation = self._confirmation.commands(commands[0])
        replies: list[Any] = []
        async with self._lock:
            try:
                await self._open()
                if run_id not in (None, self._run_id):
                    raise exceptions.ConnectionError("the server was started again")
                await self._exchange([*commands, *confirmation], replies)
            except (exceptions.RedisError, OSError) as error:
                self.broken = True
                replies += [error] * (len(commands) + len(confirmation) - len(replies))
        return self._confirmation.confirmed(replies, len(commands))

    async def aclose(self) -> None:
        """Close the connection for good; a batch in flight is waited for."""
        async with self._lock:
            self._closed = True
            if self._connection.is_connected:
                await self._drop()
                await self._replies.lost

    def _is_open(self) -> bool:
        return self._connection.is_connected and self._replies.usable and not self._closed

    async def _open(self) -> None:
        connection = self._connection
        if self._closed:
            raise exceptions.ConnectionError("the pipeline is closed")
        # A connection to a master behind Sentinels is unfit once another one is master.
        if not self._is_open() or await connection.can_read():
            await self._drop()
            self.broken = True
            try:
                await connection.connect()
                self._replies = Replies()
                # redis-py has no other way to its transport.
                connection._writer.transport.set_protocol(self._replies)
                self._run_id = await self._ask_run_id()
            except RuntimeError as error:
                await self._drop()
                raise _reset(error) from error
            except BaseException:
                # An open connection is one whose run_id is known.
                await self._drop()
                raise
        self.broken = False

    async def _ask_run_id(self) -> str:
        replies: list[Any] = []
        await self._exchange([("INFO", "server")], replies)
        if isinstance(replies[0], Exception):
            raise replies[0]
        found = re.search(rb"run_id:(\w+)", replies[0])
        assert found is not None, "INFO server names the run_id"
        return found[1].decode()

    async def _exchange(self, commands: Sequence[Command], replies: list[Any]) -> None:
        packed = b"".join([hiredis.pack_command(command) for command in commands])
        try:
            async with asyncio.timeout(_BATCH_SECONDS):
                arrived = self._replies.expect(len(commands), replies)
                self._connection._writer.transport.write(packed)
                await arrived
            if any(isinstance(reply, Exception) and _was_replaced(reply) for reply in replies):
                await self._drop()
        except TimeoutError as error:
            await self._drop()
            raise exceptions.TimeoutError(f"no reply within {_BATCH_SECONDS:g} s") from error
        except RuntimeError as error:
            await self._drop()
            raise _reset(error) from error
        except BaseException:
            # Replies may still be under way: nobody must take them for those of the next batch.
            await self._drop()
            raise

    async def _drop(self) -> None:
        # redis-py would wait for the end of a protocol that the transport has no more.
        await self._connection.disconnect(nowait=True)


def _was_replaced(error: Exception) -> bool:
    """Whether the server may no longer be the master: the next connection asks who is."""
    return isinstance(error, exceptions.ReadOnlyError) or str(error).startswith("NOREPLICAS")


def _reset(error: RuntimeError) -> exceptions.ConnectionError:
    """What uvloop means when it says that the handle of a connection is closed."""
    return exceptions.ConnectionError(f"the connection was reset: {error}")


class Pipelines:
    """The pipelines to all servers of a client: to the one, or to each node of a cluster."""

    def __init__(self, redis: Redis, replicas: int = 0) -> None:
        """Pipelines beside the connections of `redis`, which stays open; `aclose()` them first.

        Each batch is acknowledged when `replicas` have it.
        """
        self._redis: Any = redis
        self._replicas = replicas
        self._pipelines: dict[str, Pipeline] = {}
        self.are_many: Final = isinstance(redis, RedisCluster)
        """Whether different keys may have different pipelines."""

    async def of(self, key: str | bytes) -> Pipeline:
        """The pipeline to the server that owns `key` now.

        Raises:
            redis.exceptions.RedisError, RedisClusterException: no node of the cluster answers.
        """
        if not self.are_many:
            return self._pipeline("", self._redis.connection_pool.make_connection)
        node = await self._node(key)
        return self._pipeline(node.name, lambda: _node_connection(node))

    async def moved(self, error: exceptions.AskError) -> None:
        """Learn from a MOVED reply where its slot is now; an ASK teaches nothing that lasts."""
        if isinstance(error, exceptions.MovedError):
            await self._redis.nodes_manager.move_slot(error)

    async def aclose(self) -> None:
        """Close every connection."""
        for pipeline in self._pipelines.values():
            await pipeline.aclose()

    async def _node(self, key: str | bytes) -> ClusterNode:
        if self._redis.get_default_node() is None:
            await self._redis.initialize()
        node: ClusterNode = self._redis.get_node_from_key(key)
        known = self._pipelines.get(node.name)
        if known is None or not known.broken:
            return node
        # Its replica may have taken over; the other nodes know.
        await self._redis.nodes_manager.initialize(last_failed_node_name=node.name)
        successor: ClusterNode = self._redis.get_node_from_key(key)
        return successor

    def _pipeline(self, server: str, make: Callable[[], Connection]) -> Pipeline:
        if server not in self._pipelines:
            self._pipelines[server] = Pipeline(make, self._replicas)
        return self._pipelines[server]


def slot_of(key: str | bytes) -> int:
    """The slot of a cluster that owns `key`."""
    return key_slot(key.encode() if isinstance(key, str) else key)


def _node_connection(node: ClusterNode) -> Connection:
    return node.connection_class(**node.connection_kwargs, retry=Retry(NoBackoff(), 0))
