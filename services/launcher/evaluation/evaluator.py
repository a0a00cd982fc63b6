"""Evaluates a run before, beside and after training; keeps the best checkpoint; ends early."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
from seamflow.errors import SeamflowError
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.chassis.errors import DependencyUnavailable, StartupError
from services.launcher.checks.trained_rewards import trained_rewards
from services.launcher.config import LauncherConfig
from services.launcher.evaluation.best_checkpoint import BestCheckpoint
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.evaluation_log import EvaluationLine, EvaluationLog, line_of
from services.launcher.evaluation.evaluation_samples import EvaluationSamples
from services.launcher.evaluation.held_version import VersionLost, held, manifest_of
from services.launcher.evaluation.heldout_tasks import (
    environment_tasks,
    heldout_fields,
    pinned_task,
    read_tasks,
)
from services.launcher.evaluation.pinned_rollouts import EvaluationFailed, PinnedRollouts, cancel
from services.launcher.layout import Layout
from services.launcher.process_plan import environment_addresses
from services.launcher.service_clients import Services
from services.launcher.view import View
from services.lib.tasks.task_rows import TaskRow

__all__ = ["Evaluator", "shown"]

_PATIENCE_SECONDS = 120.0
"""Time without a finished rollout after which the agent runner is taken to be broken."""
_LOOK_SECONDS = 0.5
_ALONE_FACTOR = 2
"""Rollouts in flight, over those of the agents, while nothing is trained."""
_RUNNING = "evaluation.running.json"


class Evaluator:
    """The evaluations of one run."""

    def __init__(
        self,
        settings: EvaluationConfig,
        config: LauncherConfig,
        layout: Layout,
        services: Services,
        view: View,
    ) -> None:
        self._settings, self._config, self._layout = settings, config, layout
        self._services, self._view = services, view
        self._metric = settings.metric or config.success
        self._trained_rewards = trained_rewards(config, layout.config_file)
        self._tasks: list[TaskRow] = []
        self._is_ending = False
        self._running_file = layout.folder / _RUNNING
        self._best = BestCheckpoint(layout.folder / "checkpoints")
        self._samples = EvaluationSamples(
            layout.folder / "evaluation_samples.jsonl", Path(layout.path(config.model))
        )
        self.log = EvaluationLog(layout.folder / "evaluation.jsonl", settings)
        """Results so far."""
        self.stopped_early = ""
        """Why training ended early; empty: it did not."""

    async def before(self) -> None:
        """Evaluate the first weights, unless an interrupted run has already done so."""
        await self._read_tasks()
        if not self._tasks:
            return
        await self._forget_interrupted()
        if not self.log.completed:
            self._view.phase("held-out tasks before training")
            manifest = await manifest_of(self._services)
            version, step = (manifest.weight_version, manifest.step) if manifest else (0, 0)
            line = await self._alone("before", version, step, is_held=manifest is not None)
            await self._add(line)

    async def beside(self) -> None:
        """Evaluate every so many steps until `ending`; never raises because of an evaluation."""
        every = self._settings.every_steps
        if not (self._tasks and every):
            return
        last = max((line.step for line in self.log.lines), default=0)
        while not self._is_ending:
            await self._stop_if_due()
            manifest = None if self.stopped_early else await manifest_of(self._services)
            if manifest is not None and manifest.step // every > last // every:
                last = await self._beside(manifest.weight_version, manifest.step)
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    def ending(self) -> None:
        """Let `beside` return after the evaluation in progress."""
        self._is_ending = True

    async def after(self, version: int, step: int) -> None:
        """Evaluate the last weights, which every rollout server has, unless that was done."""
        if self._tasks and all(line.step != step for line in self.log.completed):
            self._view.phase("held-out tasks after training")
            self._best.hold(step)
            await self._add(await self._alone("after", version, step, is_held=False))

    async def only(self, step: int) -> EvaluationLine:
        """Evaluate the model that the rollout servers started with, of a run without a trainer."""
        await self._read_tasks()
        self._view.phase(f"{len(self._tasks)} tasks, {self._settings.samples} rollouts each")
        line = await self._alone("evaluation", 0, step, is_held=False)
        self.log.add(line)
        return line

    async def _read_tasks(self) -> None:
        tasks = self._settings.tasks or self._config.heldout_tasks
        if tasks is not None:
            fields = heldout_fields(self._config, self._settings, self._layout.config_file)
            named = self._layout.path(tasks)
            self._tasks = await asyncio.to_thread(read_tasks, named, fields, self._config.seed)
        elif self._config.num_heldout and self._config.runs_environment:
            address = environment_addresses(self._config, self._layout)[0]
            self._tasks = await environment_tasks(self._config, address)

    async def _alone(self, label: str, version: int, step: int, *, is_held: bool) -> EvaluationLine:
        """Evaluate while nothing is trained; failures end the run."""
        began = time.monotonic()
        concurrency = _ALONE_FACTOR * max(self._config.concurrency, self._settings.concurrency)
        async with AsyncExitStack() as stack:
            if is_held:
                holding = held(self._services, self._config, version, self._view.note)
                kept = await stack.enter_async_context(holding)
                version, step = kept.weight_version, kept.step
            rollouts = self._rollouts(label, version, concurrency)
            # Of agents with programs of their own nobody knows when they come.
            is_runner = self._config.runner_agent is not None
            rollouts.patience = _PATIENCE_SECONDS if is_runner else math.inf
            try:
                rewards = await self._recorded(rollouts, self._view.progress)
            except EvaluationFailed as error:
                raise DependencyUnavailable("evaluation", str(error)) from error
        await self._show(rollouts, label, step)
        facts = {"label": label, "step": step, "weight_version": version, "metric": self._metric}
        return line_of(rewards, self._settings, seconds=_since(began), **facts)

    async def _beside(self, version: int, step: int) -> int:
        """Evaluate beside training, within the time limit; returns the step that was evaluated."""
        began, label = time.monotonic(), f"step-{step}"
        self._best.hold(step)
        facts = {"label": label, "step": step, "weight_version": version, "metric": self._metric}
        try:
            async with (
                asyncio.timeout(self._settings.timeout_seconds),
                held(self._services, self._config, version, self._view.note) as kept,
            ):
                if kept.step != step:
                    self._best.hold(kept.step)
                facts |= {"step": kept.step, "weight_version": kept.weight_version}
                rollouts = self._rollouts(label, kept.weight_version, self._settings.concurrency)
                rollouts.start_patience = self._settings.start_patience_seconds
                rewards = await _unless_lost(self._recorded(rollouts, _no_progress), kept.lost)
        except TimeoutError:
            reason = (
                f"it took longer than the {self._settings.timeout_seconds:g} s of "
                "evaluation.timeout_seconds"
            )
            await self._give_up(reason, facts, began)
        except (EvaluationFailed, VersionLost, StartupError, SeamflowError) as error:
            await self._give_up(str(error), facts, began)
        else:
            facts["metric"] = self._metric
            await self._show(rollouts, label, int(str(facts["step"])))
            await self._add(line_of(rewards, self._settings, seconds=_since(began), **facts))
        return int(str(facts["step"]))

    def _rollouts(self, label: str, version: int, concurrency: int) -> PinnedRollouts:
        return PinnedRollouts(
            services=self._services,
            tasks=self._tasks,
            # A repeated evaluation never meets the tasks of one that was interrupted.
            label=f"{label}.{secrets.token_hex(4)}",
            weight_version=version,
            samples=self._settings.samples,
            concurrency=concurrency,
            metric=self._metric,
            trained_rewards=self._trained_rewards,
            num_shown=self._settings.shown_rollouts,
        )

    async def _recorded(
        self, rollouts: PinnedRollouts, progress: Callable[[int, int], None]
    ) -> dict[str, list[float]]:
        """Run the rollouts; a file names them meanwhile, for the next start after a crash."""
        facts = {"label": rollouts.label, "weight_version": rollouts.weight_version}
        self._running_file.write_text(json.dumps(facts))
        await rollouts.run(progress)
        self._running_file.unlink(missing_ok=True)
        self._metric = rollouts.metric or "success"
        return rollouts.rewards

    async def _show(self, rollouts: PinnedRollouts, label: str, step: int) -> None:
        if rollouts.shown:
            await asyncio.to_thread(self._samples.add, rollouts.shown, label, step)

    async def _forget_interrupted(self) -> None:
        """Take back what an interrupted launcher left queued, and its half kept checkpoint."""
        self._best.recover()
        try:
            facts = json.loads(self._running_file.read_text())
        except (OSError, ValueError):
            return
        label, version = facts["label"], facts["weight_version"]
        left = {pinned_task(task, label, version, 1).task_id for task in self._tasks}
        await cancel(self._services, left)
        self._running_file.unlink(missing_ok=True)

    async def _add(self, line: EvaluationLine) -> None:
        """Record a result: file, terminal, trackers, best checkpoint."""
        assert line.mean is not None
        is_best = self.log.is_better(line.mean)
        checkpoint = self._keep(line) if is_best else None
        self._best.drop()
        line = EvaluationLine(**{**asdict(line), "is_best": is_best, "checkpoint": checkpoint})
        self.log.add(line)
        self._view.note(shown(line))
        await self._track(line)

    def _keep(self, line: EvaluationLine) -> str | None:
        """Keep the candidate as the best checkpoint; its folder, if there is one."""
        if not self._settings.keep_best or line.step == 0:
            return None
        facts = {
            "step": line.step,
            "weight_version": line.weight_version,
            "metric": line.metric,
            "value": line.mean,
            "interval": line.interval,
        }
        try:
            return str(self._best.keep(facts))
        except OSError:
            self._view.note(
                f"step {line.step} is the best so far, but has no checkpoint to keep: let "
                "trainer.checkpoint.every divide evaluation.every_steps"
            )
            return None

    async def _give_up(self, reason: str, facts: dict[str, object], began: float) -> None:
        self._best.drop()
        line = EvaluationLine(
            num_tasks=len(self._tasks),
            num_rollouts=0,
            mean=None,
            abandoned=reason,
            seconds=_since(began),
            **facts,  # type: ignore[arg-type]
        )
        self.log.add(line)
        self._view.note(f"step {line.step}: the evaluation was given up: {reason}")

    async def _stop_if_due(self) -> None:
        reason = self.log.stop_reason
        if reason is None:
            return
        if not self.stopped_early:
            self.stopped_early = reason
            self._view.note(f"training ends early: {reason}")
        # Repeated, as a trainer that is restarted has forgotten it.
        try:
            await self._services.trainer.FinishTraining(
                trainer_pb.FinishTrainingRequest(), timeout=5.0
            )
        except grpc.aio.AioRpcError:
            return

    async def _track(self, line: EvaluationLine) -> None:
        request = trainer_pb.TrackEvaluationRequest(step=line.step, numbers=_numbers(line))
        try:
            await self._services.trainer.TrackEvaluation(request, timeout=5.0)
        except grpc.aio.AioRpcError:
            return  # the trackers lack it; evaluation.jsonl has it


def shown(line: EvaluationLine) -> str:
    """The result as one line for people."""
    margin = "" if line.interval is None else f" ± {(line.interval[1] - line.interval[0]) / 2:.2f}"
    passed = [f"pass@{k} {value:.2f}" for k, value in (line.pass_at or {}).items() if k != "1"]
    best = " (best so far)" if line.is_best else ""
    return ", ".join([f"step {line.step}: {line.metric} {line.mean:.2f}{margin}{best}", *passed])


def _numbers(line: EvaluationLine) -> dict[str, float]:
    assert line.mean is not None
    low, high = line.interval or (line.mean, line.mean)
    passes = {f"pass_at_{k}": value for k, value in (line.pass_at or {}).items()}
    return {"mean": line.mean, "low": low, "high": high, **passes}


async def _unless_lost(
    work: Coroutine[None, None, dict[str, list[float]]], lost: asyncio.Future[None]
) -> dict[str, list[float]]:
    """The result of `work`, or the error of `lost` if that comes first."""
    working = asyncio.ensure_future(work)
    try:
        either: set[asyncio.Future[Any]] = {working, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await lost
        return await working
    finally:
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def _no_progress(done: int, total: int) -> None:
    """Beside training the bar shows the steps."""


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)
