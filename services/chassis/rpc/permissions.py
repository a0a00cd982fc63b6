"""Who may call which rpc of the contract.

Three roles, each with a bearer token of its own: agents, services of the run, operators. What an
agent does inside one rollout is opened by the rollout's credential instead, which the rollout
gateway checks itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pool import Default

from services.chassis.errors import ConfigError, ServiceError, permission_denied, unauthenticated

if TYPE_CHECKING:
    from pydantic import SecretStr

    from services.chassis.config.settings import ServerConfig

__all__ = ["PERMISSIONS", "Permissions", "Role", "check_entries"]


class Role(StrEnum):
    """Who a bearer token stands for."""

    AGENT = "agent"
    """A program that solves tasks."""
    SERVICE = "service"
    """A process of seamflow."""
    OPERATOR = "operator"
    """A person or tool that looks after runs."""


_Roles = frozenset[Role]

ANYONE: _Roles = frozenset(Role)
SERVICES: _Roles = frozenset({Role.SERVICE})
BOTH: _Roles = frozenset({Role.SERVICE, Role.OPERATOR})
"""Reads, and changes that services as well as operators make."""
OPERATORS: _Roles = frozenset({Role.OPERATOR})
ROLLOUT: _Roles = frozenset()
"""The credential of a rollout, whose holder the rollout gateway checks: here any bearer passes."""

PERMISSIONS: Mapping[str, Mapping[str, _Roles]] = {
    "seamflow.rollout.v1.RolloutService": {
        "LeaseRollouts": ANYONE,
        "StartRollout": ANYONE,
        "ListServers": BOTH,
        "GetRun": ANYONE,
        "GetModel": ANYONE,
        "Tokenize": ANYONE,
        "Generate": ROLLOUT,
        "FinishRollout": ROLLOUT,
        "GetRollout": ROLLOUT,
        "ExtendRollouts": ROLLOUT,
    },
    "seamflow.rollout.v1.RolloutServerService": {
        "GenerateTokens": SERVICES,
        "Pause": BOTH,
        "Resume": BOTH,
        "UpdateWeights": BOTH,
        "ReleaseMemory": SERVICES,
        "RestoreMemory": SERVICES,
        "GetServerInfo": BOTH,
    },
    "seamflow.trajectory.v1.RunService": {
        "CreateRun": BOTH,
        "GetRun": BOTH,
        "ListRuns": BOTH,
        "EndRun": BOTH,
        "DeleteRun": OPERATORS,
    },
    "seamflow.trajectory.v1.TrajectoryService": {
        "BeginTurns": SERVICES,
        "AppendTokens": SERVICES,
        "RecordGroups": BOTH,
        "DeleteTrajectories": OPERATORS,
        "GetTrajectory": BOTH,
        "ListTrajectories": BOTH,
        "WatchTrajectory": BOTH,
    },
    "seamflow.trajectory.v1.SampleService": {
        "Reconcile": SERVICES,
        "LeaseSamples": SERVICES,
        "ExtendLease": SERVICES,
        "CommitStep": SERVICES,
        "AwaitPublish": SERVICES,
        "AwaitStep": SERVICES,
        "RejectGroups": SERVICES,
        "ListSamples": BOTH,
        "GetReadiness": BOTH,
    },
    "seamflow.trajectory.v1.ColumnService": {
        "LeaseColumn": SERVICES,
        "WriteColumn": SERVICES,
        "ListSampleStatus": BOTH,
    },
    "seamflow.trajectory.v1.TaskService": {
        "SubmitTasks": BOTH,
        "LeaseTasks": SERVICES,
        "ExtendTasks": SERVICES,
        "ListDeadLetters": BOTH,
        "RequeueDeadLetters": OPERATORS,
        "CancelTasks": BOTH,
    },
    "seamflow.weights.v1.WeightService": {
        "BeginPublish": SERVICES,
        "UploadShards": SERVICES,
        "GetUpload": BOTH,
        "ProbeFolder": SERVICES,
        "CommitPublish": SERVICES,
        "GetManifest": BOTH,
        "FetchShards": SERVICES,
        "RequestSources": SERVICES,
        "AcquireSwap": SERVICES,
        "ReleaseSwap": SERVICES,
        "WatchVersions": BOTH,
    },
    "seamflow.scheduler.v1.SchedulerService": {
        "RegisterNode": SERVICES,
        "Heartbeat": SERVICES,
        "RequestNodes": SERVICES,
        "ReleaseNodes": SERVICES,
        "ListNodes": BOTH,
        "WatchAllocations": BOTH,
        "PlanAssignments": BOTH,
        "DrainNode": BOTH,
        "SetRunPolicy": OPERATORS,
        "ListRuns": BOTH,
        "PlanSplit": BOTH,
    },
    "seamflow.trainer.v1.TrainerService": {
        "GetStatus": BOTH,
        "Suspend": SERVICES,
        "Resume": SERVICES,
        "SaveCheckpoint": OPERATORS,
        "FinishTraining": BOTH,
        "TrackEvaluation": BOTH,
    },
    "seamflow.worker.v1.WorkerService": {
        "Activate": SERVICES,
        "Deactivate": SERVICES,
        "GetStatus": BOTH,
    },
    "seamflow.ranker.v1.RankerService": {
        "PredictLengths": SERVICES,
        "GetRanker": BOTH,
    },
    "seamflow.environment.v1.EnvironmentService": {
        "Describe": BOTH,
        "ListTasks": BOTH,
        "Reset": SERVICES,
        "Step": SERVICES,
        "Close": SERVICES,
        "RunEpisode": SERVICES,
    },
    "seamflow.environment.v1.RewardService": {
        "Score": SERVICES,
    },
}
"""Service -> rpc -> who may call it."""

_OPEN = ("/grpc.health.v1.Health/",)  # probes cannot send a token, and health is not secret
_HEADER = 'send metadata "authorization: Bearer <token>" with a valid token'


def check_entries(services: Iterable[str]) -> None:
    """Check that each rpc of these services of the contract has an entry.

    Raises:
        ConfigError: names those that lack one.
    """
    known = [name for name in services if name.startswith("seamflow.")]
    missing = [
        f"{name}/{method.name}"
        for name in known
        for method in Default().FindServiceByName(name).methods
        if method.name not in PERMISSIONS.get(name, {})
    ]
    if missing:
        raise ConfigError(f"PERMISSIONS lacks {', '.join(missing)}: add who may call it")


class Permissions:
    """Maps bearer tokens to roles. A server without any token lets every caller do everything.

    A role without a token of its own is played by services: with `token` alone, all present it.
    """

    def __init__(self, config: ServerConfig) -> None:
        service = {Role.SERVICE}
        service |= set() if config.operator_token else {Role.OPERATOR}
        self._roles: list[tuple[bytes, frozenset[Role]]] = [
            *_entry(config.token, frozenset(service)),
            *_entry(config.agent_token, frozenset({Role.AGENT})),
            *_entry(config.operator_token, OPERATORS),
        ]

    def check(self, method: str, metadata: Mapping[str, str | bytes]) -> None:
        """Check that the caller may call "/package.Service/Rpc".

        Raises:
            ServiceError: UNAUTHENTICATED without a known token, PERMISSION_DENIED for its role.
        """
        if not self._roles or method.startswith(_OPEN):
            return
        shown = metadata.get("authorization", "")
        if not isinstance(shown, str) or not shown.startswith("Bearer "):
            raise unauthenticated(_HEADER)
        allowed = _allowed(method)
        if allowed == ROLLOUT:
            return
        roles = self._roles_of(shown.removeprefix("Bearer ").encode())
        if not roles:
            raise unauthenticated(_HEADER)
        if allowed is not None and not roles & allowed:
            raise _denied(method, roles, allowed)

    def _roles_of(self, token: bytes) -> frozenset[Role]:
        found: frozenset[Role] = frozenset()
        for known, roles in self._roles:  # all, so that the time says nothing
            if hmac.compare_digest(known, token):
                found |= roles
        return found


def _entry(token: SecretStr | None, roles: frozenset[Role]) -> list[tuple[bytes, frozenset[Role]]]:
    return [(token.get_secret_value().encode(), roles)] if token else []


def _allowed(method: str) -> _Roles | None:
    """The roles that may call the method; None for what is not of the contract: any."""
    service, _, rpc = method.removeprefix("/").partition("/")
    return PERMISSIONS[service][rpc] if service in PERMISSIONS else None


def _denied(method: str, roles: Iterable[Role], allowed: Iterable[Role]) -> ServiceError:
    """PERMISSION_DENIED that names the roles on both sides."""
    own, others = " and ".join(sorted(roles)), " or ".join(sorted(allowed))
    return permission_denied(
        f"the {own} token does not open {method}: present the token of the {others} role"
    )
