"""The processes of a run reach each other at 127.0.0.1, so each of them listens there."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError

__all__ = ["check_hosts"]

_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104 -- compared, not bound


def check_hosts(settings: Mapping[str, ServerConfig]) -> None:
    """Refuse a process that would listen elsewhere alone, such as on ::1: nobody would reach it.

    Raises:
        ConfigError: names the process, its host and the cure.
    """
    for name, each in settings.items():
        if each.host not in (_LOOPBACK, _ALL) and _LOOPBACK not in _addresses(each.host):
            raise ConfigError(
                f"host of {name} is {each.host!r}, and the processes of a run reach each other at "
                f"{_LOOPBACK}: give {_LOOPBACK}, or {_ALL} for callers of other machines too"
            )


def _addresses(host: str) -> set[str]:
    """What a name stands for; an address stands for itself."""
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}
