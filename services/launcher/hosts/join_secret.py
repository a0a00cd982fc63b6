"""What a host needs to join a run: a token, and the authority of the launcher's certificate.

One line of text, so that it fits a file, a variable, or a message to a colleague.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.errors import ConfigError
from services.launcher.hosts.run_certificates import hosts_folder, kept_secret
from services.launcher.layout import Layout


@dataclass(frozen=True, slots=True)
class JoinSecret:
    """The parts of the secret."""

    token: str = field(repr=False)
    """Bearer token that the launcher asks for."""
    authority: str
    """PEM certificate of the authority that signed the launcher's certificate."""

    def text(self) -> str:
        """TOKEN.AUTHORITY, the authority as base64 of DER."""
        der = ssl.PEM_cert_to_DER_cert(self.authority)
        return f"{self.token}.{base64.urlsafe_b64encode(der).decode()}"

    @classmethod
    def read(cls, text: str) -> JoinSecret:
        """Read what `text` has written.

        Raises:
            ConfigError: it has another form; the secret is not shown.
        """
        token, _, authority = text.strip().partition(".")
        try:
            pem = ssl.DER_cert_to_PEM_cert(base64.b64decode(authority, b"-_", validate=True))
        except binascii.Error:
            pem = ""
        if not token or not authority or not pem:
            raise ConfigError(
                "the secret is not one that the launcher wrote: give the whole line of the file "
                "hosts/join_secret in the run's folder"
            )
        return cls(token, pem)


def secret_file(layout: Layout) -> Path:
    return hosts_folder(layout) / "join_secret"


def made_secret(layout: Layout) -> JoinSecret:
    """The secret of a run, written to its file; the same at each start of the run."""
    token = kept_secret(hosts_folder(layout) / "join_token")
    authority = (hosts_folder(layout) / "authority" / "ca.pem").read_text(encoding="ascii")
    made, file = JoinSecret(token, authority), secret_file(layout)
    file.touch(mode=0o600)
    file.write_text(made.text() + "\n", encoding="ascii")
    return made
