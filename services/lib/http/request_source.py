"""Where a request comes from: not from a web page, and meant for this gateway.

A page in a browser on this machine can post to any address. What it sends says so (`Origin`); a
page whose own name was made to resolve to this machine (DNS rebinding) sends that name as `Host`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from services.lib.http.http_config import HttpConfig


class ForeignRequestError(Exception):
    """A request to another host, or by a web page of another site: status 403."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """For programs."""


def check_source(headers: Mapping[str, str], scheme: str, config: HttpConfig, table: str) -> None:
    """Check the headers `Host` and `Origin` of a request that came by `scheme`.

    Args:
        table: of the settings of this server, for people.

    Raises:
        ForeignRequestError: it is meant for another host, or is sent by a web page of another site.
    """
    host = headers.get("Host", "")
    if host and _checks_hosts(config) and not _is_allowed(_name(f"//{host}"), config):
        message = (
            f"Host {host[:100]!r} is none of this server's names: request it by its address, or "
            f"add the name to allowed_hosts of [{table}], or set public_url"
        )
        raise ForeignRequestError(message, "host_not_allowed")
    origin = headers.get("Origin")
    if origin is not None and not _is_own(origin, f"{scheme}://{host}", config):
        message = (
            f"Origin {origin[:100]!r} is another site: send no Origin, or add its host to "
            f"allowed_hosts of [{table}]"
        )
        raise ForeignRequestError(message, "origin_not_allowed")


def _checks_hosts(config: HttpConfig) -> bool:
    """Beyond loopback whoever has no token gets nothing, and names are the operator's matter."""
    return bool(config.allowed_hosts) or is_local(config.host) or not config.knows_callers


def _is_allowed(name: str, config: HttpConfig) -> bool:
    public = _name(config.public_url)
    known = (*config.allowed_hosts, *([public] if public else ()), socket.gethostname())
    # An address is not a name that somebody else can point to this machine.
    return is_local(name) or _is_address(name) or name in map(str.lower, known)


def _is_own(origin: str, own: str, config: HttpConfig) -> bool:
    public = urlsplit(config.public_url)
    ours = (own.lower(), f"{public.scheme}://{public.netloc}".lower())
    return origin.lower() in ours or _name(origin) in map(str.lower, config.allowed_hosts)


def is_local(name: str) -> bool:
    """Whether only this machine reaches a host, by name or address."""
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str:
    """The host of a URL in small letters; empty: it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
