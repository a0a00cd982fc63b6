"""Opens the store on Redis, which any number of manager replicas share.

Each method of its parts is one atomic step; what takes more is in `service/rollouts.py`. Tokens
live with their rollout, everything that orders or counts lives with its run. Errors are the
`ServiceError`s of `errors.py`; an unreachable store raises UNAVAILABLE. The store's own clock
decides about leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from seamflow.waits import in_background, note

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.chassis.log import get_logger
from services.chassis.redis.connect import UNAVAILABLE_ERRORS, connect
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.scripts import Scripts
from services.chassis.redis.store_mark import DataLostError
from services.chassis.redis.url import parse_redis_url
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.column_store import ColumnStore
from trajectory_manager.store.redis.inspection_store import InspectionStore
from trajectory_manager.store.redis.ledger_store import LedgerStore
from trajectory_manager.store.redis.retention_store import RetentionStore
from trajectory_manager.store.redis.run_store import RunStore
from trajectory_manager.store.redis.token_store import TokenStore

SCRIPTS = Path(__file__).parent / "lua"

_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The parts of a store, and its durability."""

    tokens: TokenStore
    runs: RunStore
    ledger: LedgerStore
    columns: ColumnStore
    retention: RetentionStore
    inspection: InspectionStore
    durability: Durability
    """The strongest class a run may require."""
    ready: Callable[[], Awaitable[bool]]


@asynccontextmanager
async def redis_store(
    url: str | Callable[[], str],
    durability: Durability,
    start_seconds: float,
    scripts: Path = SCRIPTS,
    replicas: int = 1,
    check_seconds: float = 5.0,
) -> AsyncIterator[Store]:
    """The store at `url`, once it answers and gives `durability`.

    A function as `url` is asked at each connect for the current user and password.

    For `replicated`, each master has `replicas` replicas, and all of them confirm each write: one
    that does not could be promoted without it. The settings are checked again every
    `check_seconds`: while they give less, it is not ready and refuses every call.

    Raises:
        DependencyUnavailable: it or a required replica was unavailable for `start_seconds`.
        ConfigError: its settings give less, or let it evict data.
    """
    redis = connect(url)
    confirmed_by = replicas if durability is Durability.REPLICATED else 0
    pipelines = Pipelines(redis, replicas=confirmed_by, mark=keys.STORE)
    try:
        deadline = asyncio.get_running_loop().time() + start_seconds
        cure = f"no answer within {start_seconds:g} s: start it or correct redis_url"
        await _until(lambda: _pings(redis), deadline, cure)

        async def check() -> None:
            await _check_settings(redis, durability, replicas)
            await pipelines.check_mark()

        await _until(lambda: _answers(check), deadline, cure)
        await _until(lambda: _answers(lambda: _warn_if_in_memory(redis)), deadline, cure)
        if durability is Durability.DURABLE:
            now = url() if callable(url) else url
            await _until(lambda: _answers(lambda: _check_no_failover(now, redis)), deadline, cure)
        if confirmed_by:
            cure = f"durability is replicated, and a master has not {replicas} replica(s) connected"
            await _until(lambda: _has_replicas(redis, replicas), deadline, cure)
        lua = Scripts(pipelines, scripts)

        async def ready() -> bool:
            return not (lua.refusal or pipelines.has_lost_data) and await _pings(redis)

        async with watched(lua, check, check_seconds):
            yield Store(
                tokens=TokenStore(lua),
                runs=RunStore(redis, lua),
                ledger=LedgerStore(lua),
                columns=ColumnStore(lua),
                retention=RetentionStore(lua),
                inspection=InspectionStore(lua),
                durability=durability,
                ready=ready,
            )
    finally:
        await pipelines.aclose()
        await redis.aclose()


async def _until(condition: Callable[[], Awaitable[bool]], deadline: float, cure: str) -> None:
    while not await condition():
        if asyncio.get_running_loop().time() >= deadline:
            raise DependencyUnavailable("redis", cure)
        await asyncio.sleep(_RETRY_SECONDS)


async def _answers(check: Callable[[], Awaitable[None]]) -> bool:
    """Whether the store answered; False: it has reset the connection, as one that starts may."""
    try:
        await check()
    except (*UNAVAILABLE_ERRORS, OSError):
        return False
    return True


async def _pings(redis: Redis) -> bool:
    try:
        return bool(await redis.ping())
    except (*UNAVAILABLE_ERRORS, OSError) as error:
        # The cluster client has the reason only as the cause.
        if isinstance(error.__cause__ or error, exceptions.AuthenticationError):
            raise ConfigError(f"redis_url: {error}") from error
        return False


