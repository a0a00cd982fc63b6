"""The evaluator from the side of the launcher: its process and settings, and what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError, ExitCode
from services.launcher.checks.run_settings import process_setting, trained_rewards
from services.launcher.child_process import ProcessPlan, checking, service
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, environment_addresses
from services.launcher.report.view import View
from services.lib.evaluation import EvaluationConfig
from services.lib.tasks.task_rows import RowFields

if TYPE_CHECKING:
    from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceAsyncStub


CHECK_HELDOUT = "services.evaluator.heldout_tasks"
_ALONE_FACTOR = 2
"""Rollouts in flight, over those of the agents, while nothing is trained."""
_SILENCE_SECONDS = 120.0
"""Time without a finished rollout after which the agent runner is taken to be broken."""

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
AROUND_TRAINING: Mapping[pb.EvaluatorState.ValueType, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "held-out tasks before training",
    pb.EVALUATOR_STATE_AFTER_TRAINING: "held-out tasks after training",
}
"""States that are phases of a run: beside training the phase is another one."""
WITHOUT_TRAINING: Mapping[pb.EvaluatorState.ValueType, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "held-out tasks",
}
"""Of a model that is evaluated once."""


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


class FollowedEvaluator:
    """What the evaluator of a run says; the supervisor tells whether it lives."""

    def __init__(
        self,
        evaluator: EvaluatorServiceAsyncStub,
        run_id: str,
        view: View,
        phases: Mapping[pb.EvaluatorState.ValueType, str] = AROUND_TRAINING,
    ) -> None:
        self._evaluator, self._run_id = evaluator, run_id
        self._view, self._phases = view, phases
        self._num_notes, self._shown = 0, pb.EVALUATOR_STATE_UNSPECIFIED
        self._state: pb.EvaluatorState.ValueType = pb.EVALUATOR_STATE_UNSPECIFIED
        self.stopped_early = ""
        """Why it ended training early; empty: it did not."""

    async def until(self, state: pb.EvaluatorState.ValueType) -> None:
        while self._state < state:
            await self._look()
            if self._state < state:
                await asyncio.sleep(_LOOK_SECONDS)

    async def finished(self, *, is_asked: bool) -> None:
        """Follow it to its end; `is_asked`: the trainer does not finish by itself."""
        while self._state != pb.EVALUATOR_STATE_FINISHED:
            if is_asked:  # again, as one that is restarted has forgotten it
                await self._ask_to_finish()
            await self._look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def follow(self) -> None:
        await self._view.repeat("following the evaluator", self._look, 2 * _LOOK_SECONDS)

    async def _look(self) -> None:
        request = pb.GetEvaluationsRequest(run_id=self._run_id, num_known_notes=self._num_notes)
        try:
            answer = await self._evaluator.GetEvaluations(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return  # restarting
        for note in answer.notes:
            self._view.note(note)
        self._num_notes, self._state = answer.num_notes, answer.state
        self.stopped_early = answer.stopped_early or self.stopped_early
        self._show(answer)

    def _show(self, answer: pb.GetEvaluationsResponse) -> None:
        """The phase and the bar; beside training the bar shows the steps."""
        phase = self._phases.get(answer.state)
        if phase is None or not answer.num_rollouts:
            return
        if answer.state != self._shown:
            self._shown = answer.state
            self._view.phase(phase)
        self._view.progress(answer.num_done, answer.num_rollouts)

    async def _ask_to_finish(self) -> None:
        request = pb.FinishEvaluationsRequest(run_id=self._run_id)
        try:
            await self._evaluator.FinishEvaluations(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return  # restarting
