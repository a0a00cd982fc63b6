"""Redis clients of every service: no hidden retries, bounded waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig
from seamflow import waits

from services.chassis.errors import (
    ConfigError,
    DependencyUnavailable,
    Reason,
    exhausted,
    unavailable,
)
from services.chassis.redis.replication import NotReplicated
from services.chassis.redis.sentinel import sentinel_client
from services.chassis.redis.store_mark import DataLostError
from services.chassis.redis.url import parse_redis_url

_MAX_REDIRECTIONS = 4

_MAX_CONNECTIONS = 32
_CONNECT_SECONDS = 2.0
_REPLY_SECONDS = 5.0
_HEALTH_CHECK_SECONDS = 10
_FULL_RETRY_SECONDS = 5.0
_START_SECONDS = 20.0
_START_PAUSE_SECONDS = 0.1

_COMMON: dict[str, Any] = {
    # RESP3: HGETALL returns a dict.
    "protocol": 3,
    "socket_connect_timeout": _CONNECT_SECONDS,
    "socket_timeout": _REPLY_SECONDS,
    "health_check_interval": _HEALTH_CHECK_SECONDS,
    # A vendor-specific feature, requested at each connect by default.
    "maint_notifications_config": MaintNotificationsConfig(enabled=False),
}

UNAVAILABLE_ERRORS = (
    exceptions.ConnectionError,  # also: the master is unknown, the server loads its data
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,  # a master that was demoted
    exceptions.ClusterError,  # the cluster is down, or its redirections never end
    exceptions.AskError,  # a slot is on its way to another node, or has arrived
    exceptions.TryAgainError,
    exceptions.RedisClusterException,  # no node of the cluster answers
)
"""What redis-py raises while a store cannot be reached."""

_ERROR_CODES = {
    "MISCONF": "the store cannot write to its disk; is it full?",
    "NOREPLICAS": "the store has lost its replicas and rejects writes",
}
"""Error codes that redis-py has no class for."""


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
        async with self._free_for_commands:
            return await super().execute_command(*args, **kwargs)

    def pipeline(self, transaction: bool | None = None, shard_hint: Any = None) -> ClusterPipeline:
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
        async with self._free:
            replies: list[Any] = await super().execute(*args, **kwargs)
            return replies


def connect(url: str | Callable[[], str]) -> Redis:
    """A client for `url` that answers bytes; `aclose()` it.

    A function is asked at each connect for the current user and password.

    One server ("redis://...", "unix://..."), the current master behind Sentinels
    ("redis+sentinel://...") or a cluster ("redis+cluster://...", a `RedisCluster`, whose commands
    are those of `Redis`): see `url.parse_redis_url`.

    It never sends a command twice, as redis-py does by default when a reply is lost. Callers
    share a bounded number of connections and wait for a free one.

    Raises:
        ConfigError: there is no such form of URL.
    """
    address = parse_redis_url(url() if callable(url) else url)
    options = {**_COMMON, "retry": Retry(NoBackoff(), 0), **address.options}
    if callable(url) and options.pop("password", None) is not None:
        options.pop("username", None)
        options["credential_provider"] = UrlCredentials(url)
    if address.topology == "cluster":
        del options["db"]
        return cast("Redis", cluster_client(address.hosts, _MAX_CONNECTIONS, options))
    options |= {"max_connections": _MAX_CONNECTIONS, "timeout": _REPLY_SECONDS}
    if address.topology == "sentinel":
        return sentinel_client(address.hosts, address.service, options)
    if address.hosts:
        options["host"], options["port"] = address.hosts[0]
    return Redis.from_pool(BlockingConnectionPool(**options))


async def require(redis: Redis, seconds: float = _START_SECONDS) -> None:
    """Wait until Redis answers, for `seconds` at most.

    Raises:
        DependencyUnavailable: it does not answer; the process ends with exit code 69.
    """
    limit = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            await redis.ping()
        except UNAVAILABLE_ERRORS as error:
            if asyncio.get_running_loop().time() >= limit:
                message = f"no answer within {seconds:g} s: {error}; is redis_url right?"
                raise DependencyUnavailable("redis", message) from error
            await asyncio.sleep(_START_PAUSE_SECONDS)
        else:
            return


@contextmanager
def store_errors(operation: str) -> Iterator[None]:
    """Convert errors of an unavailable or full Redis into errors that a caller may retry.

    Raises:
        ServiceError: UNAVAILABLE / STORE_UNAVAILABLE or RESOURCE_EXHAUSTED / STORE_FULL.
    """
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException, RuntimeError) as error:
        refusal, cure = _refusal(error)
        if not refusal:
            raise
        waits.note("store", f"the store (Redis): {refusal}", cure)
        message = f"{operation}: {refusal}"
        if isinstance(error, exceptions.OutOfMemoryError):
            raise exhausted(Reason.STORE_FULL, message, _FULL_RETRY_SECONDS) from error
        raise unavailable(Reason.STORE_UNAVAILABLE, message) from error


def _refusal(error: Exception) -> tuple[str, str]:
    """What is wrong with the store, and what to do; empty: nothing, the call was wrong."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return "the store is full", (
            "Raise maxmemory of Redis, or write trained rollouts to files and delete them: "
            "`seamflow export --out FOLDER --delete`."
        )
    if isinstance(error, NotReplicated):
        return "not confirmed by a replica", "Start the replicas of Redis, or mend their link."
    if isinstance(error, DataLostError):
        return str(error), ""
    is_reset = isinstance(error, RuntimeError) and "closed" in str(error)  # uvloop's, at connect
    if isinstance(error, UNAVAILABLE_ERRORS) or is_reset:
        return "the store does not answer", "See whether Redis runs, and its log."
    code = str(error).partition(" ")[0] if isinstance(error, exceptions.ResponseError) else ""
    return _ERROR_CODES.get(code, ""), "Its log says why."


class UrlCredentials(CredentialProvider):
    """Asked by redis-py at each connect, so that a new password counts from the next one on."""

    def __init__(self, url: Callable[[], str]) -> None:
        """`url` gives the current URL; user and password alone are taken from it.

        Raises:
            ConfigError: there is no such form of URL.
        """
        self._url = url
        self._last = _login(url())

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User and password, or the password alone; the last ones if the URL is not valid now."""
        with suppress(ConfigError):
            self._last = _login(self._url())
        return self._last

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As `get_credentials`: nothing is waited for."""
        return self.get_credentials()


def _login(url: str) -> tuple[str] | tuple[str, str]:
    options = parse_redis_url(url).options
    password = options.get("password", "")
    return (options["username"], password) if options.get("username") else (password,)
