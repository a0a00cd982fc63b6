"""Generate the secrets of a deployment: a CA, certificates, Redis passwords, tokens.

    python -m deploy.generate_secrets --authority /authority --out /secrets

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
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from services.launcher.hosts.certificates import (
    Authority,
    authority_in,
    write_certificate,
    write_file,
)

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


def _shared(folder: Path) -> dict[str, str]:
    """The secrets that more than one service knows, by their file in the authority's folder."""
    accounts = [f"redis_password_{name}" for name, service in SERVICES.items() if service.keys]
    names = ["agent_token", "credential_secret", "console_access_token", *accounts]
    for name in names:
        if not (folder / name).exists():
            write_file(folder / name, secrets.token_urlsafe(32).encode())
    return {name: (folder / name).read_text() for name in names}


def _write_service(
    folder: Path, authority: Authority, shared: dict[str, str], name: str, renew: bool
) -> bool:
    """Write what one service lacks; returns whether it lacked something."""
    own = folder / name
    lacks = renew or not (own / "key.pem").exists()
    if lacks:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        write_file(folder / "ca.pem", authority.pem)
        # The key is written last: a certificate without its key is made anew.
        hosts = (name, *SERVICES[name].hosts, "localhost", "127.0.0.1")
        write_certificate(own, authority, SERVICES[name].identity or name, hosts)
    texts = _texts(SERVICES[name], name, shared)
    stale = {path: text for path, text in texts.items() if _text(folder / path) != text}
    for path, text in stale.items():
        write_file(folder / path, text.encode())
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


if __name__ == "__main__":
    main()
