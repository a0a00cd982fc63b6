"""Certificates for tests: an authority, and what it signs, with the name of an identity or none."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files."""

    ca_file: Path
    """Of the authority that the holder trusts."""
    cert_file: Path
    """The certificate."""
    key_file: Path
    """Its private key."""

    @property
    def settings(self) -> dict[str, Path]:
        """As the settings of a process."""
        files = {"ca": self.ca_file, "cert": self.cert_file, "key": self.key_file}
        return {f"tls_{kind}_file": file for kind, file in files.items()}


@dataclass
class Authority:
    """Signs certificates for 127.0.0.1; each test its own."""

    folder: Path
    name: str = "authority"
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        """Write the authority's own certificate."""
        ca = x509.BasicConstraints(ca=True, path_length=0)
        signed = self._signed(self.name, self.key.public_key(), ca, [], _DAY)
        self.ca_file.write_bytes(signed)

    @property
    def ca_file(self) -> Path:
        """Where its certificate is."""
        return self.folder / f"{self.name}.pem"

    def issue(
        self,
        name: str,
        uri: str | None = None,
        *,
        hosts: Sequence[str] = (),
        trusts: Path | None = None,
        valid: bool = True,
    ) -> Certificate:
        """A certificate with the URI, also for the hosts; `valid` False: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names += [x509.DNSName(host) for host in hosts]
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        leaf = x509.BasicConstraints(ca=False, path_length=None)
        ends = _DAY if valid else -timedelta(minutes=1)
        file = self.folder / f"{self.name}-{name}"
        cert_file, key_file = file.with_suffix(".cert.pem"), file.with_suffix(".key.pem")
        cert_file.write_bytes(self._signed(name, key.public_key(), leaf, names, ends))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Certificate(trusts or self.ca_file, cert_file, key_file)

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        constraints: x509.BasicConstraints,
        names: list[x509.GeneralName],
        ends: timedelta,
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + ends)
            .add_extension(constraints, critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
