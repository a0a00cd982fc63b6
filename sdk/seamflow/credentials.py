"""What proves a caller's identity to the services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from seamflow.secret_file import FilesWatch, SecretFile

__all__ = ["Credentials"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Bearer token and certificates; without any, connections are plaintext and anonymous."""

    token: str | None = field(default=None, repr=False)
    """Bearer token, sent with every call."""
    token_file: Path | None = None
    """File of the bearer token, read again when it changes; takes the place of `token`."""
    ca_file: Path | None = None
    """PEM file of the services' certificate authority; None: plaintext."""
    cert_file: Path | None = None
    """PEM file of the caller's certificate, where the services require one."""
    key_file: Path | None = None
    """PEM file of the caller's private key."""

    def bearer(self) -> Callable[[], str | None]:
        """What to send as token now; follows `token_file`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is empty.
        """
        if self.token_file is not None:
            return SecretFile(self.token_file).text
        return lambda: self.token

    def watch(self) -> FilesWatch:
        """Whether the certificates have been renewed since."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return FilesWatch(*(files if self.ca_file is not None else ()))

    def tls(self) -> grpc.ChannelCredentials | None:
        """The certificates for gRPC; None: plaintext. Raises `OSError` for an unreadable file."""
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes(),
            private_key=self.key_file.read_bytes() if self.key_file else None,
            certificate_chain=self.cert_file.read_bytes() if self.cert_file else None,
        )
