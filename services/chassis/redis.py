"""Redis, as every service uses it: no hidden retries, bounded waits, one script per atomic step."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.chassis.errors import DependencyUnavailable, Reason, exhausted, unavailable

__all__ = ["Scripts", "connect", "require", "store_errors"]

_MAX_CONNECTIONS = 32
_CONNECT_SECONDS = 2.0
_REPLY_SECONDS = 5.0
_HEALTH_CHECK_SECONDS = 10
_FULL_RETRY_SECONDS = 5.0
_START_SECONDS = 20.0
_START_PAUSE_SECONDS = 0.1


def connect(url: str) -> Redis:
    """A client for `url` ("redis://...", "rediss://...") that answers bytes; `aclose()` it.

    It never sends a command twice: by default redis-py does, which would append an entry twice
    when only the reply was lost. Callers share a bounded number of connections and wait for one.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=_REPLY_SECONDS,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_REPLY_SECONDS,
        health_check_interval=_HEALTH_CHECK_SECONDS,
        decode_responses=False,
    )
    return Redis.from_pool(pool)


async def require(redis: Redis, seconds: float = _START_SECONDS) -> None:
    """Wait until Redis answers, for `seconds` at most.

    Raises:
        DependencyUnavailable: it does not; the process ends with exit code 69.
    """
    limit = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            await redis.ping()
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            if asyncio.get_running_loop().time() >= limit:
                message = f"no answer within {seconds:g} s: {error}; is redis_url right?"
                raise DependencyUnavailable("redis", message) from error
            await asyncio.sleep(_START_PAUSE_SECONDS)
        else:
            return


@contextmanager
def store_errors(operation: str) -> Iterator[None]:
    """Turn "Redis is away" and "Redis is full" into errors that a caller may retry.

    Raises:
        ServiceError: UNAVAILABLE / STORE_UNAVAILABLE or RESOURCE_EXHAUSTED / STORE_FULL.
    """
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        message = f"{operation}: the store is full"
        raise exhausted(Reason.STORE_FULL, message, _FULL_RETRY_SECONDS) from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError) as error:
        message = f"{operation}: the store does not answer"
        raise unavailable(Reason.STORE_UNAVAILABLE, message) from error
    except exceptions.ResponseError as error:
        # What Redis says when its disk is full: it refuses to write until it can save again.
        if not str(error).startswith("MISCONF"):
            raise
        message = f"{operation}: the store cannot write to its disk; is it full?"
        raise unavailable(Reason.STORE_UNAVAILABLE, message) from error


class Scripts:
    """The Lua files of a folder by name: `await scripts.call("append", keys=[...], args=[...])`."""

    def __init__(self, redis: Redis, folder: Path) -> None:
        """Read every `*.lua` in `folder`.

        Raises:
            ValueError: the folder holds none.
        """
        self._redis = redis
        self._sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.lua"))}
        if not self._sources:
            raise ValueError(f"folder {folder} holds no *.lua file")
        self._digests = {
            name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for name, source in self._sources.items()
        }

    async def call(
        self, name: str, *, keys: Sequence[str | bytes], args: Sequence[Any] = ()
    ) -> Any:
        """Run the script `name` atomically and return its raw reply.

        Raises:
            ServiceError: the store is away or full.
            redis.exceptions.ResponseError: the script itself failed.
        """
        with store_errors(name):
            try:
                return await self._redis.evalsha(self._digests[name], len(keys), *keys, *args)
            except exceptions.NoScriptError:
                # A restarted server has forgotten its scripts; EVAL also teaches it again.
                return await self._redis.eval(self._sources[name], len(keys), *keys, *args)
