"""The settings of all processes of a run, read here as each process will read its own.

No process is started for it: importing all settings classes takes a fraction of a second.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from services.chassis.config.load import load
from services.chassis.config.settings import ServerConfig
from services.chassis.config.sources import read_toml
from services.chassis.errors import ConfigError, StartupError, UsageError
from services.launcher.child_process import ProcessPlan
from services.launcher.config import REWARD_COLUMN, LauncherConfig
from services.launcher.supervisor import child_environment

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_COMPUTING = ("trainer", "rollout_server", "scoring")
"""Beginnings of the names of processes that compute; others wait for them."""

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
CHECK_TASKS = "services.dataloader.check_tasks"
"""Reads all tasks, and prints how many there are."""


def divided_threads(
    environment: Mapping[str, str], processes: Collection[str], cores: int
) -> tuple[dict[str, str], list[str]]:
    """Variables that ask for more threads than a process has cores, with fewer; a line for each.

    Args:
        environment: variables of the user.
        processes: names of those of the run.
        cores: of this machine.
    """
    number = sum(name.startswith(_COMPUTING) for name in processes) or 1
    most = max(1, cores // number)
    found, lines = {}, []
    for name in _VARIABLES:
        # OMP_NUM_THREADS may be a list, by level of nesting.
        first = environment.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > most:
            found[name] = str(most)
            lines.append(
                f"{name} is {first}, and {number} processes compute on {cores} cores: each gets "
                f"{most}; more would slow all of them down"
            )
    return found, lines


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def process_setting(config: LauncherConfig, config_file: Path, path: str) -> object:
    """What `set`, a variable or the file gives for "table.name" or "table.nested.name".

    Text where `set` or a variable gives it; None if none of them does.
    """
    table, *names = path.split(".")
    for setting in reversed(config.set):
        name, _, value = setting.partition("=")
        if name.strip() == path:
            return value
    variable = f"SEAMFLOW_{table}_{'__'.join(names)}".upper()
    if variable in os.environ:
        return os.environ[variable]
    found: object = read_toml(config_file)
    for name in (table, *names):
        found = found.get(name) if isinstance(found, dict) else None
    return found


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


def amount_of_tasks(
    config: LauncherConfig, config_file: Path, counted: Mapping[str, int | None]
) -> str | None:
    """One line for people; None: nobody has counted them.

    `counted`: "tasks", and "epochs", in which each is submitted once; 0: without end; "broken"
    rows, which are skipped.
    """
    tasks, epochs = counted["tasks"], counted["epochs"]
    steps = process_setting(config, config_file, "trainer.num_steps")
    if tasks is None or epochs is None or steps is None:
        return None
    needed = f"{steps} steps of {config.groups_per_step} groups of {config.group_size} rollouts"
    broken = f" ({counted['broken']} broken rows are skipped)" if counted.get("broken") else ""
    if epochs == 0:
        return f"{tasks} tasks{broken}, repeated, for {needed}"
    enough = tasks * epochs // config.groups_per_step
    times = f"{tasks} tasks{broken}, {epochs} time{'s' if epochs > 1 else ''} each"
    if enough >= int(str(steps)):
        return f"{times}, for {needed}"
    return (
        f"{times}, are enough for {enough} steps at most: {needed} are asked for; "
        "dataloader.epochs = 0 repeats the tasks"
    )


def trained_rewards(config: LauncherConfig, config_file: Path) -> Collection[str]:
    """Names in reward_weights or reward of [trainer.algorithm]; none: neither is set."""
    weights = process_setting(config, config_file, "trainer.algorithm.reward_weights")
    if isinstance(weights, str):
        with suppress(ValueError):  # the trainer's own check names it
            weights = json.loads(weights)
    if isinstance(weights, dict) and weights:
        return weights.keys()
    name = process_setting(config, config_file, "trainer.algorithm.reward")
    return (str(name),) if name else ()


def check_reward_names(config: LauncherConfig, settings: Mapping[str, ServerConfig]) -> list[str]:
    """Check what settings name against the rewards that rollouts will have, where those are known.

    Others are checked with the first rollouts (trainer/leasing/accepted_samples.py).

    Returns:
        A warning of a reward model that is not trained on.

    Raises:
        ConfigError: a setting names a reward that no rollout has, or names none of several.
    """
    processes = [*settings.values()]
    named = [(setting, name) for setting, name in _named(config, processes) if name]
    known = _known(config, processes)
    trained = [name for setting, name in named if setting.startswith("trainer.")]
    if known is not None:
        for setting, name in named:
            _check_known(setting, name, known)
        if not trained and "reward" not in known and len(known) > 1:
            raise ConfigError(
                f"rollouts have the rewards {_shown(known)}, and none is named to train on: give "
                "reward or reward_weights in [trainer.algorithm]"
            )
    if config.reward_model is None or REWARD_COLUMN in (name for _, name in named):
        return []
    return [
        f"reward_model is {config.reward_model!r}, and no setting names its reward: it is trained "
        f"on only where a rollout has no other; give reward = {REWARD_COLUMN!r}, or "
        f"{REWARD_COLUMN} among reward_weights, in [trainer.algorithm]"
    ]


def _named(config: LauncherConfig, settings: Collection[Any]) -> Iterator[tuple[str, str]]:
    """Each setting that names a reward, and the name."""
    for name in ("zero_variance_reward", "reward_name", "replay_reward_name"):
        yield f"launcher.{name}", getattr(config, name)
    for each in settings:
        if (algorithm := getattr(each, "algorithm", None)) is not None:
            yield "trainer.algorithm.reward", algorithm.reward
            yield from (("trainer.algorithm.reward_weights", w) for w in algorithm.reward_weights)
        if hasattr(each, "metric"):
            yield "evaluation.metric", each.metric
        if hasattr(each, "curriculum") and (each.max_samples or each.curriculum.share < 1):
            yield "dataloader.success_reward", each.success_reward


def _known(config: LauncherConfig, settings: Collection[Any]) -> Collection[str] | None:
    """Names of all rewards that a rollout has; None: only the first rollouts will tell."""
    loops = [each.rewards for each in settings if hasattr(each, "answer_pattern")]
    has_server = any(getattr(each, "reward_server", None) for each in settings)
    # A function may give several.
    if not loops or has_server or any(_is_function(how) for how in loops[0].values()):
        return None
    return [*loops[0], *([REWARD_COLUMN] if config.reward_model else [])]


def _is_function(how: str) -> bool:
    return ":" in how and not how.startswith("regex:")


def _check_known(setting: str, name: str, known: Collection[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    cure = f"did you mean {near[0]!r}?" if near else "name one of them"
    raise ConfigError(f"{setting} names {name!r}, and rollouts have {_shown(known)}: {cure}")


def _shown(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "no rewards"
