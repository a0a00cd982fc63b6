"""Generate the secrets of a deployment: a CA, certificates, Redis passwords, tokens.

    python generate_secrets.py --authority /authority --out /secrets

`--out` gets `ca.pem`, `token`, `agent_token`, `operator_token`, `credential_secret`,
`redis/users.acl` and, for each service, `<service>/cert.pem`, `key.pem` and, where it has a
store, `redis_url`. `--authority` gets `ca.key`, which no service may see. Everything that exists
is kept, and what was half written when a first run was interrupted is an error and not
overwritten. Running it again gives a certificate and a key to services that have no key: those
that are new, or whose folder a cut off run left half written. To rotate, remove both folders and
restart.

Needs `cryptography` and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import secrets
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 3650
_SERVICE_DAYS = 825
_COMPLETE = ".complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One service's access to Redis."""

    keys: tuple[str, ...]
    """Patterns of the keys it may touch."""


SERVICES: dict[str, tuple[str, ...]] = {
    "redis": (),
    "trajectory-manager": (),
    "weights": (),
    "scheduler": (),
    "rollout-gateway": (),
    "http-gateway": (),
    "rollout-server": ("rollout-server-a", "rollout-server-b"),
    "trainer": (),
    "node-agent": ("node-agent-a", "node-agent-b"),
    "dataloader": (),
    "ranker": (),
    "agent-runner": (),
    "tool-loop": (),
    "environments": (),
    "create-run": (),
}
"""Services, with the additional host names of their certificates."""

ACCOUNTS = {
    "trajectory-manager": Account(keys=("sf:{*", "sf:runs")),
    "weights": Account(keys=("sf:weights:*",)),
    "scheduler": Account(keys=("sf:scheduler:*",)),
}
"""Services with state: each has its own user and keys, isolated from the others."""

# The trajectory manager reads the server's settings to check the promised durability.
_COMMANDS = "+@all -@admin -@dangerous +info +config|get"


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """The certificate authority of one deployment."""

    certificate: x509.Certificate
    """Self-signed certificate."""
    key: ec.EllipticCurvePrivateKey
    """Signs the services' certificates."""


def main() -> None:
    """Generate the secrets once; no effect if all exist, an error if only some do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--authority", type=Path, required=True, help="folder for the CA's key")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything else")
    given = parser.parse_args()
    try:
        made = generate(given.authority, given.out)
    except (FileExistsError, PermissionError) as error:
        sys.stderr.write(f"generate_secrets: {error}\n")
        sys.exit(78)
    sys.stdout.write(f"{'generated' if made else 'kept'} the secrets in {given.out}\n")


def generate(authority_folder: Path, out: Path) -> bool:
    """Write all secrets; returns False if they exist already.

    Raises:
        FileExistsError: a folder holds files, but not all of them.
    """
    if (out / _COMPLETE).exists() and (authority_folder / "ca.key").exists():
        return _add_services(authority_folder, out)
    for folder in (authority_folder, out):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            cure = "empty both folders to begin anew"
            raise FileExistsError(f"{folder} is not empty and not complete: {cure}")
    authority = _make_authority()
    _write(authority_folder / "ca.key", _private_pem(authority.key))
    _write(out / "ca.pem", _public_pem(authority.certificate))
    for name, hosts in SERVICES.items():
        _write_certificate(out / name, authority, (name, *hosts))
    for name in ("token", "agent_token", "operator_token", "credential_secret"):
        _write(out / name, secrets.token_urlsafe(32).encode())
    _write_redis(out)
    _write(out / _COMPLETE, b"")
    return True


def _add_services(authority_folder: Path, out: Path) -> bool:
    """Generate certificates for services that an older release did not have."""
    # A user of Redis cannot be added: Redis has read its users.
    # The key is written last; a certificate without its key is unusable.
    services = SERVICES.keys() - ACCOUNTS.keys()
    new = sorted(name for name in services if not (out / name / "key.pem").exists())
    if not new:
        return False
    key = serialization.load_pem_private_key((authority_folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    authority = Authority(certificate=certificate, key=key)
    for name in new:
        _write_certificate(out / name, authority, (name, *SERVICES[name]))
    return True


def _write_redis(out: Path) -> None:
    # Any holder of a deployment certificate may PING Redis, and nothing else.
    users = ["user default on nopass resetkeys resetchannels -@all +ping"]
    for service, account in ACCOUNTS.items():
        password = secrets.token_urlsafe(32)
        digest = hashlib.sha256(password.encode()).hexdigest()
        keys = " ".join(f"~{pattern}" for pattern in account.keys)
        users.append(f"user {service} on #{digest} resetchannels {keys} {_COMMANDS}")
        folder = out / service
        tls = (
            f"ssl_ca_certs={out}/ca.pem&ssl_certfile={folder}/cert.pem&ssl_keyfile={folder}/key.pem"
        )
        url = f"rediss://{service}:{password}@redis:6379/0?{tls}"
        _write(folder / "redis_url", url.encode())
    _write(out / "redis" / "users.acl", ("\n".join(users) + "\n").encode())


def _make_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
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
    return Authority(certificate=builder.sign(key, hashes.SHA256()), key=key)


def _write_certificate(folder: Path, authority: Authority, hosts: tuple[str, ...]) -> None:
    """One certificate for both sides of a connection: every service is also a client."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    builder = _builder(name, authority.certificate.subject, key.public_key(), _SERVICE_DAYS)
    names = [x509.DNSName(host) for host in (*hosts, "localhost")]
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    for extension, critical in (
        (x509.SubjectAlternativeName([*names, loopback]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (issuer, False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(authority.key, hashes.SHA256())
    _write(folder / "cert.pem", _public_pem(certificate))
    _write(folder / "key.pem", _private_pem(key))


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


def _write(path: Path, content: bytes) -> None:
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


if __name__ == "__main__":
    main()