async def _ask_masters(redis: Any, command: str, *args: str) -> list[dict[str, Any]]:
    """The answer of each; a `ConfigError` names a command that the server or its user lacks."""
    clustered = isinstance(redis, RedisCluster)
    targets = [{"target_nodes": node} for node in redis.get_primaries()] if clustered else [{}]
    try:
        return [await redis.execute_command(command, *args, **target) for target in targets]
    except exceptions.ResponseError as error:  # renamed, or not allowed by an ACL
        raise ConfigError(
            f"redis_url: this Redis does not allow {command} ({error}), by which its settings are "
            "checked: allow it, as by ACL SETUSER NAME +info +config|get; durability fast needs "
            "INFO alone"
        ) from error


async def _check_settings(redis: Redis, durability: Durability, replicas: int) -> None:
    for memory in await _ask_masters(redis, "INFO", "memory"):
        if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
            raise ConfigError(
                f"redis has maxmemory-policy {memory['maxmemory_policy']}, which would drop "
                "recorded tokens: set it to noeviction"
            )
    if durability is Durability.FAST:
        return
    asked = ("append*", "no-appendfsync*", "min-replicas*")
    for settings in await _ask_masters(redis, "CONFIG GET", *asked):
        gives = (settings["appendonly"], settings["appendfsync"])
        if gives != ("yes", "always"):
            raise ConfigError(
                f"durability is {durability.name.lower()}, and redis has appendonly {gives[0]}, "
                f"appendfsync {gives[1]}: start it with appendonly yes and appendfsync always"
            )
        if settings["no-appendfsync-on-rewrite"] != "no":
            raise ConfigError(
                f"durability is {durability.name.lower()}, and redis has no-appendfsync-on-rewrite "
                "yes, which acknowledges writes before they are on the disk while the append-only "
                "file is rewritten: set it to no"
            )
        needed, lag = settings["min-replicas-to-write"], settings["min-replicas-max-lag"]
        if durability is Durability.REPLICATED and (int(needed) < replicas or lag == "0"):
            raise ConfigError(
                f"durability is replicated, and redis has min-replicas-to-write {needed}, "
                f"min-replicas-max-lag {lag}: set them to {replicas} and 2 on every server, or an "
                "isolated master continues to acknowledge writes that are lost"
            )


async def _warn_if_in_memory(redis: Redis) -> None:
    """`fast` promises nothing about Redis itself; what that may mean is said, if it tells."""
    try:
        answers = await _ask_masters(redis, "CONFIG GET", "appendonly", "save")
    except ConfigError:  # a managed one, whose provider keeps its settings
        return
    for settings in answers:
        if settings["appendonly"] == "no" and not settings["save"]:
            cure = "start Redis with appendonly yes, or every run ends with its restart"
            get_logger().warning("store_keeps_nothing_on_disk", cure=cure)


async def _check_no_failover(url: str, redis: Redis) -> None:
    """A failover promotes a replica without what only the master has on its disk."""
    topology = parse_redis_url(url).topology
    if not topology:
        return
    answers = await _ask_masters(redis, "INFO", "replication")
    if any(answer["connected_slaves"] for answer in answers):
        raise ConfigError(
            f"durability is durable, and a {topology} may promote a replica that has not got what "
            "was acknowledged: set durability to replicated"
        )


async def _has_replicas(redis: Redis, replicas: int) -> bool:
    try:
        answers = await _ask_masters(redis, "INFO", "replication")
    except (*UNAVAILABLE_ERRORS, OSError):
        return False
    found = [answer["connected_slaves"] for answer in answers]
    if max(found) > replicas:
        raise ConfigError(
            f"replicas is {replicas}, and a master has {max(found)}: a replica that does not "
            f"confirm a write could be promoted without it; set replicas to {max(found)}"
        )
    return bool(min(found) == replicas)


@asynccontextmanager
async def watched(
    scripts: Scripts, check: Callable[[], Awaitable[None]], every_seconds: float
) -> AsyncIterator[None]:
    """While `check` raises an error, the scripts refuse every call: nothing is acknowledged.

    Writes acknowledged between a change and the next check have the weaker class.
    """
    ended = asyncio.Event()
    work = _watch(scripts, check, every_seconds, ended)
    task = in_background(work, "checking the durability of the store")
    try:
        yield
    finally:
        ended.set()  # not cancelled: redis-py may swallow a cancellation that meets a reply
        await task


async def _watch(
    scripts: Scripts,
    check: Callable[[], Awaitable[None]],
    every_seconds: float,
    ended: asyncio.Event,
) -> None:
    while not await _is_set_within(ended, every_seconds):
        try:
            await check()
        except (ConfigError, DataLostError) as error:
            if not scripts.refusal:
                get_logger().error("store_refused", error=str(error))
            scripts.refusal = f"{error}; until then nothing is stored"
            note("store", scripts.refusal)
        except (*UNAVAILABLE_ERRORS, OSError):
            continue  # calls fail by themselves
        else:
            scripts.refusal = ""


async def _is_set_within(ended: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)
    return ended.is_set()
