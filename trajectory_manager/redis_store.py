"""A store on Redis, shared by any number of replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis import exceptions
from redis.asyncio import Redis

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.chassis.redis import Scripts, connect
from trajectory_manager.records import Durability
from trajectory_manager.redis_runs import RedisRunStore
from trajectory_manager.redis_tokens import RedisTokenStore
from trajectory_manager.store import Store

SCRIPTS = Path(__file__).parent / "lua"

_RETRY_SECONDS = 0.2


@asynccontextmanager
async def redis_store(
    url: str, durability: Durability, start_seconds: float, scripts: Path = SCRIPTS
) -> AsyncIterator[Store]:
    """The store at `url`, once it answers and gives what `durability` promises.

    Raises:
        DependencyUnavailable: it did not answer within `start_seconds`.
        ConfigError: its settings promise less, or let it evict what is stored.
    """
    redis = connect(url)
    try:
        await _answers(redis, start_seconds)
        await _check_settings(redis, durability)
        lua = Scripts(redis, scripts)

        async def ready() -> bool:
            return await _pings(redis)

        yield Store(
            tokens=RedisTokenStore(redis, lua),
            runs=RedisRunStore(redis, lua),
            durability=durability,
            ready=ready,
        )
    finally:
        await redis.aclose()


async def _answers(redis: Redis, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not await _pings(redis):
        if clock() >= deadline:
            raise DependencyUnavailable(
                "redis", f"no answer within {seconds:g} s: start it or correct redis_url"
            )
        await asyncio.sleep(_RETRY_SECONDS)


async def _pings(redis: Redis) -> bool:
    try:
        return bool(await redis.ping())
    except exceptions.AuthenticationError as error:
        raise ConfigError(f"redis_url: {error}") from error
    except (exceptions.RedisError, OSError):
        return False


async def _check_settings(redis: Redis, durability: Durability) -> None:
    settings = await redis.config_get("append*", "maxmemory*")
    if settings["maxmemory"] != "0" and settings["maxmemory-policy"] != "noeviction":
        raise ConfigError(
            f"redis has maxmemory-policy {settings['maxmemory-policy']}, which would drop recorded "
            "tokens: set it to noeviction"
        )
    gives = (settings["appendonly"], settings["appendfsync"])
    if durability is Durability.DURABLE and gives != ("yes", "always"):
        raise ConfigError(
            f"durability is durable, and redis has appendonly {gives[0]}, appendfsync {gives[1]}: "
            "start it with appendonly yes and appendfsync always"
        )
