"""What has to be there before the first process of a run starts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from services.chassis.errors import ConfigError
from services.launcher.checks.groups import check_groups
from services.launcher.checks.process_settings import process_setting
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.lib.evaluation.evaluation_config import EvaluationConfig
from services.lib.model_files.end_ids import warn_of_end
from services.lib.model_files.model_folder import (
    check_chat_template,
    check_classifier,
    check_model_folder,
)
from services.lib.model_files.same_tokens import check_same_tokens
from services.lib.model_files.text_config import check_attention

_EMBEDDED = "torch"
_MIN_FREE_BYTES = 512 * 1024 * 1024


def check_prerequisites(config: LauncherConfig, layout: Layout) -> None:
    """Check the prerequisites before the first process starts."""
    check_groups(config, layout.config_file)
    if process_setting(config, layout.config_file, "agent_runner"):
        raise ConfigError(
            "the file has a table [agent_runner], which no process reads: give agent, "
            "concurrency and rollout_timeout in [launcher], others by --set agent_runner.NAME=VALUE"
        )
    if config.prepare is None:
        _check_model(config, layout)
        path = config.tasks
        if path is not None and ":" not in path and not Path(layout.path(path)).is_file():
            raise ConfigError(f"tasks {path!r} does not exist")
    _check_space(config, layout)


def _check_space(config: LauncherConfig, layout: Layout) -> None:
    parent = layout.folder if layout.folder.exists() else layout.folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        raise ConfigError(
            f"runs_folder {config.runs_folder!r} has {free >> 20} MiB free: a run needs at least "
            f"{_MIN_FREE_BYTES >> 20} MiB; free some, or give --runs-folder on another disk"
        )


def _check_model(config: LauncherConfig, layout: Layout) -> None:
    folder = Path(layout.path(config.model))
    try:
        check_model_folder(folder)
        if not config.raw_tokens:
            check_chat_template(folder)
            if (warning := warn_of_end(folder)) is not None:
                print(f"launcher: warning: {warning}", file=sys.stderr)
        if engine_of(config, layout) in (None, _EMBEDDED):
            check_attention(folder)
        _check_other_models(config, layout, folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_other_models(config: LauncherConfig, layout: Layout, policy: Path) -> None:
    """Check reference and critic, which get the policy's token ids; a reward model gets text."""
    critic = process_setting(config, layout.config_file, "trainer.critic_model")
    for name, given in (("reference", config.reference), ("trainer.critic_model", critic)):
        if given is not None:
            folder = Path(layout.path(str(given)))
            check_model_folder(folder)
            check_same_tokens(policy, folder, name)
    if config.reward_model is not None:
        check_classifier(Path(layout.path(config.reward_model)))


def engine_of(config: LauncherConfig, layout: Layout) -> object:
    """The engine that the file or --set gives; None: it is not given."""
    return process_setting(config, layout.config_file, "rollout_server.engine")


def check_evaluation(config: LauncherConfig, evaluation: EvaluationConfig) -> None:
    """Check that there is something to evaluate on, as it should be."""
    has_tasks = evaluation.tasks or config.heldout_tasks or config.num_heldout
    if evaluation.every_steps and not has_tasks:
        raise ConfigError(
            f"evaluation.every_steps is {evaluation.every_steps}, but there are no held-out tasks: "
            "give tasks in [evaluation], or num_heldout in [launcher] for an environment's own"
        )
    tasks = evaluation.tasks or config.heldout_tasks or ""
    if tasks.startswith("environment://"):
        raise ConfigError(
            f"held-out tasks are {tasks!r}: give num_heldout in [launcher] for those of the "
            "environment"
        )


def check_program(plans: Mapping[str, ProcessPlan]) -> None:
    """Raise `ConfigError` if the agent's program is not there."""
    agent = plans.get("agent")
    if agent is not None and shutil.which(agent.command[0], path=agent.environment["PATH"]) is None:
        raise ConfigError(
            f"agent_command starts {agent.command[0]!r}, and there is no such program: give its "
            "path, or install it"
        )
