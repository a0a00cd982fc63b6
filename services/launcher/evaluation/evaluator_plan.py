"""The evaluator's process, and its settings: [evaluation], and what other tables say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError, ExitCode
from services.launcher.checks.run_settings import process_setting, trained_rewards
from services.launcher.child_process import ProcessPlan, checking, service
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, environment_addresses
from services.lib.evaluation.evaluation_config import EvaluationConfig
from services.lib.tasks.task_rows import RowFields

CHECK_HELDOUT = "services.evaluator.check_heldout"
"""Reads all held-out tasks."""
_ALONE_FACTOR = 2
"""Rollouts in flight, over those of the agents, while nothing is trained."""
_SILENCE_SECONDS = 120.0
"""Time without a finished rollout after which the agent runner is taken to be broken."""


def evaluators(
    config: LauncherConfig,
    evaluation: EvaluationConfig,
    layout: Layout,
    once_step: int | None = None,
) -> list[ProcessPlan]:
    """The evaluator, if there is something to evaluate on; `once_step`: it waits for no training.

    A failure before or after training ends the run: no later start would help.
    """
    tasks = heldout(config, evaluation, layout)
    if not tasks or config.serve:
        return []
    evaluator = service(
        "evaluator",
        "services.evaluator",
        layout,
        **_given(evaluation),
        **_resolved(config, evaluation, layout),
        **tasks,
        **({} if once_step is None else {"once_step": once_step}),
    )
    is_prepared = config.prepare is not None and "{run}" in _named(config, evaluation)
    check = None if is_prepared else checking(CHECK_HELDOUT, layout)
    fatal = (*evaluator.fatal, ExitCode.UNAVAILABLE)
    return [replace(evaluator, check=check, fatal=fatal)]


def heldout(
    config: LauncherConfig, evaluation: EvaluationConfig, layout: Layout
) -> Mapping[str, object]:
    """Which held-out tasks, as settings of the evaluator; none: there is no evaluation."""
    if tasks := _named(config, evaluation):
        return {"tasks": layout.path(tasks)}
    if config.num_heldout and config.runs_environment:
        address = environment_addresses(config, layout)[0]
        return {"tasks": f"environment://{address}", "num_heldout": config.num_heldout}
    return {}


def _named(config: LauncherConfig, evaluation: EvaluationConfig) -> str:
    return evaluation.tasks or config.heldout_tasks or ""


def _given(evaluation: EvaluationConfig) -> Mapping[str, str]:
    """What [evaluation] sets and no other table completes."""
    own = EvaluationConfig.model_fields.keys() - ServerConfig.model_fields.keys()
    completed = {*RowFields.__dataclass_fields__, "tasks", "metric"}
    names = sorted((own & evaluation.model_fields_set) - completed)
    values = {name: getattr(evaluation, name) for name in names}
    return {name: _text(value) for name, value in values.items() if value is not None}


def _resolved(
    config: LauncherConfig, evaluation: EvaluationConfig, layout: Layout
) -> Mapping[str, object]:
    fields = heldout_fields(config, evaluation, layout.config_file)
    rows = {name: _text(getattr(fields, name)) for name in RowFields.__dataclass_fields__}
    token = config.environment_token
    return {
        **rows,
        "metric": evaluation.metric or config.success,
        "run_id": layout.run_id,
        "trajectory_manager": layout.address("trajectory_manager"),
        "weights": layout.address("weights"),
        "scheduler": layout.address("scheduler"),
        "trainer": layout.address("trainer"),
        "folder": layout.folder,
        "model": layout.path(config.model),
        "seed": config.seed,
        "concurrency_alone": _ALONE_FACTOR * max(config.concurrency, evaluation.concurrency),
        # Of agents with programs of their own nobody knows when they come.
        "silence_seconds": 0 if config.runner_agent is None else _SILENCE_SECONDS,
        "trained_rewards": json.dumps([*trained_rewards(config, layout.config_file)]),
        # The launcher ends the run.
        "end_run": "false",
        **({} if token is None else {"environment_token": token.get_secret_value()}),
    }


def _text(value: object) -> str:
    """A value as a variable of the environment."""
    return value if isinstance(value, str) else json.dumps(value)


def heldout_fields(
    config: LauncherConfig, evaluation: EvaluationConfig, config_file: Path
) -> RowFields:
    """The fields of held-out rows: those of [evaluation], else of training."""
    given: dict[str, Any] = {}
    for name in RowFields.__dataclass_fields__:
        value = getattr(evaluation, name)
        if value is None:
            value = process_setting(config, config_file, f"dataloader.{name}")
            value = _table(name, value) if name == "payload" else value
        if value is not None:
            given[name] = value
    return RowFields(**given)


def _table(name: str, value: object) -> object:
    """A table that `set` or a variable gave as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"dataloader.{name} is {value!r}, which is no JSON: {error}") from error
