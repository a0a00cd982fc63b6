"""Addresses of services, with channels that stay open: they are used every second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio
from seamflow.channel import connect
from seamflow.inspect.endpoints import Endpoints, UsageError

_CONNECT_SECONDS = 1.0
"""A page that asks why a run waits must not wait long for a service that is away."""


class _KeptChannel:
    """A channel that stays open at the end of a block."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> grpc.aio.Channel:
        return self._channel

    async def __aexit__(self, *_: object) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class KeptEndpoints(Endpoints):
    """Endpoints whose channels are opened once."""

    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict, repr=False)
    """Open channels by address."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to an address, in a block that leaves it open."""
        if address not in self.channels:
            self.channels[address] = self._opened(address)
        return cast("grpc.aio.Channel", _KeptChannel(self.channels[address]))

    def _opened(self, address: str) -> grpc.aio.Channel:
        try:
            return connect(address, self.credentials, connect_timeout=_CONNECT_SECONDS)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def to(self, service: str) -> grpc.aio.Channel:
        """The channel to a service of `endpoints.SERVICES` whose address is known."""
        self.channel(self.services[service])
        return self.channels[self.services[service]]

    async def close(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            await channel.close()


def kept(endpoints: Endpoints) -> KeptEndpoints:
    """The same with channels that stay open."""
    values: dict[str, Any] = {name: getattr(endpoints, name) for name in Endpoints.__slots__}
    return KeptEndpoints(**values)
