"""Who calls: a process of seamflow, an agent or an operator.

A service is known by the URI spiffe://seamflow/<service> of its client certificate, or by a bearer
token of its own. An agent or an operator is known by a bearer token or by such a certificate. The
one `token` of a deployment stands for any service: the weaker form.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from services.chassis.config.settings import FileSecret
from services.chassis.errors import ConfigError, unauthenticated

if TYPE_CHECKING:
    from pydantic import SecretStr

    from services.chassis.config.settings import ServerConfig

URI = "spiffe://seamflow/"
"""Start of the URI in a certificate; the name of an identity follows."""


class Identity(StrEnum):
    """Who calls; the values are names of certificates and of token files."""

    AGENT = "agent"
    """A program that solves tasks."""
    OPERATOR = "operator"
    """A person or tool that looks after runs, such as `seamflow` on the command line."""
    TRAJECTORY_MANAGER = "trajectory-manager"
    ROLLOUT_GATEWAY = "rollout-gateway"
    HTTP_GATEWAY = "http-gateway"
    ROLLOUT_SERVER = "rollout-server"
    SCHEDULER = "scheduler"
    NODE_AGENT = "node-agent"
    TRAINER = "trainer"
    WEIGHTS = "weights"
    DATALOADER = "dataloader"
    RANKER = "ranker"
    EVALUATOR = "evaluator"
    SCORING = "scoring"
    ENVIRONMENTS = "environments"
    TOOL_LOOP = "tool-loop"
    CONSOLE = "console"
    LAUNCHER = "launcher"
    CREATE_RUN = "create-run"


SERVICES = frozenset(Identity) - {Identity.AGENT, Identity.OPERATOR}
"""The processes of seamflow."""

_SCHEME = "Bearer "
_ANY_SERVICE = "service"
_CURE = 'send metadata "authorization: Bearer <token>" with a valid token'
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

Caller = frozenset[Identity]
"""All identities that one caller may have: several with a token that stands for several."""


class AcceptedToken:
    """A token that callers may present, and for a while the one that it has replaced."""

    def __init__(
        self,
        secret: SecretStr,
        identities: Caller,
        overlap_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret` is a token, or "sha256:" and the digest of one in hex."""
        self.identities = identities
        self._secret = secret
        self._overlap_seconds = overlap_seconds
        self._clock = clock
        self._current = _digest_in(secret)
        self._replaced: dict[str, float] = {}  # digest -> until when it is accepted

    def is_shown(self, digest: str) -> bool:
        """Whether a caller shows a token of this digest.

        Digests are compared, so that the time a comparison takes says nothing of the token.
        """
        if (current := _digest_in(self._secret)) != self._current:
            self._replaced = {self._current: self._clock() + self._overlap_seconds}
            self._current = current
        return digest == current or self._clock() < self._replaced.get(digest, -1.0)

    def look(self) -> None:
        """See a change of the token's file at once."""
        if isinstance(self._secret, FileSecret):
            self._secret.look()


class Callers:
    """Finds out who calls, by certificate and bearer token."""

    def __init__(self, config: ServerConfig) -> None:
        """Read the tokens of `config`.

        Raises:
            ConfigError: a file of `service_tokens_folder` names no identity, or cannot be read.
        """
        self._by_certificate = config.certificate_identities
        self._tokens = list(_accepted(config))

    def caller(self, metadata: Mapping[str, str | bytes], uri: str | None) -> Caller:
        """Who calls, by its metadata and the URI of its verified certificate.

        A token of an agent or operator says who calls. One of services holds for the service that
        the certificate names, where it names one.

        Raises:
            ServiceError: UNAUTHENTICATED, nothing proves who calls.
        """
        named = _named(uri)
        shown = _bearer(metadata)
        if shown is None:
            if self._by_certificate and named:
                return named
            raise unauthenticated(_CURE)
        if not (holders := self._holders(shown)):
            raise unauthenticated(f"the token is not known here: {_CURE}")
        if named is None:
            return holders
        if not (proven := (holders & named) | (holders - SERVICES)):
            raise unauthenticated(f"the token is not of the service of the certificate, {uri}")
        return proven

    def _holders(self, token: str) -> Caller:
        digest = _digest(token)
        if not (found := self._found(digest)):
            for accepted in self._tokens:
                accepted.look()
            found = self._found(digest)
        return found

    def _found(self, digest: str) -> Caller:
        return frozenset().union(*(t.identities for t in self._tokens if t.is_shown(digest)))


def _accepted(config: ServerConfig) -> Iterator[AcceptedToken]:
    overlap = config.token_overlap_seconds
    if config.agent_token:
        yield AcceptedToken(config.agent_token, frozenset({Identity.AGENT}), overlap)
    if config.operator_token:
        yield AcceptedToken(config.operator_token, frozenset({Identity.OPERATOR}), overlap)
    if config.service_tokens_folder is not None:
        for file in _token_files(config.service_tokens_folder):
            yield AcceptedToken(_read(file), _holder(file, config), overlap)
    elif config.token:
        yield AcceptedToken(config.token, _any_service(config), overlap)


def _any_service(config: ServerConfig) -> Caller:
    """Who `token` stands for: all services, and roles that have no token of their own."""
    agent = frozenset() if config.agent_token else {Identity.AGENT}
    operator = frozenset() if config.operator_token else {Identity.OPERATOR}
    return SERVICES | agent | operator


def _token_files(folder: Path) -> list[Path]:
    try:
        # Kubernetes mounts secrets with hidden folders beside the files.
        return sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"service_tokens_folder: {folder}: {error.strerror}") from error


def _read(file: Path) -> FileSecret:
    try:
        return FileSecret(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"service_tokens_folder: {file}: {error}") from error


def _holder(file: Path, config: ServerConfig) -> Caller:
    """Who presents the token of this file of `service_tokens_folder`."""
    if file.name == _ANY_SERVICE:
        return _any_service(config)
    if file.name not in SERVICES:
        known = ", ".join(sorted(SERVICES))
        raise ConfigError(
            f"service_tokens_folder: {file} names no service: name it {_ANY_SERVICE} for any, or "
            f"one of {known}"
        )
    return frozenset({Identity(file.name)})


def _named(uri: str | None) -> Caller | None:
    """The identity in a certificate, none if unknown; None: it names none of seamflow's."""
    if uri is None or not uri.startswith(URI):
        return None
    name = uri.removeprefix(URI)
    return frozenset({Identity(name)}) if name in set(Identity) else frozenset()


def has_bearer(metadata: Mapping[str, str | bytes]) -> bool:
    """Whether a caller shows a token or a credential, valid or not."""
    return _bearer(metadata) is not None


def _bearer(metadata: Mapping[str, str | bytes]) -> str | None:
    shown = metadata.get("authorization")
    if not isinstance(shown, str) or not shown.startswith(_SCHEME):
        return None
    return shown.removeprefix(_SCHEME)


def _digest_in(secret: SecretStr) -> str:
    """The digest of the accepted token."""
    text = secret.get_secret_value()
    given = _DIGEST.fullmatch(text)
    return given[1] if given else _digest(text)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
