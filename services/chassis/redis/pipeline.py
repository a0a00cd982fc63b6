"""Batches of commands on a dedicated connection: the fast path to Redis.

One `Pipeline` per server: it packs a whole batch in one write and reads the replies in order,
without redis-py's work for each command. `Pipelines` finds the pipeline of a key, on any topology.
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
from redis.crc import key_slot

from services.chassis.redis.replication import Confirmation
from services.chassis.redis.replies import Replies
from services.chassis.redis.store_mark import StoreMark
from services.chassis.redis.target import Address, Target, handshake, target_of

_BATCH_SECONDS = 3.0
_CONNECT_SECONDS = 2.0

# hiredis types its argument as a tuple of one.
Command = tuple[Any, ...]


class Pipeline:
    """A dedicated connection to one server; `execute` sends a batch and waits for its replies.

    The next call reopens a lost connection. No command is ever sent twice.
    """

    def __init__(self, target: Target, replicas: int = 0, mark: StoreMark | None = None) -> None:
        """`target` is where to connect; `replicas` confirm each batch; `mark` is looked for."""
        self._target = target
        self._mark = mark or StoreMark()
        self._address: Address = ""
        self._replies: Replies | None = None
        self._confirmation = Confirmation(replicas)
        self._run_id = ""
        self.broken = False
        """Whether the server was unavailable when this connection was last used."""
        self._closed = False
        self._lock = asyncio.Lock()

    async def run_id(self) -> str:
        """The run_id of the server, which identifies one start of it.

        Pass it to `execute` when the commands depend on it: the server may restart in between.

        Raises:
            redis.exceptions.RedisError: the server is unavailable.
        """
        if not self._is_open():
            async with self._lock:
                await self._open()
        return self._run_id

    async def execute(self, commands: Sequence[Command], run_id: str | None = None) -> list[Any]:
        """The reply to each of `commands`, in order; an exception where there is none.

        After a ConnectionError or TimeoutError the command may or may not have been executed.
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
                connection = await self._open()
                if run_id not in (None, self._run_id):
                    raise exceptions.ConnectionError("the server was restarted")
                await self._exchange(connection, [*commands, *confirmation], replies)
            except (exceptions.RedisError, OSError) as error:
                self.broken = True
                replies += [error] * (len(commands) + len(confirmation) - len(replies))
        return self._confirmation.confirmed(replies, len(commands))

    async def aclose(self) -> None:
        """Close the connection for good, after the batch in flight."""
        async with self._lock:
            self._closed = True
            if self._replies is not None:
                self._replies.close()
                await self._replies.lost

    def _is_open(self) -> bool:
        return self._replies is not None and self._replies.usable and not self._closed

    async def _open(self) -> Replies:
        """The open connection; a new one if it was lost or the server has moved."""
        if self._closed:
            raise exceptions.ConnectionError("the pipeline is closed")
        connection = self._replies
        is_fit = self._is_open() and await self._target.is_current(self._address)
        if connection is None or not is_fit:
            self._drop()
            self.broken = True
            connection = await self._connect()
        self.broken = False
        return connection

    async def _connect(self) -> Replies:
        try:
            self._address = await self._target.address()
            async with asyncio.timeout(_CONNECT_SECONDS):
                self._replies = connection = await self._create_connection()
        except TimeoutError as error:
            message = f"no connection within {_CONNECT_SECONDS:g} s"
            raise exceptions.TimeoutError(message) from error
        except OSError as error:
            raise exceptions.ConnectionError(f"cannot connect: {error}") from error
        except RuntimeError as error:
            raise _reset(error) from error
        try:
            self._run_id = await self._greet(connection)
        except BaseException:
            # An open connection is one whose run_id is known.
            self._drop()
            raise
        return connection

    async def _create_connection(self) -> Replies:
        loop, tls = asyncio.get_running_loop(), self._target.tls
        if isinstance(self._address, str):
            _, replies = await loop.create_unix_connection(Replies, self._address, ssl=tls)
        else:
            _, replies = await loop.create_connection(Replies, *self._address, ssl=tls)
        return replies

    async def _greet(self, connection: Replies) -> str:
        """Authenticate, select the database, look for the mark; return the server's run_id."""
        replies: list[Any] = []
        greeting = [*handshake(self._target.options), ("INFO", "server")]
        await self._exchange(connection, [*greeting, *self._mark.commands()], replies)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        self._mark.check(replies[-1])
        found = re.search(rb"run_id:(\w+)", replies[len(greeting) - 1])
        assert found is not None, "INFO server names the run_id"
        return found[1].decode()

    async def _exchange(
        self, connection: Replies, commands: Sequence[Command], replies: list[Any]
    ) -> None:
        packed = b"".join([hiredis.pack_command(command) for command in commands])
        try:
            async with asyncio.timeout(_BATCH_SECONDS):
                arrived = connection.expect(len(commands), replies)
                connection.transport.write(packed)
                await arrived
            if any(isinstance(reply, Exception) and _was_replaced(reply) for reply in replies):
                self._drop()
        except TimeoutError as error:
            self._drop()
            raise exceptions.TimeoutError(f"no reply within {_BATCH_SECONDS:g} s") from error
        except RuntimeError as error:
            self._drop()
            raise _reset(error) from error
        except BaseException:
            # Replies may be in flight: they must not be taken for those of the next batch.
            self._drop()
            raise

    def _drop(self) -> None:
        if self._replies is not None:
            self._replies.close()


