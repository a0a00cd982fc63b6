"""A client for the current master behind Redis Sentinels.

Sentinels do not notify clients of a failover. The client detects it by a broken connection, an
error (READONLY, NOREPLICAS) or, when isolated together with the old master, by polling the
Sentinels once a second. Sentinels may be isolated too, so the newest failover known to any of a
majority decides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

_REFRESH_SECONDS = 1.0
_SENTINEL_SECONDS = 1.0


def sentinel_client(
    sentinels: Sequence[tuple[str, int]], service: str, options: dict[str, Any]
) -> Redis:
    """A client for the master of `service`; `options` go to the pool and its connections.

    The Sentinels are asked with the same TLS options, and without a password.
    """
    options = dict(options)
    tls = issubclass(options.pop("connection_class", object), SSLConnection)
    alike = ("retry", "maint_notifications_config")
    asking = {name: value for name, value in options.items() if name.startswith("ssl_")}
    asking |= {name: options[name] for name in alike}
    asking |= {"ssl": tls, "decode_responses": True, "socket_timeout": _SENTINEL_SECONDS}
    watchers = _Sentinels(sentinels, {**asking, "socket_connect_timeout": _SENTINEL_SECONDS})
    connection_class = _TlsMasterConnection if tls else _MasterConnection
    pool = MasterPool(service, watchers, connection_class=connection_class, **options)
    return Redis.from_pool(pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The master according to one Sentinel."""

    epoch: int
    """Number of the failover that made the master; they grow."""
    master: tuple[str, int]
    is_up: bool
    """Whether the Sentinel reaches the master, or has just made it one."""


class _Sentinels(Sentinel):
    def __init__(self, sentinels: Sequence[tuple[str, int]], options: dict[str, Any]) -> None:
        super().__init__(sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The master after the newest failover that one of a majority of Sentinels knows of."""
        views = await self._views(service_name)
        if not views:
            raise MasterNotFoundError(f"no Sentinel that answers knows service {service_name!r}")
        newest = max(views, key=lambda view: (view.epoch, view.is_up))
        if not newest.is_up:
            raise MasterNotFoundError(f"the master of service {service_name!r} is down")
        return newest.master

    async def _views(self, service: str) -> list[_View]:
        asked = [asyncio.ensure_future(self._view(each, service)) for each in self.sentinels]
        views: list[_View] = []
        try:
            for answer in asyncio.as_completed(asked):
                with suppress(exceptions.RedisError, OSError):
                    views.append(await answer)
                if len(views) > len(asked) // 2:
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return views

    async def _view(self, sentinel: Any, service: str) -> _View:
        state = await sentinel.sentinel_master(service)
        master = await sentinel.sentinel_get_master_addr_by_name(service)
        # The Sentinel that leads a failover names the successor first, and then forgets the dead.
        is_successor = master != (state["ip"], state["port"])
        return _View(
            epoch=state["config-epoch"],
            master=master,
            is_up=is_successor or self.check_master_state(state, service),
        )


class MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Waits for a free connection, where redis-py's own pool for Sentinels raises an error."""

    def __init__(self, service: str, sentinels: _Sentinels, **options: Any) -> None:
        super().__init__(service, sentinels, **options)  # type: ignore[no-untyped-call]
        self._next_look = 0.0

    async def refresh_master(self) -> None:
        """Ask the Sentinels for the master, at most once a second."""
        clock = asyncio.get_running_loop().time
        started = clock()
        if started < self._next_look:
            return
        self._next_look = math.inf
        try:
            # Without Sentinels the known master stays in use.
            with suppress(exceptions.ConnectionError, exceptions.TimeoutError):
                await self.get_master_address()  # type: ignore[no-untyped-call]
        finally:
            # Sentinels that hang must not hold up the callers all the time.
            self._next_look = clock() + max(_REFRESH_SECONDS, 9 * (clock() - started))

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


class _MasterConnection(SentinelManagedConnection):
    async def can_read(self) -> bool:
        """Whether it is unfit for use, as redis-py asks before each: here, if it left the master.

        Asked of an open connection only.
        """
        await self.connection_pool.refresh_master()
        if (self.host, self.port) != self.connection_pool.master_address:
            return True
        unfit: bool = await super().can_read()
        return unfit

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Read a reply; on NOREPLICAS check for a new master, as this one may be replaced."""
        try:
            return await super().read_response(*args, **kwargs)
        except exceptions.ResponseError as error:
            if str(error).startswith("NOREPLICAS"):
                await self.disconnect(nowait=True)
            raise


class _TlsMasterConnection(_MasterConnection, SentinelManagedSSLConnection):
    pass
