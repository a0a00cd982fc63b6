"""Opens gRPC channels, for agents and for all processes of seamflow.

Keep-alive detects a frozen server, message limits equal the servers', gRPC retries transient
failures, every call has a deadline, and an address that was never reached is an error.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc
import grpc.aio

from seamflow.credentials import Credentials
from seamflow.errors import UnavailableError
from seamflow.network.host_port import check_target
from seamflow.network.keepalive import KEEPALIVE, Keepalive
from seamflow.release import HEADER, RELEASE
from seamflow.retry import current_attempt
from seamflow.trace_context import HEADER as TRACEPARENT
from seamflow.trace_context import current as current_traceparent

__all__ = ["CONNECT_TIMEOUT", "MAX_MESSAGE_BYTES", "connect", "is_loopback"]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either side accepts; servers use the same figure."""

CONNECT_TIMEOUT = 10.0
"""Seconds until a service that was never reached counts as unreachable."""

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
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that a connection may take to come about: several round trips of a slow link.
    ("grpc.min_reconnect_backoff_ms", 4_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Channels of a process to one address must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
]

_SCHEMES = ("dns", "ipv4", "ipv6")
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads, the first one that is set."""

Metadata = tuple[tuple[str, str | bytes], ...]


def connect(
    target: str,
    credentials: Credentials | None = None,
    *,
    connect_timeout: float | None = CONNECT_TIMEOUT,
    keepalive: Keepalive = KEEPALIVE,
) -> grpc.aio.Channel:
    """Open a channel to `target` (host:port, or several: "ipv4:127.0.0.1:1,127.0.0.1:2").

    Returns immediately; the first call connects. If no connection comes about within
    `connect_timeout` seconds of it (None: wait for ever), later calls raise `UnavailableError`
    until one does; once connected, an interruption of any length may be retried. `keepalive` says
    when a silent server counts as lost.

    Raises:
        ValueError: an address of IPv6 has no brackets, or no port.
    """
    check_target(target)
    return _Channel(target, credentials or Credentials(), connect_timeout, keepalive)


class _Channel(grpc.aio.Channel):
    """Adds release, token and trace context to each call, and a deadline where the caller set none.

    A token or certificate whose file has changed counts from the next call on. Interceptors of
    grpc.aio would make a unary call 1.5 times as slow.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials,
        connect_timeout: float | None,
        keepalive: Keepalive,
    ) -> None:
        self._target = target
        self._credentials, self._keepalive = credentials, keepalive
        self._certificates = credentials.watch()
        self._bearer = credentials.bearer()
        self._metadata = _metadata(self._bearer())
        self._channel = _opened(target, credentials, keepalive)
        self._replaced: deque[tuple[float, grpc.aio.Channel]] = deque()
        self._closing: set[asyncio.Task[None]] = set()
        self._contact = None if connect_timeout is None else _Contact(self, connect_timeout)

    def unary_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults("unary_unary", method, args, kwargs, UNARY_TIMEOUT)

    def unary_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults("unary_stream", method, args, kwargs, STREAM_TIMEOUT)

    def stream_unary(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults("stream_unary", method, args, kwargs, STREAM_TIMEOUT)

    def stream_stream(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return self._with_defaults("stream_stream", method, args, kwargs, STREAM_TIMEOUT)

    def _with_defaults(
        self, kind: str, method: Any, args: Any, kwargs: Any, default: float
    ) -> Callable[..., Any]:
        name = f"{method} of {self._target}"
        channel = self._channel
        call = getattr(channel, kind)(method, *args, **kwargs)

        def called(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] = (),
            **options: Any,
        ) -> Any:
            nonlocal channel, call
            if (attempt := current_attempt.get()) is not None:
                attempt.call = name
            if self._contact is not None and not self._contact.made:
                self._contact.check(self._target)
            if channel is not self._current():
                channel = self._channel
                call = getattr(channel, kind)(method, *args, **kwargs)
            timeout = default if timeout is None else timeout
            all_metadata = self._with_ours(metadata or ())
            return call(request, timeout=timeout, metadata=all_metadata, **options)

        return called

    def _with_ours(self, given: Sequence[tuple[str, str | bytes]]) -> Metadata:
        keys = [key for key, _ in given]
        # The credential of a rollout takes the place of the channel's token.
        ours = () if "authorization" in keys else self._shown()
        parent = current_traceparent.get()
        if parent is None or TRACEPARENT in keys:
            return (*given, *ours)
        return (*given, *ours, (TRACEPARENT, parent))

    def _shown(self) -> tuple[tuple[str, str], ...]:
        """Release and current token."""
        token = self._bearer()
        if token is not None and self._metadata[-1][1] != f"Bearer {token}":
            self._metadata = _metadata(token)
        return self._metadata

    def _current(self) -> grpc.aio.Channel:
        """The channel for new calls: with renewed certificates a new one.

        Calls under way end on the channel they began on, which is closed a day later.
        """
        if self._certificates.changed():
            with suppress(OSError):  # a file is being replaced: its next change is seen, too
                renewed = _opened(self._target, self._credentials, self._keepalive)
                self._replaced.append((time.monotonic() + STREAM_TIMEOUT, self._channel))
                self._channel = renewed
            if self._replaced and self._replaced[0][0] < time.monotonic():
                closing = asyncio.create_task(self._replaced.popleft()[1].close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        if self._contact is not None:
            await self._contact.close()
        for channel in (self._channel, *(old for _, old in self._replaced)):
            await channel.close(grace)

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


def _opened(target: str, credentials: Credentials, keepalive: Keepalive) -> grpc.aio.Channel:
    tls = credentials.tls()
    options = [*_OPTIONS, *keepalive.options()]
    if _is_local(target):
        # What listens on this machine is never behind a proxy, whatever the environment says.
        options.append(("grpc.enable_http_proxy", 0))
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls, options=[*options, *_checked_name(target)])


def _checked_name(target: str) -> list[tuple[str, Any]]:
    """Of several addresses the first one: the certificate of each replica names it.

    Without it gRPC looks for the whole list in the certificate, which no certificate names.
    """
    scheme, _, rest = target.partition(":")
    first, comma, _ = rest.lstrip("/").partition(",")
    return [("grpc.default_authority", first)] if comma and scheme in _SCHEMES[1:] else []


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine by any environment."""
    name = host.strip("[]").rstrip(".").lower()
    with suppress(ValueError):
        address = ipaddress.ip_address(name)
        return address.is_loopback or address.is_unspecified
    return name == "localhost" or name.endswith(".localhost")


def _is_local(target: str) -> bool:
    """Whether one of the addresses of a target is on this machine."""
    scheme, _, rest = target.partition(":")
    addresses = rest.lstrip("/") if scheme in _SCHEMES else target
    hosts = (address.rpartition(":")[0] or address for address in addresses.split(","))
    return any(is_loopback(host) for host in hosts)


def _proxy(target: str) -> str:
    """What to say of the proxy that gRPC uses for `target`; empty if there is none."""
    name = next((name for name in _PROXY_VARIABLES if os.environ.get(name)), None)
    if name is None or _is_local(target):
        return ""
    return f"; {name} is set, so that calls go through that proxy unless no_proxy names the host"


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    bearer = (("authorization", f"Bearer {token}"),) if token else ()
    return ((HEADER, RELEASE), *bearer)


class _Contact:
    """Whether a channel has ever been connected; watched from its first call on."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float) -> None:
        self.made = False
        self._channel = channel
        self._timeout = timeout
        self._first_call = 0.0
        self._watch: asyncio.Task[None] | None = None

    def check(self, target: str) -> None:
        """Raise `UnavailableError` if the channel has been trying to connect for too long."""
        if self._watch is None:
            self._first_call = time.monotonic()
            self._watch = asyncio.create_task(self._watched())
        elif self._channel.get_state() is grpc.ChannelConnectivity.READY:
            self.made = True
        elif time.monotonic() - self._first_call > self._timeout:
            raise UnavailableError(
                f"no connection to {target} within {self._timeout:g} s: check the address, and "
                "that the service runs there and can be reached from here; for a service that "
                f"starts later, connect with a longer connect_timeout{_proxy(target)}"
            )

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

    async def _watched(self) -> None:
        await self._channel.channel_ready()
        self.made = True
