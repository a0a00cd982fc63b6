"""Runs the held-out tasks with one weight version; a file names the evaluation meanwhile."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from seamflow.client.transcript import transcript
from seamflow.token_text import Decode, load_decoder, token_numbers
from seamflow.trajectory.v1 import trajectory_pb2

from services.evaluator.clients import Clients
from services.evaluator.config import EvaluatorConfig
from services.evaluator.pinned_rollouts import PinnedRollouts, cancel
from services.lib.evaluation import pinned_task
from services.lib.tasks.task_rows import TaskRow

_RUNNING = "evaluation.running.json"

T = TypeVar("T")


class Evaluation:
    """Runs the held-out tasks, again and again; at most one evaluation is in progress."""

    def __init__(self, config: EvaluatorConfig, clients: Clients, tasks: Sequence[TaskRow]) -> None:
        self._config, self._clients, self._tasks = config, clients, tasks
        self._running_file = config.folder / _RUNNING
        model = config.model or config.folder  # a folder without a tokenizer
        self._samples = EvaluationSamples(config.folder / "evaluation_samples.jsonl", model)
        self.metric = config.metric
        """Reward that is averaged; empty: the first rollout that finishes will choose it."""
        self.num_done = 0
        """Finished rollouts of the one in progress."""
        self.num_rollouts = 0
        """All rollouts of the one in progress; 0: there is none."""

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def rollouts(self, label: str, version: int, concurrency: int) -> PinnedRollouts:
        """The rollouts of an evaluation, not submitted yet."""
        return PinnedRollouts(
            services=self._clients,
            tasks=self._tasks,
            # A repeated evaluation never meets the tasks of one that was interrupted.
            label=f"{label}.{secrets.token_hex(4)}",
            weight_version=version,
            samples=self._config.samples,
            concurrency=concurrency,
            metric=self.metric,
            trained_rewards=self._config.trained_rewards,
            num_shown=self._config.shown_rollouts,
        )

    async def recorded(self, rollouts: PinnedRollouts) -> dict[str, list[float]]:
        """Run the rollouts; a file names them meanwhile, for the next start after a crash.

        Raises what `PinnedRollouts.run` raises.
        """
        facts = {"label": rollouts.label, "weight_version": rollouts.weight_version}
        self._running_file.write_text(json.dumps(facts))
        try:
            await rollouts.run(self._progress)
        finally:
            self._progress(0, 0)
        self._running_file.unlink(missing_ok=True)
        self.metric = rollouts.metric or "success"
        return rollouts.rewards

    async def show(self, rollouts: PinnedRollouts, label: str, step: int) -> None:
        """Write some of the rollouts for people."""
        if rollouts.shown:
            await asyncio.to_thread(self._samples.add, rollouts.shown, label, step)

    async def forget_interrupted(self) -> str:
        """Take back what an interrupted evaluator left queued; returns its label, "" if none."""
        try:
            facts = json.loads(self._running_file.read_text())
        except (OSError, ValueError):
            return ""
        label, version = facts["label"], facts["weight_version"]
        left = {pinned_task(task, label, version, 1).task_id for task in self._tasks}
        await cancel(self._clients, left)
        self._running_file.unlink(missing_ok=True)
        return str(label).partition(".")[0]

    def _progress(self, done: int, total: int) -> None:
        self.num_done, self.num_rollouts = done, total


async def unless_lost(work: asyncio.Future[T], lost: asyncio.Future[None]) -> T:
    """The result of `work`, or the error of `lost` if that comes first."""
    try:
        either: set[asyncio.Future[Any]] = {work, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await lost
        return await work
    finally:
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(work, return_exceptions=True)


class EvaluationSamples:
    """Appends transcripts; each has the label and the step of its evaluation too."""

    def __init__(self, file: Path, model: Path) -> None:
        """`model` is the folder whose tokenizer gives the text; without one, ids are written."""
        self._file, self._model = file, model
        self._decode: Decode | None = None

    def add(self, shown: Sequence[trajectory_pb2.Trajectory], label: str, step: int) -> None:
        """Append rollouts of an evaluation. Blocks while the tokenizer is loaded."""
        if self._decode is None:
            self._decode = _decoder(self._model)
        facts = {"evaluation": label, "step": step}
        rows = [{**facts, **transcript(each, self._decode)} for each in shown]
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _decoder(model: Path) -> Decode:
    try:
        return load_decoder(model)
    except ValueError:
        return token_numbers
