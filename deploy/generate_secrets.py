"""Generate the secrets of a deployment: a CA, certificates, Redis passwords, tokens.

    python generate_secrets.py --authority /authority --out /secrets

`--out` gets a folder for each service, which is mounted to it alone: `<service>/ca.pem`,
`<service>/<service>/cert.pem` and `key.pem`, whose URI spiffe://seamflow/<identity> says who it is,
and what else that service needs: `redis_url` where it has a store, `agent_token`,
`credential_secret`. `--authority` gets what no service may see: `ca.key`, and the secrets of which
services get a copy or a digest.

Running it again keeps what exists, completes what was cut off, and gives new services theirs; a
folder of another authority is an error and not overwritten. With `--renew` every certificate and
the agents' token are made anew, which running services notice by themselves. An authority of
release 0.2.0 keeps its key; its one folder of secrets for all services is not used any more.

Needs `cryptography` and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import secrets
import sys
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
_MOUNT = "/secrets"
"""Where a service sees its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What one service gets."""

    identity: str = ""
    """Name in the URI of its certificate; empty: its own."""
    hosts: tuple[str, ...] = ()
    """Additional host names of its certificate."""
    keys: tuple[str, ...] = ()
    """Patterns of the keys of Redis that it may touch, as a user of its own; none: no access."""
    presents_agent_token: bool = False
    checks_agent_token: bool = False
    derives_credentials: bool = False
    """It makes the credentials of rollouts."""
    lets_browsers_in: bool = False
    """By a link that has a secret."""


SERVICES: dict[str, Service] = {
    "redis": Service(),
    "trajectory-manager": Service(keys=("sf:{*", "sf:runs")),
    "weights": Service(keys=("sf:weights:*",)),
    "scheduler": Service(keys=("sf:scheduler:*",)),
    "rollout-gateway": Service(checks_agent_token=True, derives_credentials=True),
    "http-gateway": Service(),
    "rollout-server": Service(
        hosts=("rollout-server-a", "rollout-server-b", "rollout-server-sglang")
    ),
    "trainer": Service(),
    "node-agent": Service(hosts=("node-agent-a", "node-agent-b", "node-agent-sglang")),
    "dataloader": Service(),
    "evaluator": Service(),
    "ranker": Service(),
    "scoring": Service(),
    "agent-runner": Service(identity="agent", presents_agent_token=True),
    "tool-loop": Service(),
    "environments": Service(),
    "console": Service(lets_browsers_in=True),
    "create-run": Service(),
    "operator": Service(),
}
"""By name in docker-compose.yml; replicas share what their service gets."""

# The trajectory manager reads the server's settings to check the promised durability.
_COMMANDS = "+@all -@admin -@dangerous +info +config|get"


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


def main() -> None:
    """Generate what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--authority", type=Path, required=True, help="folder of the CA")
    parser.add_argument("--out", type=Path, required=True, help="folder of the services' folders")
    parser.add_argument("--renew", action="store_true", help="new certificates and agents' token")
    given = parser.parse_args()
    try:
        made = generate(given.authority, given.out, renew=given.renew)
    except (FileExistsError, PermissionError) as error:
        sys.stderr.write(f"generate_secrets: {error}\n")
        sys.exit(78)
    sys.stdout.write(f"{'generated' if made else 'kept'} the secrets in {given.out}\n")


def generate(authority_folder: Path, out: Path, *, renew: bool = False) -> bool:
    """Write all secrets that are missing; returns whether there were any.

    Raises:
        FileExistsError: a service's secrets are of another authority, or the authority's are lost.
    """
    authority = _authority(authority_folder, out)
    if renew:
        (authority_folder / "agent_token").unlink(missing_ok=True)
    shared = _shared(authority_folder)
    made = [_write_service(out / name, authority, shared, name, renew) for name in SERVICES]
    return any(made)


