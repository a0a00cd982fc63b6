"""Addresses as "host:port", of IPv4, IPv6 in brackets, or a name."""

from __future__ import annotations

import socket

_SCHEMES = ("dns", "ipv4", "ipv6")
_FORM = 'write it as "host:port", with brackets for IPv6: "[::1]:50052"'


def host_and_port(address: str) -> tuple[str, int]:
    """Host, without brackets, and port.

    >>> host_and_port("[::1]:50052")
    ('::1', 50052)

    Raises:
        ValueError: names the address and its form.
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or (":" in host and not is_bracketed):
        raise ValueError(f"address {address!r}: {_FORM}")
    return host.strip("[]"), int(port)


def check_target(target: str) -> None:
    """Refuse what gRPC would take for another address, or for one of port 443.

    Raises:
        ValueError: an address of IPv6 has no brackets, or no port after them.
    """
    scheme, _, rest = target.partition(":")
    addresses = rest.lstrip("/") if scheme in _SCHEMES else target
    for address in addresses.split(","):
        if address.count(":") > 1 or address.startswith("["):
            host_and_port(address)


def listens(address: str, seconds: float = 0.2) -> bool:
    """Whether something accepts connections at "host:port"."""
    try:
        socket.create_connection(host_and_port(address), timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True
