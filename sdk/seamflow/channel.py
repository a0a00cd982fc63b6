"""One place that opens channels, for agents and for every process of seamflow.

Keep-alive notices a frozen peer, message limits agree with the servers', transient failures are
retried by gRPC itself, and no call goes out without a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

__all__ = ["MAX_MESSAGE_BYTES", "connect"]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either side accepts; servers use the same figure."""

UNARY_TIMEOUT = 75.0
"""Seconds; a little more than the longest long-poll."""

STREAM_TIMEOUT = 24 * 3600.0
"""Seconds; streams end by their own rules, this only bounds a forgotten one."""

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
    # Without this one a peer that is frozen, not gone, goes unnoticed for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Channels of one process to one address must not share a connection that one of them broke.
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
    `token` is sent as a bearer token with every call. Returns at once; the first call connects.
    """
    interceptors = [_UnaryDefaults(token), _StreamDefaults(token)]
    if ca_file is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=ca_file.read_bytes(),
        private_key=key_file.read_bytes() if key_file else None,
        certificate_chain=cert_file.read_bytes() if cert_file else None,
    )
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS, interceptors=interceptors)


class _Defaults:
    """Adds the bearer token, and a deadline where the caller set none."""

    def __init__(self, token: str | None, timeout: float) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._timeout = timeout

    def apply(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(tuple(details.metadata or ()) + self._metadata))
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=self._timeout if details.timeout is None else details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class _UnaryDefaults(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str | None) -> None:
        self._defaults = _Defaults(token, UNARY_TIMEOUT)

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._defaults.apply(details), request)


class _StreamDefaults(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str | None) -> None:
        self._defaults = _Defaults(token, STREAM_TIMEOUT)

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._defaults.apply(details), request)
