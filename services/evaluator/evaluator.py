"""Evaluates a run before, beside and after training; names the best checkpoint; ends early."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from seamflow.errors import NotFoundError, SeamflowError
from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.retry import retrying
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.weights.v1 import weight_service_pb2 as weight_pb

from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable, StartupError
from services.chassis.log import get_logger
from services.evaluator.clients import Clients, TrainerClient
from services.evaluator.config import EvaluatorConfig
from services.evaluator.evaluation import Evaluation, unless_lost
from services.evaluator.evaluation_log import EvaluationLog, line_of
from services.evaluator.held_version import VersionLost, await_loaded, held, manifest_of
from services.evaluator.pinned_rollouts import EvaluationFailed
from services.lib.evaluation import EvaluationLine, shown

_START_PATIENCE_SECONDS = 120.0
"""Time in which agents must take one of an evaluation's rollouts beside training; after it the
evaluation is given up, as training may be waiting for its rollout server."""

_LOOK_SECONDS = 0.5
_STEP = "step-"
_EVALUATIONS = metrics.counter(
    "evaluator", "evaluations_total", "Evaluations, by whether they have a result.", ("outcome",)
)
_SECONDS = metrics.histogram("evaluator", "evaluation_seconds", "Duration of an evaluation.")
_MEAN = metrics.gauge("evaluator", "mean", "Mean of the metric in the newest evaluation.")
_BEST = metrics.gauge("evaluator", "best_mean", "Mean of the metric in the best evaluation.")
_BEST_STEP = metrics.gauge("evaluator", "best_step", "Optimizer step of the best evaluation.")


class Evaluator:
    """The evaluations of one run.

    All that must survive is in evaluation.jsonl: an evaluation that was interrupted is repeated.
    """

    def __init__(
        self,
        config: EvaluatorConfig,
        clients: Clients,
        evaluation: Evaluation,
        trainer: TrainerClient,
    ) -> None:
        self._config, self._clients = config, clients
        self._trainer, self._is_ending = trainer, False
        self.evaluation = evaluation
        self.log = EvaluationLog(config.folder / "evaluation.jsonl", config)
        self.state: pb.EvaluatorState.ValueType = pb.EVALUATOR_STATE_BEFORE_TRAINING
        self.stopped_early = ""
        """Why training ended early; empty: it did not."""
        self.notes: list[str] = []

    async def run(self) -> None:
        """Evaluate until training has ended and its last weights are evaluated.

        Raises:
            ConfigError: the agents give no reward of the metric's name.
            DependencyUnavailable: no evaluation before or after training comes about.
        """
        await self._await_run()
        interrupted = await self.evaluation.forget_interrupted()
        if self._config.once_step is not None:
            await self._once(self._config.once_step)
        else:
            await self._before()
            if interrupted.startswith(_STEP):
                await self._again(int(interrupted.removeprefix(_STEP)))
            status = await self._beside_training()
            await self._after(status)
        if self._config.end_run:
            request = run_pb.EndRunRequest(run_id=self._config.run_id)
            await retrying(lambda: self._clients.runs.EndRun(request))
        self._enter(pb.EVALUATOR_STATE_FINISHED)

    def finish(self) -> None:
        """No further optimizer step comes: go on to the last evaluation."""
        self._is_ending = True

    async def _await_run(self) -> None:
        request = run_pb.GetRunRequest(run_id=self._config.run_id)
        while True:
            try:
                await retrying(lambda: self._clients.runs.GetRun(request))
                return
            except NotFoundError:
                get_logger().warning("run_not_found", run_id=self._config.run_id)
                await asyncio.sleep(_LOOK_SECONDS)
            except SeamflowError as error:  # such as a token that it does not accept
                raise DependencyUnavailable("trajectory_manager", str(error)) from error

    async def _once(self, step: int) -> None:
        if not self.log.completed:
            self.log.add(await self._alone("evaluation", 0, step, is_held=False))

    async def _before(self) -> None:
        """Evaluate the first weights, unless an interrupted run has already done so."""
        while not self.log.completed:
            manifest = await manifest_of(self._clients)
            version, step = (manifest.weight_version, manifest.step) if manifest else (0, 0)
            try:
                line = await self._unless_published(version, step, is_held=manifest is not None)
            except VersionLost as error:
                self._tell(str(error))
                continue
            await self._add(line)
        self._enter(pb.EVALUATOR_STATE_BESIDE_TRAINING)

    async def _unless_published(self, version: int, step: int, *, is_held: bool) -> EvaluationLine:
        """Evaluate the first weights, which no server can hold before they are published."""
        alone = asyncio.ensure_future(self._alone("before", version, step, is_held=is_held))
        if is_held:
            return await alone
        published = asyncio.ensure_future(self._published())
        try:
            return await unless_lost(alone, published)
        finally:
            published.cancel()

    async def _published(self) -> None:
        while True:
            await asyncio.sleep(4 * _LOOK_SECONDS)
            manifest = await self._newest()
            if manifest is not None:
                raise VersionLost(
                    f"weight version {manifest.weight_version} was published before the first "
                    "weights were evaluated: it is evaluated in their place; let evaluator of "
                    "[dataloader] name this process, so that tasks wait for it"
                )

    async def _beside_training(self) -> trainer_pb.GetStatusResponse:
        """Evaluate every so many steps until training has ended; its last state."""
        every = self._config.every_steps
        last = max((line.step for line in self.log.lines), default=0)
        while True:
            await self._stop_if_due()
            status = await self._trainer.status()
            if status is not None and (self._is_ending or _is_finished(status)):
                return status
            manifest = await self._newest() if every and not self.stopped_early else None
            if manifest is not None and manifest.step // every > last // every:
                due = await self._of_step(manifest.step - manifest.step % every, manifest)
                last = await self._beside(due.weight_version, due.step)
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _again(self, step: int) -> None:
        """Evaluate the step at which the evaluator was killed, if its weights are still there."""
        newest = await self._newest()
        if newest is None or any(line.step == step for line in self.log.lines):
            return
        due = await self._of_step(step, newest)
        if due.step == step:
            await self._beside(due.weight_version, due.step)
        else:
            self._tell(f"step {step}: its interrupted evaluation is left out: its weights are gone")

    async def _newest(self) -> weight_pb.Manifest | None:
        try:
            return await manifest_of(self._clients)
        except SeamflowError:
            return None

    async def _of_step(self, step: int, newest: weight_pb.Manifest) -> weight_pb.Manifest:
        """The version of a step that has a checkpoint, or the newest if that one is gone."""
        manifest: weight_pb.Manifest | None = newest
        while manifest is not None and manifest.step > step:
            try:
                manifest = await manifest_of(self._clients, manifest.weight_version - 1)
            except SeamflowError:
                return newest
        return manifest if manifest is not None and manifest.step == step else newest

    async def _after(self, status: trainer_pb.GetStatusResponse) -> None:
        """Evaluate the last weights, once a rollout server has them, unless that was done."""
        self._enter(pb.EVALUATOR_STATE_AFTER_TRAINING)
        step, version = status.step, status.weight_version
        if all(line.step != step for line in self.log.completed):
            await self._trainer.hold(step)
            await await_loaded(self._clients, version)
            await self._add(await self._alone("after", version, step, is_held=False))

    async def _alone(self, label: str, version: int, step: int, *, is_held: bool) -> EvaluationLine:
        """Evaluate while nothing is trained; failures end the process."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            if is_held:
                holding = held(self._clients, version, self._tell)
                kept = await stack.enter_async_context(holding)
                version, step = kept.weight_version, kept.step
            rollouts = self.evaluation.rollouts(label, version, self._config.concurrency_alone)
            rollouts.patience = self._config.silence_seconds or math.inf
            try:
                rewards = await self.evaluation.recorded(rollouts)
            except EvaluationFailed as error:
                raise DependencyUnavailable("evaluation", str(error)) from error
        await self.evaluation.show(rollouts, label, step)
        facts = self._facts(label, step, version)
        return line_of(rewards, self._config, seconds=_since(began), **facts)

    async def _beside(self, version: int, step: int) -> int:
        """Evaluate beside training, within the time limit; returns the step that was evaluated."""
        began, label = time.monotonic(), f"{_STEP}{step}"
        await self._trainer.hold(step)
        facts = self._facts(label, step, version)
        try:
            async with (
                asyncio.timeout(self._config.timeout_seconds),
                held(self._clients, version, self._tell) as kept,
            ):
                if kept.step != step:
                    await self._trainer.hold(kept.step)
                facts |= {"step": kept.step, "weight_version": kept.weight_version}
                concurrency = self._config.concurrency
                rollouts = self.evaluation.rollouts(label, kept.weight_version, concurrency)
                rollouts.start_patience = _START_PATIENCE_SECONDS
                running = asyncio.ensure_future(self.evaluation.recorded(rollouts))
                rewards = await unless_lost(running, kept.lost)
        except TimeoutError:
            limit = f"{self._config.timeout_seconds:g} s of evaluation.timeout_seconds"
            await self._give_up(f"it took longer than the {limit}", facts, began)
        except (EvaluationFailed, VersionLost, StartupError, SeamflowError) as error:
            await self._give_up(str(error), facts, began)
        else:
            facts["metric"] = self.evaluation.metric
            await self.evaluation.show(rollouts, label, int(str(facts["step"])))
            await self._add(line_of(rewards, self._config, seconds=_since(began), **facts))
        return int(str(facts["step"]))

    def _facts(self, label: str, step: int, version: int) -> dict[str, object]:
        metric = self.evaluation.metric
        return {"label": label, "step": step, "weight_version": version, "metric": metric}

    async def _add(self, line: EvaluationLine) -> None:
        """Record a result: best checkpoint, file, metrics, trackers."""
        assert line.mean is not None
        is_best = self.log.is_better(line.mean)
        checkpoint = await self._keep(line) if is_best else None
        await self._trainer.hold(0)
        line = replace(line, is_best=is_best, checkpoint=checkpoint)
        self.log.add(line)
        self._tell(shown(line))
        _observe(line)
        await self._trainer.track(line)

    async def _keep(self, line: EvaluationLine) -> str | None:
        """Let the trainer keep the checkpoint of the best step; its folder, if there is one."""
        if not self._config.keep_best or line.step == 0:
            return None
        folder = await self._trainer.keep(line)
        if folder is None:
            self._tell(
                f"step {line.step} is the best so far, but has no checkpoint to keep: let "
                "trainer.checkpoint.every divide evaluation.every_steps"
            )
        return folder

    async def _give_up(self, reason: str, facts: dict[str, object], began: float) -> None:
        await self._trainer.hold(0)
        line = EvaluationLine(
            num_tasks=self.evaluation.num_tasks,
            num_rollouts=0,
            mean=None,
            abandoned=reason,
            seconds=_since(began),
            **facts,  # type: ignore[arg-type]
        )
        self.log.add(line)
        self._tell(f"step {line.step}: the evaluation was given up: {reason}")
        _observe(line)

    async def _stop_if_due(self) -> None:
        """End training early; repeated, as a trainer that is restarted has forgotten it."""
        reason = self.log.stop_reason if self._config.every_steps else None
        if reason is None:
            return
        if not self.stopped_early:
            self.stopped_early = reason
            self._tell(f"training ends early: {reason}")
        await self._trainer.finish()

    def _enter(self, state: pb.EvaluatorState.ValueType) -> None:
        self.state = state
        get_logger().info("state", state=pb.EvaluatorState.Name(state))

    def _tell(self, text: str) -> None:
        self.notes.append(text)
        get_logger().info("note", text=text)


def _observe(line: EvaluationLine) -> None:
    _EVALUATIONS.labels("given_up" if line.mean is None else "completed").inc()
    _SECONDS.observe(line.seconds)
    if line.mean is not None:
        _MEAN.set(line.mean)
        if line.is_best:
            _BEST.set(line.mean)
            _BEST_STEP.set(line.step)


def _is_finished(status: trainer_pb.GetStatusResponse) -> bool:
    return status.state == trainer_pb.TRAINER_STATE_FINISHED


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)
