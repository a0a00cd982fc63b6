"""Opens gRPC channels, for agents and for all processes of seamflow.

Keep-alive detects a frozen server, message limits equal the servers', gRPC retries transient
failures, and every call has a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

__all__ = ["MAX_MESSAGE_BYTES", "connect"]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either side accepts; servers use the same figure."""

UNARY_TIMEOUT = 75.0
"""Seconds; a little more than the longest long-poll."""

STREAM_TIMEOUT = 24 * 3600.0
"""Seconds; an upper bound for streams, which normally end earlier."""

_SERVICE_CONFIG = {
    # Several addresses are replicas of one service.
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            # Every mutating rpc of seamflow carries an idempotency key, so all may be repeated.
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without this a frozen server is detected only after a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Channels of a process to one address must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
]


def connect(
    target: str,
    *,
    token: str | None = None,
    ca_file: Path | None = None,
    cert_file: Path | None = None,
    key_file: Path | None = None,
) -> grpc.aio.Channel:
    """Open a channel to `target` (host:port, or several: "ipv4:127.0.0.1:1,127.0.0.1:2").

    Plaintext without `ca_file`, TLS with it, mutual TLS with `cert_file` and `key_file` too.
    `token` is sent as a bearer token with every call. Returns immediately; the first call connects.
    """
    if ca_file is None:
        return _Channel(grpc.aio.insecure_channel(target, options=_OPTIONS), token)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca_file.read_bytes(),
        private_key=key_file.read_bytes() if key_file else None,
        certificate_chain=cert_file.read_bytes() if cert_file else None,
    )
    return _Channel(grpc.aio.secure_channel(target, credentials, options=_OPTIONS), token)


class _Channel(grpc.aio.Channel):
    """Adds the bearer token to each call, and a deadline where the caller set none.

    Interceptors of grpc.aio would make a unary call 1.5 times as slow.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults(self._channel.unary_unary(*args, **kwargs), UNARY_TIMEOUT)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults(self._channel.unary_stream(*args, **kwargs), STREAM_TIMEOUT)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults(self._channel.stream_unary(*args, **kwargs), STREAM_TIMEOUT)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults(self._channel.stream_stream(*args, **kwargs), STREAM_TIMEOUT)

    def _with_defaults(self, call: Callable[..., Any], default: float) -> Callable[..., Any]:
        def called(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] = (),
            **options: Any,
        ) -> Any:
            timeout = default if timeout is None else timeout
            all_metadata = (*(metadata or ()), *self._metadata)
            return call(request, timeout=timeout, metadata=all_metadata, **options)

        return called

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
