"""A certificate authority, and the certificates that name who calls, for a deployment or a run."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 3650
_SERVICE_DAYS = 825


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The certificate authority of one deployment."""

    certificate: x509.Certificate
    """Self-signed certificate."""
    key: ec.EllipticCurvePrivateKey
    """Signs the services' certificates."""

    @property
    def pem(self) -> bytes:
        """Its certificate, for those who trust it."""
        return _public_pem(self.certificate)


def authority_in(folder: Path) -> Authority:
    """The authority whose key and certificate are in `folder`, made if there is none."""
    if not (folder / "ca.key").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "ca.key", _private_pem(ec.generate_private_key(ec.SECP256R1())))
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    if not (folder / "ca.pem").exists():  # new, or of release 0.2.0
        write_file(folder / "ca.pem", _public_pem(_self_signed(key)))
    certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    return Authority(certificate=certificate, key=key)


def write_certificate(
    folder: Path, authority: Authority, identity: str, hosts: Sequence[str]
) -> None:
    """Write cert.pem and key.pem of a service, reached by `hosts`: names, or addresses.

    One certificate for both sides of a connection: every service is also a client.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    builder = _builder(name, authority.certificate.subject, key.public_key(), _SERVICE_DAYS)
    names = [_general_name(host) for host in hosts]
    names.append(x509.UniformResourceIdentifier(f"spiffe://seamflow/{identity}"))
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    for extension, critical in (
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (issuer, False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(authority.key, hashes.SHA256())
    write_file(folder / "cert.pem", _public_pem(certificate))
    write_file(folder / "key.pem", _private_pem(key))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Valid an hour early, for clock skew.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _public_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by owner and group only (Redis reads it as the group)."""
    path.parent.mkdir(mode=0o750, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # of an interrupted run
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    partial.rename(path)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "seamflow deployment CA")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return builder.sign(key, hashes.SHA256())