def _was_replaced(error: Exception) -> bool:
    """Whether the server may no longer be the master: the next connection asks who is."""
    return isinstance(error, exceptions.ReadOnlyError) or str(error).startswith("NOREPLICAS")


def _reset(error: RuntimeError) -> exceptions.ConnectionError:
    """The error that uvloop raises when the handle of a connection is closed."""
    return exceptions.ConnectionError(f"the connection was reset: {error}")


class Pipelines:
    """The pipelines to all servers of a client: to the one, or to each node of a cluster."""

    def __init__(self, redis: Redis, replicas: int = 0, mark: str = "") -> None:
        """Pipelines in addition to the connections of `redis`; `aclose()` them before it.

        Each batch is acknowledged when `replicas` have it. With the key `mark`, a server that comes
        back without its data gets no commands; not in a cluster, whose nodes have a part each.
        """
        self._redis: Any = redis
        self._replicas = replicas
        self._pipelines: dict[str, Pipeline] = {}
        self.are_many: Final = isinstance(redis, RedisCluster)
        """Whether different keys may have different pipelines."""
        self._mark = StoreMark("" if self.are_many else mark)

    async def of(self, key: str | bytes) -> Pipeline:
        """The pipeline to the server that owns `key` now.

        Raises:
            redis.exceptions.RedisError, RedisClusterException: no node of the cluster answers.
        """
        if not self.are_many:
            pool = self._redis.connection_pool
            options, connection_class = pool.connection_kwargs, pool.connection_class
            return self._pipeline("", lambda: target_of(options, connection_class, pool))
        node = await self._node(key)
        address = {"host": node.host, "port": node.port}
        return self._pipeline(
            node.name,
            lambda: target_of({**node.connection_kwargs, **address}, node.connection_class),
        )

    async def moved(self, error: exceptions.AskError) -> None:
        """Update the slot map from a MOVED reply; an ASK is temporary and changes nothing."""
        if isinstance(error, exceptions.MovedError):
            await self._redis.nodes_manager.move_slot(error)

    @property
    def has_lost_data(self) -> bool:
        return self._mark.is_missing

    async def check_mark(self) -> None:
        """Look for the mark on a server to which connections are open.

        Raises:
            DataLostError: it has been emptied.
        """
        if self._mark.key:
            self._mark.check(await self._redis.get(self._mark.key))

    async def aclose(self) -> None:
        for pipeline in self._pipelines.values():
            await pipeline.aclose()

    async def _node(self, key: str | bytes) -> ClusterNode:
        if self._redis.get_default_node() is None:
            await self._redis.initialize()
        node: ClusterNode = self._redis.get_node_from_key(key)
        known = self._pipelines.get(node.name)
        if known is None or not known.broken:
            return node
        # Its replica may have taken over: ask the other nodes.
        await self._redis.nodes_manager.initialize(last_failed_node_name=node.name)
        successor: ClusterNode = self._redis.get_node_from_key(key)
        return successor

    def _pipeline(self, server: str, target: Callable[[], Target]) -> Pipeline:
        if server not in self._pipelines:
            self._pipelines[server] = Pipeline(target(), self._replicas, self._mark)
        return self._pipelines[server]


def slot_of(key: str | bytes) -> int:
    return key_slot(key.encode() if isinstance(key, str) else key)
