"""Where a pipeline connects to, and how: one server, the master behind Sentinels, or a node."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis.asyncio import SSLConnection
from redis.exceptions import AuthenticationError

from services.chassis.redis.sentinel import MasterPool

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

_CERT_REQS = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


class Target(Protocol):
    """A server to connect to; `options` are the keyword arguments of redis-py's connections."""

    options: Mapping[str, Any]
    tls: ssl.SSLContext | None

    async def address(self) -> Address:
        """The current address of the server.

        Raises:
            redis.exceptions.RedisError: it is not known.
        """
        ...

    async def is_current(self, address: Address) -> bool:
        """Whether the server is still at `address`."""
        ...


@dataclass(slots=True)
class ServerTarget:
    """A server at a fixed address."""

    options: Mapping[str, Any] = field(repr=False)
    tls: ssl.SSLContext | None = None

    async def address(self) -> Address:
        """The host and port, or the path, of the options."""
        path: str | None = self.options.get("path")
        return path or (self.options["host"], int(self.options["port"]))

    async def is_current(self, address: Address) -> bool:
        """Always: the address is fixed."""
        return True


@dataclass(slots=True)
class MasterTarget:
    """The current master behind Sentinels."""

    pool: MasterPool
    options: Mapping[str, Any] = field(repr=False)
    tls: ssl.SSLContext | None = None

    async def address(self) -> Address:
        """The master that a majority of the Sentinels names."""
        host, port = await self.pool.get_master_address()  # type: ignore[no-untyped-call]
        return host, port

    async def is_current(self, address: Address) -> bool:
        """Whether the newest known master is at `address`; asks the Sentinels once a second."""
        await self.pool.refresh_master()
        return address == self.pool.master_address


def target_of(options: Mapping[str, Any], connection_class: type, pool: Any = None) -> Target:
    """The target of connections with these options, and of `pool` if that is of Sentinels."""
    tls = tls_of(options) if issubclass(connection_class, SSLConnection) else None
    if isinstance(pool, MasterPool):
        return MasterTarget(pool, options, tls)
    return ServerTarget(options, tls)


def tls_of(options: Mapping[str, Any]) -> ssl.SSLContext:
    """The TLS context of the ssl_* options, with redis-py's defaults."""
    context = ssl.create_default_context()
    mode = options.get("ssl_cert_reqs", "required") or "none"
    mode = _CERT_REQS[mode] if isinstance(mode, str) else ssl.VerifyMode(mode)
    context.check_hostname = mode != ssl.CERT_NONE and options.get("ssl_check_hostname", True)
    context.verify_mode = mode
    for flag in options.get("ssl_include_verify_flags") or ():
        context.verify_flags |= flag
    for flag in options.get("ssl_exclude_verify_flags") or ():
        context.verify_flags &= ~flag
    certificate: str | None = options.get("ssl_certfile")
    if certificate:
        context.load_cert_chain(
            certificate, options.get("ssl_keyfile"), options.get("ssl_password")
        )
    authorities = {
        "cafile": options.get("ssl_ca_certs"),
        "capath": options.get("ssl_ca_path"),
        "cadata": options.get("ssl_ca_data"),
    }
    if any(authorities.values()):
        context.load_verify_locations(**authorities)
    if options.get("ssl_min_version") is not None:
        context.minimum_version = options["ssl_min_version"]
    if options.get("ssl_ciphers"):
        context.set_ciphers(options["ssl_ciphers"])
    return context


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
