"""Who may call which rpc of the contract: a table of rpcs and identities.

What an agent does inside one rollout is opened by the rollout's credential instead, which the
rollout gateway checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pool import Default

from services.chassis.errors import ConfigError, ServiceError, permission_denied
from services.chassis.rpc.identities import Callers, Identity, has_bearer

if TYPE_CHECKING:
    from services.chassis.config.settings import ServerConfig

_AGENT = Identity.AGENT
_CONSOLE = Identity.CONSOLE
_CREATE_RUN = Identity.CREATE_RUN
_DATALOADER = Identity.DATALOADER
_ENVIRONMENTS = Identity.ENVIRONMENTS
_EVALUATOR = Identity.EVALUATOR
_HTTP_GATEWAY = Identity.HTTP_GATEWAY
_LAUNCHER = Identity.LAUNCHER
_NODE_AGENT = Identity.NODE_AGENT
_OPERATOR = Identity.OPERATOR
_RANKER = Identity.RANKER
_ROLLOUT_GATEWAY = Identity.ROLLOUT_GATEWAY
_ROLLOUT_SERVER = Identity.ROLLOUT_SERVER
_SCORING = Identity.SCORING
_TRAINER = Identity.TRAINER

ROLLOUT: Set[Identity] = frozenset()
"""The credential of a rollout, whose holder the rollout gateway checks: here any bearer passes."""

PERMISSIONS: Mapping[str, Mapping[str, Set[Identity]]] = {
    "seamflow.common.v1.ProcessService": {
        "GetWaits": {_CONSOLE, _LAUNCHER, _OPERATOR},
    },
    "seamflow.rollout.v1.RolloutService": {
        "LeaseRollouts": {_AGENT, _ENVIRONMENTS, _OPERATOR},
        "StartRollout": {_AGENT, _ENVIRONMENTS, _OPERATOR},
        "ListServers": {_CONSOLE, _OPERATOR},
        "GetRun": {_AGENT, _HTTP_GATEWAY, _ENVIRONMENTS, _OPERATOR},
        "GetModel": {_AGENT, _HTTP_GATEWAY, _ENVIRONMENTS, _OPERATOR},
        "Tokenize": {_AGENT, _HTTP_GATEWAY, _ENVIRONMENTS, _OPERATOR},
        "Generate": ROLLOUT,
        "FinishRollout": ROLLOUT,
        "GetRollout": ROLLOUT,
        "ExtendRollouts": ROLLOUT,
    },
    "seamflow.rollout.v1.RolloutServerService": {
        "GenerateTokens": {_ROLLOUT_GATEWAY},
        "Pause": {_NODE_AGENT, _OPERATOR},
        "Resume": {_NODE_AGENT, _OPERATOR},
        "UpdateWeights": {_EVALUATOR, _OPERATOR},
        "ReleaseMemory": {_NODE_AGENT},
        "RestoreMemory": {_NODE_AGENT},
        "GetServerInfo": {
            _CONSOLE,
            _ROLLOUT_GATEWAY,
            _NODE_AGENT,
            _EVALUATOR,
            _LAUNCHER,
            _OPERATOR,
        },
    },
    "seamflow.trajectory.v1.RunService": {
        "CreateRun": {_CREATE_RUN, _LAUNCHER, _OPERATOR},
        "GetRun": {_ROLLOUT_GATEWAY, _TRAINER, _EVALUATOR, _LAUNCHER, _OPERATOR},
        "ListRuns": {_OPERATOR},
        "EndRun": {_TRAINER, _EVALUATOR, _LAUNCHER, _OPERATOR},
        "DeleteRun": {_OPERATOR},
    },
    "seamflow.trajectory.v1.TrajectoryService": {
        "BeginTurns": {_ROLLOUT_GATEWAY},
        "AppendTokens": {_ROLLOUT_GATEWAY},
        "RecordGroups": {_OPERATOR},
        "DeleteTrajectories": {_OPERATOR},
        "GetTrajectory": {_CONSOLE, _ROLLOUT_GATEWAY, _RANKER, _EVALUATOR, _OPERATOR},
        "ListTrajectories": {_CONSOLE, _DATALOADER, _RANKER, _LAUNCHER, _OPERATOR},
        "SearchRollouts": {_CONSOLE, _EVALUATOR, _OPERATOR},
        "ReadTokens": {_CONSOLE, _OPERATOR},
        "WatchTrajectory": {_OPERATOR},
    },
    "seamflow.trajectory.v1.SampleService": {
        "Reconcile": {_TRAINER},
        "LeaseSamples": {_TRAINER},
        "ExtendLease": {_TRAINER},
        "CommitStep": {_TRAINER},
        "AwaitPublish": {_TRAINER},
        "AwaitStep": {_TRAINER},
        "RejectGroups": {_TRAINER},
        "RecordTrainedSamples": {_TRAINER},
        "ListTrainedSamples": {_CONSOLE, _OPERATOR},
        "ListSamples": {_OPERATOR},
        "GetReadiness": {_CONSOLE, _TRAINER, _LAUNCHER, _OPERATOR},
    },
    "seamflow.trajectory.v1.ColumnService": {
        "LeaseColumn": {_SCORING},
        "WriteColumn": {_SCORING},
        "GetColumnBacklog": {_SCORING, _OPERATOR},
        "ListSampleStatus": {_OPERATOR},
    },
    "seamflow.trajectory.v1.TaskService": {
        "SubmitTasks": {_DATALOADER, _EVALUATOR, _OPERATOR},
        "LeaseTasks": {_ROLLOUT_GATEWAY},
        "ExtendTasks": {_ROLLOUT_GATEWAY},
        "ListDeadLetters": {_LAUNCHER, _CONSOLE, _OPERATOR},
        "RequeueDeadLetters": {_OPERATOR},
        "CancelTasks": {_EVALUATOR, _OPERATOR},
    },
    "seamflow.weights.v1.WeightService": {
        "BeginPublish": {_TRAINER},
        "UploadShards": {_TRAINER},
        "GetUpload": {_TRAINER, _OPERATOR},
        "ProbeFolder": {_TRAINER, _ROLLOUT_SERVER},
        "AnnounceFiles": {_TRAINER},
        "CommitPublish": {_TRAINER},
        "GetManifest": {_CONSOLE, _TRAINER, _ROLLOUT_SERVER, _EVALUATOR, _OPERATOR},
        "FetchShards": {_ROLLOUT_SERVER},
        "RequestSources": {_ROLLOUT_SERVER},
        "AcquireSwap": {_ROLLOUT_SERVER},
        "ReleaseSwap": {_ROLLOUT_SERVER},
        "WatchVersions": {_ROLLOUT_GATEWAY, _ROLLOUT_SERVER, _OPERATOR},
    },
    "seamflow.scheduler.v1.SchedulerService": {
        "RegisterNode": {_NODE_AGENT},
        "Heartbeat": {_NODE_AGENT},
        "RequestNodes": {_TRAINER, _SCORING},
        "ReleaseNodes": {_TRAINER, _SCORING},
        "ListNodes": {_CONSOLE, _ROLLOUT_GATEWAY, _TRAINER, _EVALUATOR, _LAUNCHER, _OPERATOR},
        "WatchAllocations": {_CONSOLE, _LAUNCHER, _OPERATOR},
        "PlanAssignments": {_OPERATOR},
        "DrainNode": {_LAUNCHER, _OPERATOR},
        "SetRunPolicy": {_OPERATOR},
        "ListRuns": {_OPERATOR},
        "PlanSplit": {_OPERATOR},
    },
    "seamflow.trainer.v1.TrainerService": {
        "GetStatus": {_CONSOLE, _NODE_AGENT, _EVALUATOR, _LAUNCHER, _OPERATOR},
        "Suspend": {_NODE_AGENT},
        "Resume": {_NODE_AGENT},
        "SaveCheckpoint": {_LAUNCHER, _OPERATOR},
        "FinishTraining": {_EVALUATOR, _OPERATOR},
        "SetReplicas": {_OPERATOR},
        "TrackEvaluation": {_EVALUATOR, _OPERATOR},
        "HoldCheckpoint": {_EVALUATOR, _OPERATOR},
        "KeepCheckpoint": {_EVALUATOR, _OPERATOR},
    },
    "seamflow.worker.v1.WorkerService": {
        "Activate": {_NODE_AGENT},
        "Deactivate": {_NODE_AGENT},
        "GetStatus": {_NODE_AGENT, _OPERATOR},
    },
    "seamflow.ranker.v1.RankerService": {
        "PredictLengths": {_ROLLOUT_GATEWAY},
        "GetRanker": {_LAUNCHER, _OPERATOR},
    },
    "seamflow.evaluator.v1.EvaluatorService": {
        "GetEvaluations": {_CONSOLE, _DATALOADER, _LAUNCHER, _OPERATOR},
        "FinishEvaluations": {_LAUNCHER, _OPERATOR},
    },
    "seamflow.launcher.v1.LauncherService": {
        "JoinRun": {_LAUNCHER},
        "ReportHost": {_LAUNCHER},
    },
    "seamflow.environment.v1.EnvironmentService": {
        "Describe": {_ENVIRONMENTS, _OPERATOR},
        "ListTasks": {_DATALOADER, _EVALUATOR, _OPERATOR},
        "Reset": {_ENVIRONMENTS},
        "Step": {_ENVIRONMENTS},
        "Close": {_ENVIRONMENTS},
        "RunEpisode": {_ENVIRONMENTS},
    },
    "seamflow.environment.v1.RewardService": {
        "Score": {_ENVIRONMENTS},
    },
}
"""Service -> rpc -> who may call it."""

_OPEN = ("/grpc.health.v1.Health/",)  # probes cannot send a token, and health is not secret


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
    """Enforces the table. A server that knows no identities lets every caller do everything."""

    def __init__(self, config: ServerConfig) -> None:
        self._callers = Callers(config) if config.knows_callers else None

    def check(
        self, method: str, metadata: Mapping[str, str | bytes], uri: Callable[[], str | None]
    ) -> None:
        """Check that the caller may call "/package.Service/Rpc".

        `uri` is that of the caller's verified certificate, None without one.

        Raises:
            ServiceError: UNAUTHENTICATED if nothing proves who calls, PERMISSION_DENIED if that
                identity may not.
        """
        if self._callers is None or method.startswith(_OPEN):
            return
        allowed = _allowed(method)
        if allowed == ROLLOUT and has_bearer(metadata):
            return
        caller = self._callers.caller(metadata, uri())
        if allowed and not caller & allowed:
            raise _denied(method, caller, allowed)


def _allowed(method: str) -> Set[Identity] | None:
    """Who may call the method; None for what is not of the contract: any identity."""
    service, _, rpc = method.removeprefix("/").partition("/")
    return PERMISSIONS[service][rpc] if service in PERMISSIONS else None


def _denied(method: str, caller: Iterable[Identity], allowed: Iterable[Identity]) -> ServiceError:
    """PERMISSION_DENIED that names the identities on both sides."""
    own, others = " or ".join(sorted(caller)), " or ".join(sorted(allowed))
    return permission_denied(f"{own} may not call {method}: only {others} may")
