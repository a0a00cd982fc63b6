"""Listening of a server: keep-alive, message limits, TLS, and errors that name the port."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

import grpc
import grpc.aio
from seamflow.channel import MAX_MESSAGE_BYTES
from seamflow.network.keepalive import KEEPALIVE, Keepalive

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError, DependencyUnavailable

_MAX_PENDING = 1 << 20
"""Limit on calls received but not yet handled; services apply their own, lower limits and report
them as errors."""


def server_options(
    max_request_bytes: int = MAX_MESSAGE_BYTES, keepalive: Keepalive = KEEPALIVE
) -> list[tuple[str, int]]:
    """Channel arguments of every server; `keepalive` says when a silent client counts as lost."""
    return [
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *keepalive.options(),
        # Below the clients' ping interval, or their pings would count as abuse.
        ("grpc.http2.min_ping_interval_without_data_ms", round(500 * keepalive.ping_seconds)),
        # By default gRPC cancels at random beyond 1,000, which clients take for a failure.
        ("grpc.server.max_pending_requests", _MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
        # A port in use must be an error, not a share of its connections.
        ("grpc.so_reuseport", 0),
    ]


def bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Listen on the config's host and port, with TLS if it has a certificate; returns the port.

    Raises:
        DependencyUnavailable: the port is in use or may not be bound.
        ConfigError: the certificate or its key cannot be used.
    """
    address = f"[{config.host}]" if ":" in config.host else config.host
    target = f"{address}:{config.port}"
    credentials = _credentials(config)
    try:
        if credentials is None:
            return server.add_insecure_port(target)
        return server.add_secure_port(target, credentials)
    except RuntimeError as error:
        bind_error = _probe(config)
        if bind_error is None and credentials is not None:
            raise ConfigError(
                f"tls_cert_file {config.tls_cert_file} and tls_key_file {config.tls_key_file} "
                "are not a PEM certificate and its private key"
            ) from error
        raise port_error(config.host, config.port, "port", bind_error) from error


def port_error(host: str, port: int, field: str, error: OSError | None) -> DependencyUnavailable:
    """The error of a port that cannot be bound, naming the flag that picks another."""
    why = "cannot be bound"
    if error is not None:
        in_use = error.errno == errno.EADDRINUSE
        why = "is already in use" if in_use else f"cannot be bound: {error.strerror}"
    flag = f"--{field.replace('_', '-')}"
    return DependencyUnavailable(field, f"port {port} on {host} {why}; choose another with {flag}")


def _probe(config: ServerConfig) -> OSError | None:
    # gRPC reports only that binding failed; the operating system reports the cause.
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS that reads its files at each handshake, so that rotated certificates need no restart."""
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    mutual = config.tls_ca_file is not None
    cert_file, key_file, ca_file = config.tls_cert_file, config.tls_key_file, config.tls_ca_file

    def current() -> grpc.ServerCertificateConfiguration:
        pair = (key_file.read_bytes(), cert_file.read_bytes())
        authority = ca_file.read_bytes() if ca_file is not None else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    last = current()

    def renewed() -> grpc.ServerCertificateConfiguration:
        nonlocal last
        # A file may be missing while it is replaced: keep the current ones.
        with suppress(OSError):
            last = current()
        return last

    return grpc.dynamic_ssl_server_credentials(last, renewed, require_client_authentication=mutual)
