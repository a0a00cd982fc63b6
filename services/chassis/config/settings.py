"""Base classes of settings: pydantic models whose attribute docstrings document each field.

A secret in a file may be rotated while the process runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from seamflow.credentials import SecretFile


class Settings(BaseModel):
    """A table of settings. Immutable; an unknown key, infinity and NaN are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_text_is_none(cls, given: Any) -> Any:
        """Variables and flags have no null: "" stands for it where None is the default."""
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {k: None if v == "" and k in optional else v for k, v in given.items()}

    def replace(self, **changes: Any) -> Self:
        """A validated copy with other values.

        Raises:
            ValueError: a value that cannot work.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**values, **changes})


class ServerConfig(Settings):
    """Settings of every process."""

    instance: str = "0"
    """Name of this replica in logs."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback, TLS and tokens or certificate_identities are
    required."""
    port: int = Field(0, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    admin_port: int = Field(0, ge=-1, le=65535)
    """HTTP port of /healthz, /readyz, /metrics and /version; 0 takes a free one, -1 disables it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["json", "console"] = "json"
    """JSON lines for machines, or coloured lines for people."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP; None: no spans are exported."""
    otlp_sample_ratio: float = Field(1.0, gt=0, le=1)
    """Share of traces to export; give every process the same one, so that traces stay whole."""
    drain_seconds: float = Field(10.0, ge=0)
    """Time that calls in flight get to finish after SIGTERM."""
    development: bool = False
    """Serve reflection, and allow plaintext beyond loopback."""
    token: SecretStr | None = None
    """Bearer token that this process presents to other services. Without service_tokens_folder,
    whoever presents it here is any service: simple, but one key for all of them."""
    service_tokens_folder: Path | None = None
    """Folder of the tokens that services present here: a file for each, named as in its
    certificate, such as `trainer`, with its token, or `sha256:` and the token's digest in hex; the
    file `service` is for any service. A file is read again when it changes."""
    certificate_identities: bool = False
    """Know callers by the URI spiffe://seamflow/SERVICE of their certificates, without a token;
    needs tls_ca_file."""
    agent_token: SecretStr | None = None
    """Bearer token of agents, which opens only what agents need, or `sha256:` and its digest in
    hex; by default they use `token`."""
    operator_token: SecretStr | None = None
    """Bearer token of operators, for commands and dashboards, or `sha256:` and its digest in hex;
    by default they use `token`."""
    token_overlap_seconds: float = Field(300.0, ge=0)
    """How long a token is still accepted after its file holds another."""
    tls_ca_file: Path | None = None
    """PEM file of the authority that signed the certificates of callers and other services."""
    tls_cert_file: Path | None = None
    """PEM file of this process's certificate chain."""
    tls_key_file: Path | None = None
    """PEM file of this process's private key."""

    @property
    def knows_callers(self) -> bool:
        """Whether callers must prove who they are; else everyone may do everything."""
        tokens = (self.token, self.agent_token, self.operator_token, self.service_tokens_folder)
        return self.certificate_identities or any(tokens)


def secret_names(settings: type[BaseModel]) -> frozenset[str]:
    """The settings that are secrets: never printed, also read from a mounted file."""
    return frozenset(
        name
        for name, field in settings.model_fields.items()
        if SecretStr in (field.annotation, *get_args(field.annotation))
    )


class FileSecret(SecretStr):
    """A secret whose value is what its file holds now."""

    def __init__(self, path: Path) -> None:
        """Read `path`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty, or no text.
        """
        self._file = SecretFile(path)
        super().__init__(self._file.text())

    @property
    def path(self) -> Path:
        return self._file.path

    def get_secret_value(self) -> str:
        """The current value; a change of the file is seen within a second."""
        return self._file.text()

    def look(self) -> None:
        """See a change of the file at once."""
        self._file.text(now=True)
