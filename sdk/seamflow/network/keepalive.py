"""Keep-alive of connections: HTTP/2 pings, and how long their answer may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """When a silent peer counts as lost; both sides of a connection have one."""

    ping_seconds: float = 10.0
    """Between pings."""
    pong_seconds: float = 5.0
    """Longest wait for the answer to a ping."""
    silence_seconds: float = 5.0
    """After a ping, longest time in which nothing arrives at all; and in which the peer's kernel
    acknowledges nothing."""

    def options(self) -> list[tuple[str, int]]:
        """Channel arguments of either side.

        `http2.ping_timeout_ms` detects a frozen peer: `keepalive_timeout_ms` alone leaves one
        undetected for a minute, because its kernel still acknowledges the packets.
        """
        return [
            ("grpc.keepalive_time_ms", round(1000 * self.ping_seconds)),
            ("grpc.keepalive_timeout_ms", round(1000 * self.silence_seconds)),
            ("grpc.http2.ping_timeout_ms", round(1000 * self.pong_seconds)),
            ("grpc.keepalive_permit_without_calls", 1),
        ]


KEEPALIVE = Keepalive()
"""Of most connections."""

WEIGHTS_KEEPALIVE = Keepalive(pong_seconds=30.0, silence_seconds=10.0)
"""Of connections that carry weights: a ping waits in the same queues as they, for seconds where a
link has large buffers. Silence ends them sooner: after a cut TCP alone would wait as long again."""
