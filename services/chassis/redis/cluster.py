"""A client for Redis Cluster that never repeats a command and waits for a free connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_MAX_REDIRECTIONS = 4


def cluster_client(
    nodes: Sequence[tuple[str, int]], max_connections: int, options: dict[str, Any]
) -> RedisCluster:
    """A client that finds the cluster through `nodes`; `options` go to its connections.

    MOVED and ASK are followed: a command that is redirected was not executed.
    """
    options = dict(options)
    tls = issubclass(options.pop("connection_class", object), SSLConnection)
    return _Cluster(
        startup_nodes=[ClusterNode(host, port) for host, port in nodes],
        ssl=tls,
        # redis-py would drop all connections, those in use as well, at every fifth MOVED.
        reinitialize_steps=0,
        # Commands and pipelines wait separately: a pipeline follows its redirections by commands.
        max_connections=2 * max_connections,
        concurrency=max_connections,
        **options,
    )


class _Cluster(RedisCluster):
    """Waits when all connections of a node are in use, where redis-py raises an error."""

    def __init__(self, *, concurrency: int, **options: Any) -> None:
        super().__init__(**options)
        self._free_for_commands = asyncio.Semaphore(concurrency)
        self._free_for_pipelines = asyncio.Semaphore(concurrency)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the command once a connection is free."""
        async with self._free_for_commands:
            return await super().execute_command(*args, **kwargs)

    def pipeline(self, transaction: bool | None = None, shard_hint: Any = None) -> ClusterPipeline:
        """A pipeline that waits for a free connection."""
        free = self._free_for_pipelines
        return _Pipeline(self, transaction, free)  # type: ignore[abstract] # redis-py's, too

    async def aclose(self) -> None:
        """Close every connection; redis-py leaves them open if the last command failed."""
        await super().aclose()
        await self.nodes_manager.aclose()
        await self.nodes_manager.aclose("startup_nodes")


class _Pipeline(ClusterPipeline):
    def __init__(
        self, client: RedisCluster, transaction: bool | None, free: asyncio.Semaphore
    ) -> None:
        super().__init__(client, transaction)
        self._free = free
        if transaction:
            # Retry redirections only. redis-py has no public setting for it.
            strategy: Any = self._execution_strategy
            redirections = strategy.SLOT_REDIRECT_ERRORS
            strategy._retry = Retry(NoBackoff(), _MAX_REDIRECTIONS, redirections)

    async def execute(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Execute the commands once a connection is free."""
        async with self._free:
            replies: list[Any] = await super().execute(*args, **kwargs)
            return replies
