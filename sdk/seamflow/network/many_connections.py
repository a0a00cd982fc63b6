"""One channel over several connections: a single one carries a TCP window per round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio


class ManyConnections(grpc.aio.Channel):
    """Each stream goes over the connection with the fewest, unary calls over the first one."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        """`channels`: at least one, to the same target, none of which shares a connection."""
        self._channels = channels
        self._num_streams = [0] * len(channels)

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._channels[0].unary_unary(method, *args, **kwargs)

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._spread([each.unary_stream(method, *args, **kwargs) for each in self._channels])

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._spread([each.stream_unary(method, *args, **kwargs) for each in self._channels])

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._spread(
            [each.stream_stream(method, *args, **kwargs) for each in self._channels]
        )

    def _spread(self, methods: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            number = self._num_streams.index(min(self._num_streams))
            call = methods[number](*args, **kwargs)
            self._num_streams[number] += 1
            call.add_done_callback(lambda _: self._ended(number))
            return call

        return called

    def _ended(self, number: int) -> None:
        self._num_streams[number] -= 1

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channels[0].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channels[0].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        for channel in self._channels:
            await channel.channel_ready()

    async def __aenter__(self) -> ManyConnections:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
