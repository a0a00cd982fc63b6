"""Redis URLs: one server, a master behind Sentinels, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from redis.asyncio.connection import Connection, parse_url

from services.chassis.errors import ConfigError

_FORMS = (
    "redis://[user:password@]host:6379/0, unix:///path/of/socket, redis+sentinel://[user:password@]host1:26379,"
    "host2:26379/service/0 or redis+cluster://[user:password@]host1:6379,host2:6379/ "
    "(rediss... for TLS)"
)
_DEFAULT_PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """The address and options of a Redis URL."""

    topology: str
    """"" for one server, "sentinel" or "cluster"."""
    hosts: tuple[tuple[str, int], ...]
    """The server, the Sentinels, or some nodes of the cluster; none for a Unix socket."""
    service: str
    """Name by which the Sentinels know the master; "" elsewhere."""
    options: dict[str, Any] = field(repr=False)
    """How to connect to a server: keyword arguments of redis-py's connections, with secrets."""


def parse_redis_url(url: str) -> RedisAddress:
    """The address in `url`, with options of redis-py's connections as in "?ssl_ca_certs=ca.pem".

    Raises:
        ConfigError: the URL has none of the forms; the message holds no password.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return RedisAddress(topology="", hosts=(), service="", options=_checked(url))
        scheme, topology = _scheme(parts.scheme)
        user, _, hosts = parts.netloc.rpartition("@")
        address = RedisAddress(
            topology=topology,
            hosts=tuple(_host(text, _DEFAULT_PORTS[topology]) for text in hosts.split(",")),
            service=_service(parts) if topology == "sentinel" else "",
            options=_options(scheme, user, _database(parts, topology), parts.query),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url: {error}: write {_FORMS}") from error
    if topology == "" and len(address.hosts) > 1:
        raise ConfigError("redis_url: several hosts need redis+sentinel:// or redis+cluster://")
    return address


def _scheme(text: str) -> tuple[str, str]:
    scheme, _, topology = text.partition("+")
    if scheme not in ("redis", "rediss") or topology not in _DEFAULT_PORTS:
        raise ValueError(f"its scheme is {text!r}")
    return scheme, topology


def _host(text: str, default_port: int) -> tuple[str, int]:
    host = urlsplit(f"//{text}")
    if not host.hostname:
        raise ValueError("a host is missing")
    return host.hostname, default_port if host.port is None else host.port


def _service(parts: SplitResult) -> str:
    service = unquote(parts.path.strip("/").partition("/")[0])
    if not service:
        raise ValueError("the name of the Sentinels' service is missing")
    return service


def _database(parts: SplitResult, topology: str) -> int:
    path = parts.path.strip("/")
    text = path.partition("/")[2] if topology == "sentinel" else path
    if not text:
        return 0
    if not text.isdecimal():
        raise ValueError(f"the database is {text!r}")
    if topology == "cluster" and text != "0":
        raise ValueError("a cluster has database 0 only")
    return int(text)


def _options(scheme: str, user: str, database: int, query: str) -> dict[str, Any]:
    netloc = f"{user}@unused" if user else "unused"
    options = _checked(urlunsplit((scheme, netloc, f"/{database}", query, "")))
    del options["host"]
    return options


def _checked(url: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_url(url))
    # Made only to be checked: an option that does not exist must not fail the first command.
    options.get("connection_class", Connection)(
        **{name: value for name, value in options.items() if name != "connection_class"}
    )
    return options
