"""TLS between the processes of a run on several hosts, with certificates made at its start.

Each identity has a certificate of its own on each of its hosts, so that a process can do what its
service may, and no more. The authority stays in the run's folder; certificates are made anew at
each start, since a resumed run may be on other hosts.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import SecretStr

from services.chassis.config.load import TABLES
from services.chassis.errors import ConfigError
from services.launcher.child_process import ProcessPlan, settings_of
from services.launcher.config import LauncherConfig
from services.launcher.hosts.certificates import Authority, authority_in, write_certificate
from services.launcher.layout import LOOPBACK, Layout

_OF_HOST_0 = ("launcher", "operator", "agent")
"""Identities of this machine without a service."""
_IDENTITIES = {"agent_runner": "agent"}
_SERVES_LOOPBACK = ("tool_loop", "environment_server", "console")
_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")


def secured(
    config: LauncherConfig, layout: Layout, plans: Mapping[str, ProcessPlan]
) -> tuple[LauncherConfig, dict[str, ProcessPlan]]:
    """The settings and processes of a run on several hosts, with certificates and addresses.

    Writes certificates and keys below `hosts_folder`, by host and identity.

    Raises:
        ConfigError: the launcher has certificates of the user.
    """
    if config.tls_ca_file or config.tls_cert_file:
        raise ConfigError(
            f"hosts is {list(config.hosts)}, and tls_ca_file or tls_cert_file of [launcher] is "
            "set: take those out, as the launcher makes certificates for several hosts"
        )
    authority = authority_in(hosts_folder(layout) / "authority")
    identities = {(plan.host, identity) for plan in plans.values() if (identity := _identity(plan))}
    for host, identity in sorted({*identities, *((0, name) for name in _OF_HOST_0)}):
        _write(authority, host, identity, layout, config.hosts[host])
    token = config.agent_token or SecretStr(kept_secret(hosts_folder(layout) / "agent_token"))
    own = dict(zip(_FILES, _files(0, "launcher", layout), strict=True))
    made = {name: _with_tls(plan, layout, token) for name, plan in plans.items()}
    return config.replace(**own, agent_token=token), made


def hosts_folder(layout: Layout) -> Path:
    """What the hosts of a run need, for this user alone."""
    folder = layout.folder / "hosts"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def kept_secret(file: Path) -> str:
    """A secret for this user alone, made at the first start of a run."""
    file.touch(mode=0o600)
    if not file.read_text(encoding="utf-8"):  # new, or cut off before it was written
        file.write_text(secrets.token_urlsafe(32), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def listening_at(plan: ProcessPlan, layout: Layout) -> str:
    """Address on which a process has to listen, to be reached by the others."""
    return LOOPBACK if plan.table in _SERVES_LOOPBACK else layout.hosts[plan.host]


def _identity(plan: ProcessPlan) -> str:
    """In the process's certificate; empty: it has none."""
    if plan.table not in (*TABLES, "environment_server"):
        return ""
    return _IDENTITIES.get(plan.table, plan.table.replace("_", "-"))


def _write(authority: Authority, host: int, identity: str, layout: Layout, host_name: str) -> None:
    folder = hosts_folder(layout) / str(host) / identity
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.pem").write_bytes(authority.pem)
    # Whoever calls a trainer looks for one of its hosts in the certificate.
    places = layout.places.get(identity, ())
    names = (
        identity,
        host_name,
        "localhost",
        LOOPBACK,
        *(layout.hosts[each] for each in (host, *places)),
    )
    write_certificate(folder, authority, identity, tuple(dict.fromkeys(names)))


def _files(host: int, identity: str, layout: Layout) -> list[Path]:
    folder = hosts_folder(layout) / str(host) / identity
    return [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]


def _with_tls(plan: ProcessPlan, layout: Layout, agent_token: SecretStr) -> ProcessPlan:
    if plan.table == "agent":  # the user's program finds the authority as OpenSSL does
        authority = str(_files(0, "agent", layout)[0])
        return replace(plan, environment={**plan.environment, **_of_agent(authority, agent_token)})
    if not (identity := _identity(plan)):
        return plan
    files = dict(zip(_FILES, _files(plan.host, identity, layout), strict=True))
    if plan.table == "environment_server":
        given = settings_of("environment", **{name: files[name] for name in _FILES[1:]})
    else:
        given = settings_of(plan.table, **files, **_of_server(plan, layout, agent_token))
    return replace(plan, environment={**plan.environment, **given})


def _of_agent(authority: str, token: SecretStr) -> dict[str, str]:
    return {"SSL_CERT_FILE": authority, "SEAMFLOW_AGENT_TOKEN": token.get_secret_value()}


def _of_server(plan: ProcessPlan, layout: Layout, agent_token: SecretStr) -> dict[str, object]:
    if plan.settings is None:
        return {}
    checked = {"agent_token": agent_token.get_secret_value()}
    return {
        "host": listening_at(plan, layout),
        "certificate_identities": "true",
        **(checked if plan.table == "rollout_gateway" else {}),
    }


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
