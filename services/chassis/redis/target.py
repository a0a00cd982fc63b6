"""Where a pipeline connects to, and how: one server, the master behind Sentinels, or a node."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import SSLConnection
from redis.exceptions import AuthenticationError

from services.chassis.redis.sentinel import MasterPool

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


@dataclass(slots=True)
class Target:
    """A server at a fixed address, or the current master behind Sentinels."""

    options: Mapping[str, Any] = field(repr=False)
    """Keyword arguments of redis-py's connections."""
    tls: ssl.SSLContext | None = None
    pool: MasterPool | None = None
    """Asks the Sentinels; None: the address is that of the options."""

    async def address(self) -> Address:
        """The present address of the server.

        Raises:
            redis.exceptions.RedisError: it is not known.
        """
        if self.pool is not None:
            host, port = await self.pool.get_master_address()  # type: ignore[no-untyped-call]
            return host, port
        path: str | None = self.options.get("path")
        return path or (self.options["host"], int(self.options["port"]))

    async def is_current(self, address: Address) -> bool:
        """Whether the server is still at `address`; asks the Sentinels once a second."""
        if self.pool is None:
            return True
        await self.pool.refresh_master()
        return address == self.pool.master_address


def target_of(options: Mapping[str, Any], connection_class: type, pool: Any = None) -> Target:
    """The target of connections with these options, and of `pool` if that is of Sentinels."""
    is_tls = issubclass(connection_class, SSLConnection)
    tls = SSLConnection(**options).ssl_context.get() if is_tls else None
    return Target(options, tls, pool if isinstance(pool, MasterPool) else None)


def handshake(options: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The first commands of a connection: RESP3, credentials, name and database."""
    user, password = _login(options)
    if user and not password:
        raise AuthenticationError("a username needs a password")
    hello: tuple[Any, ...] = ("HELLO", 3)
    if password:
        hello += ("AUTH", user or "default", password)
    commands = [hello]
    if options.get("client_name"):
        commands.append(("CLIENT", "SETNAME", options["client_name"]))
    if options.get("db"):
        commands.append(("SELECT", options["db"]))
    return commands


def _login(options: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The present user and password, of the options or of their provider."""
    provider = options.get("credential_provider")
    if provider is None:
        return options.get("username"), options.get("password")
    *user, password = provider.get_credentials()
    return (user[0] if user else None), password