def _authority(folder: Path, out: Path) -> Authority:
    """The authority, made if there is none."""
    folders = [out / name for name in SERVICES if (out / name / "ca.pem").exists()]
    if folders and not (folder / "ca.key").exists():
        cure = f"empty the folders in {out} to begin anew"
        raise FileExistsError(f"{folder} has no ca.key, and {folders[0]} has secrets: {cure}")
    authority = authority_in(folder)
    for each in folders:
        if (each / "ca.pem").read_bytes() != authority.pem:
            raise FileExistsError(f"{each} is of another authority: empty it to begin anew")
    return authority


def authority_in(folder: Path) -> Authority:
    """The authority whose key and certificate are in `folder`, made if there is none."""
    if not (folder / "ca.key").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "ca.key", _private_pem(ec.generate_private_key(ec.SECP256R1())))
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    if not (folder / "ca.pem").exists():  # new, or of release 0.2.0
        _write(folder / "ca.pem", _public_pem(_self_signed(key)))
    certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    return Authority(certificate=certificate, key=key)


def _shared(folder: Path) -> dict[str, str]:
    """The secrets that more than one service knows, by their file in the authority's folder."""
    accounts = [f"redis_password_{name}" for name, service in SERVICES.items() if service.keys]
    names = ["agent_token", "credential_secret", "console_access_token", *accounts]
    for name in names:
        if not (folder / name).exists():
            _write(folder / name, secrets.token_urlsafe(32).encode())
    return {name: (folder / name).read_text() for name in names}


def _write_service(
    folder: Path, authority: Authority, shared: dict[str, str], name: str, renew: bool
) -> bool:
    """Write what one service lacks; returns whether it lacked something."""
    own = folder / name
    lacks = renew or not (own / "key.pem").exists()
    if lacks:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        _write(folder / "ca.pem", authority.pem)
        # The key is written last: a certificate without its key is made anew.
        hosts = (name, *SERVICES[name].hosts, "localhost", "127.0.0.1")
        write_certificate(own, authority, SERVICES[name].identity or name, hosts)
    texts = _texts(SERVICES[name], name, shared)
    stale = {path: text for path, text in texts.items() if _text(folder / path) != text}
    for path, text in stale.items():
        _write(folder / path, text.encode())
    return lacks or bool(stale)


def _texts(service: Service, name: str, shared: dict[str, str]) -> dict[str, str]:
    """The other files of a service: path -> content."""
    texts = {}
    if service.presents_agent_token:
        texts["agent_token"] = shared["agent_token"]
    if service.checks_agent_token:  # the digest is enough
        texts["agent_token"] = f"sha256:{_digest(shared['agent_token'])}"
    if service.derives_credentials:
        texts["credential_secret"] = shared["credential_secret"]
    if service.lets_browsers_in:
        texts["console_access_token"] = shared["console_access_token"]
    if service.keys:
        texts[f"{name}/redis_url"] = _redis_url(name, shared[f"redis_password_{name}"])
    if name == "redis":
        texts["redis/users.acl"] = _redis_users(shared)
    return texts


def _redis_url(name: str, password: str) -> str:
    own = f"{_MOUNT}/{name}"
    files = f"ssl_certfile={own}/cert.pem&ssl_keyfile={own}/key.pem"
    return f"rediss://{name}:{password}@redis:6379/0?ssl_ca_certs={_MOUNT}/ca.pem&{files}"


def _redis_users(shared: dict[str, str]) -> str:
    # Redis loads its append-only file as the default user: one that may not write loses all
    # transactions at a restart. So it has all permissions, but is off: no client can log in.
    # Any holder of a deployment certificate may PING Redis as `health`, and nothing else.
    users = [
        "user default off resetpass ~* &* +@all",
        "user health on nopass resetkeys resetchannels -@all +ping",
    ]
    for name, service in SERVICES.items():
        if service.keys:
            digest = _digest(shared[f"redis_password_{name}"])
            keys = " ".join(f"~{pattern}" for pattern in service.keys)
            users.append(f"user {name} on #{digest} resetchannels {keys} {_COMMANDS}")
    return "\n".join(users) + "\n"


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
    _write(folder / "cert.pem", _public_pem(certificate))
    _write(folder / "key.pem", _private_pem(key))


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
