"""What proves a caller's identity to the services, from files that may be rotated."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

__all__ = ["Credentials", "FilesWatch", "SecretFile"]

_LOOK_SECONDS = 1.0
_FILES = ("token", "ca.pem", "cert.pem", "key.pem")


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
        return cls(
            token_file=found["token"],
            ca_file=found["ca.pem"],
            cert_file=found["cert.pem"],
            key_file=found["key.pem"],
        )

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


class FilesWatch:
    """Whether files have changed since the last question; looks at most once a second."""

    def __init__(self, *files: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch `files`; those that are None are left out."""
        self._files = [file for file in files if file is not None]
        self._clock = clock
        self._seen = self._look()
        self._next = clock() + _LOOK_SECONDS

    def changed(self, *, now: bool = False) -> bool:
        """Whether a file is another than at the last question; `now`: look in any case."""
        if not self._files or not (now or self._clock() >= self._next):
            return False
        self._next = self._clock() + _LOOK_SECONDS
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_state(file) for file in self._files]


class SecretFile:
    """The text of a file, without white space around it.

    While the file is missing or empty, as during its replacement, the last text counts.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read `path`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty, or no text.
        """
        self.path = path
        self._watch = FilesWatch(path, clock=clock)
        self._text = _read(path)

    def text(self, *, now: bool = False) -> str:
        """The current text; a change is seen within a second, with `now` at once."""
        if self._watch.changed(now=now):
            with suppress(OSError, ValueError):
                self._text = _read(self.path)
        return self._text

    def __repr__(self) -> str:
        return f"SecretFile({str(self.path)!r})"


def _read(path: Path) -> str:
    text = path.read_text(encoding="utf-8-sig").strip()
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
