"""What proves a caller's identity to the services."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

__all__ = ["Credentials"]

_FILES = ("token", "ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Bearer token and certificates; without any, connections are plaintext and anonymous."""

    token: str | None = field(default=None, repr=False)
    """Bearer token, sent with every call."""
    ca_file: Path | None = None
    """PEM file of the services' certificate authority; None: plaintext."""
    cert_file: Path | None = None
    """PEM file of the caller's certificate, where the services require one."""
    key_file: Path | None = None
    """PEM file of the caller's private key."""

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read `token`, `ca.pem`, `cert.pem` and `key.pem`, as far as the folder has them.

        Raises:
            FileNotFoundError: the folder has none of them.
        """
        files = {name: Path(folder) / name for name in _FILES}
        found = {name: file if file.is_file() else None for name, file in files.items()}
        if not any(found.values()):
            raise FileNotFoundError(f"{folder} has none of {', '.join(_FILES)}")
        token = found["token"].read_text().strip() if found["token"] else None
        pem = {"ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem"}
        return cls(token=token, **{field: found[name] for field, name in pem.items()})

    def tls(self) -> grpc.ChannelCredentials | None:
        """The certificates for gRPC; None: plaintext. Raises `OSError` for an unreadable file."""
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca_file.read_bytes(),
            private_key=self.key_file.read_bytes() if self.key_file else None,
            certificate_chain=self.cert_file.read_bytes() if self.cert_file else None,
        )
