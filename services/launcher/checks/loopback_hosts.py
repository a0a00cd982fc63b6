"""The processes of a run reach each other at known addresses, so each of them listens there."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError

_ALL = "0.0.0.0"  # noqa: S104 -- compared, not bound


def check_hosts(settings: Mapping[str, ServerConfig], addresses: Mapping[str, str]) -> None:
    """Refuse a process that would listen elsewhere alone, such as on ::1: nobody would reach it.

    Args:
        settings: of each process.
        addresses: at which the others reach it: 127.0.0.1, but for a run on several hosts.

    Raises:
        ConfigError: names the process, its host and the cure.
    """
    for name, each in settings.items():
        own = addresses[name]
        if each.host not in (own, _ALL) and own not in _addresses(each.host):
            raise ConfigError(
                f"host of {name} is {each.host!r}, and the processes of a run reach each other at "
                f"{own}: give {own}, or {_ALL} for callers of other machines too"
            )


def _addresses(host: str) -> set[str]:
    """What a name stands for; an address stands for itself."""
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}
