"""The settings of all processes of a run, read here as each process will read its own.

No process is started for it: importing all settings classes takes a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

from services.chassis.config.load import load
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError, StartupError, UsageError
from services.launcher.child_process import ProcessPlan
from services.launcher.supervisor import child_environment

CLASSES: Mapping[str, str] = {
    "trajectory_manager": "trajectory_manager.config:TrajectoryManagerConfig",
    "rollout_gateway": "rollout.gateway.config:GatewayConfig",
    "http_gateway": "rollout.http_gateway.config:HttpGatewayConfig",
    "rollout_server": "rollout.server.config:RolloutServerConfig",
    "trainer": "trainer.config:TrainerConfig",
    "scheduler": "scheduler.config:SchedulerConfig",
    "weights": "services.weights.config:WeightsConfig",
    "node_agent": "services.node_agent.config:NodeAgentConfig",
    "dataloader": "services.dataloader.config:DataloaderConfig",
    "ranker": "services.ranker.config:RankerConfig",
    "evaluator": "services.evaluator.config:EvaluatorConfig",
    "scoring": "services.scoring.config:ScoringConfig",
    "environments": "services.environments.config:EnvironmentsConfig",
    "tool_loop": "services.tool_loop.config:ToolLoopConfig",
    "console": "services.console.config:ConsoleConfig",
}
"""Settings class of each table, by name: the launcher imports no other process."""


def check_settings(plans: Iterable[ProcessPlan]) -> Mapping[str, ServerConfig]:
    """The settings by name of the process.

    Raises:
        UsageError: a flag of --set that names no setting.
        ConfigError: any other mistake; both name all mistakes, a line each.
    """
    found: dict[str, ServerConfig] = {}
    mistakes: dict[str, StartupError] = {}
    for plan in plans:
        if plan.settings is not None:
            try:
                found[plan.name] = _read(plan, plan.settings)
            except StartupError as error:  # of processes of one kind, once
                mistakes.setdefault(f"{plan.table}: {error}", error)
    if mistakes:
        kinds = {type(error) for error in mistakes.values()}
        raise (UsageError if kinds == {UsageError} else ConfigError)("\n".join(mistakes))
    return found


def _read(plan: ProcessPlan, arguments: tuple[str, ...]) -> ServerConfig:
    module, _, name = CLASSES[plan.table].partition(":")
    with _environment(child_environment(plan.environment)):
        config: ServerConfig = load(getattr(import_module(module), name), plan.table, arguments)
    return config


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables of a process in place of this one's."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
