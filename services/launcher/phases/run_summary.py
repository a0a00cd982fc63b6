"""The summary of a run, from its files and what its services stored."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from seamflow.inspect.failure_causes import causes
from seamflow.inspect.lives import Life, Period, lives, stops
from seamflow.inspect.progress import WINDOW, Progress
from seamflow.inspect.run_files import read_steps
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.phases.training import Learned
from services.launcher.phases.watch import Watch
from services.launcher.report import mechanisms
from services.launcher.report.notes import HealthNotes
from services.launcher.report.occupancy import draw_run
from services.launcher.report.summary import (
    TrajectoryFigures,
    audit_figures,
    num_weight_updates,
    package_versions,
    tail_ratio,
    trajectories,
)
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from services.lib.evaluation import (
    EvaluationConfig,
    EvaluationLine,
    best_of,
    read_evaluations,
)


def learned(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[EvaluationLine],
    settings: EvaluationConfig,
    seconds: float,
) -> dict[str, object]:
    """Reward first and last, held-out before, best and after, and trained tokens per second.

    Rewards are means of the first and of the last `WINDOW` steps, or of fewer, so that no step is
    in both; one step alone has no last. Tokens are those of all steps, over the `seconds` of
    training of all lives.
    """
    progress = Progress(steps=steps)
    rewards = progress.all("reward_mean")
    window = max(1, min(WINDOW, len(rewards) // 2))
    tokens = sum(progress.all("num_tokens"))
    return {
        "reward_first": round(fmean(rewards[:window]), 4) if rewards else None,
        "reward_last": round(fmean(rewards[-window:]), 4) if len(rewards) > 1 else None,
        **_figures(evaluations),
        "success_rule": f"reward > {settings.success_above:g}",
        "best_note": _best_note(evaluations, settings),
        "trained_tokens_per_second": round(tokens / seconds, 1) if seconds else None,
    }


def _figures(evaluations: Sequence[EvaluationLine]) -> dict[str, object]:
    """Held-out figures of all evaluations with a result."""
    lines = [line for line in evaluations if line.mean is not None]
    best = best_of(lines)
    return {
        "heldout_metric": lines[-1].metric if lines else None,
        "heldout_before": lines[0].mean if lines else None,
        "heldout_after": lines[-1].mean if lines else None,
        "pass_at_1_before": (lines[0].pass_at or {}).get("1") if lines else None,
        "pass_at_1_after": (lines[-1].pass_at or {}).get("1") if lines else None,
        "heldout_tasks": lines[0].num_tasks if lines else 0,
        "evaluations": len(lines),
        "heldout_best": best.mean if best else None,
        "best_step": best.step if best else None,
        "best_checkpoint": best.checkpoint if best else None,
    }


def _best_note(evaluations: Sequence[EvaluationLine], settings: EvaluationConfig) -> str:
    """Why there is no checkpoint of the best step; empty: there is one."""
    best = best_of(evaluations)
    if best is None:
        return "no best checkpoint: nothing was evaluated; give held-out tasks in [evaluation]"
    if best.checkpoint is not None:
        return ""
    if best.step == 0:
        return (
            "no best checkpoint: no evaluation was better than the first one, of the model that "
            "the run started with"
        )
    if not settings.keep_best:
        return "no best checkpoint: evaluation.keep_best is false"
    return (
        f"no best checkpoint: the best step, {best.step}, has none to keep; let "
        "trainer.checkpoint.every divide evaluation.every_steps"
    )


def failure_lines(
    trajectories: Iterable[trajectory_pb2.Trajectory], stops: Sequence[Period] = ()
) -> list[str]:
    """A line for each cause of failed rollouts, the most frequent first."""
    return [f"{each.number} × {each.line}. {each.cure}" for each in causes(trajectories, stops)]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Sums up a run that has ended, while its services still answer."""

    config: LauncherConfig
    layout: Layout
    evaluation: EvaluationConfig
    learned: Learned
    watch: Watch
    processes: Supervisor
    services: Services

    async def made(self, start: float) -> dict[str, Any]:
        """The summary by the names of summary.json, and the pictures in the run's folder.

        `start` of this life, by the monotonic clock.
        """
        stored = [trajectory async for trajectory in trajectories(self.services)]
        folder = self.layout.folder
        found = lives(folder)
        before, cut = found[:-1], stops(found)
        seconds = self.learned.seconds + sum(life.learning_seconds(0.0) for life in before)
        steps = read_steps(folder / "metrics.jsonl")
        evaluations = read_evaluations(folder / "evaluation.jsonl")
        draw_run(folder, steps, evaluations, self.watch.occupancy)
        lasted = time.monotonic() - start + sum(life.seconds(0.0) for life in before)
        return {
            "run": self.layout.run_id,
            "seed": self.config.seed,
            "lives": len(before) + 1,
            **learned(steps, evaluations, self.evaluation, seconds),
            "health": await self._health(),
            "failures": failure_lines(stored, cut),
            "stopped_early": self.learned.stopped_early,
            "optimizer_steps": len(steps),
            "weight_updates": num_weight_updates(steps),
            **self._rollouts(stored, cut),
            "max_staleness_seen": max((step["max_staleness"] for step in steps), default=0),
            **await self._processes(before),
            "mechanisms": await self._mechanisms(steps),
            "nodes": self.watch.occupancy.shares(),
            "cores_busy": f"{self.learned.cores_busy:.2f} of {os.cpu_count()}",
            "seconds_learning": round(seconds, 1),
            "seconds_total": round(lasted, 1),
            "versions": package_versions(),
        }

    def _rollouts(
        self, stored: Sequence[trajectory_pb2.Trajectory], stops: Sequence[Period]
    ) -> dict[str, Any]:
        figures = TrajectoryFigures(stops=stops)
        for trajectory in stored:
            figures.add(trajectory)
        return {
            "turns": figures.num_turns,
            "min_turns_per_rollout": figures.min_turns_per_rollout,
            "turns_interrupted": figures.turns_interrupted,
            "turns_resumed": figures.turns_resumed,
            "rollouts": figures.num_rollouts,
            "tokens_recorded": figures.tokens_recorded,
            **audit_figures(self.layout.folder / "received.jsonl", stored),
            "failed_rollouts": figures.failed_rollouts,
            "cancelled_rollouts": figures.cancelled_rollouts,
            "infrastructure_failures": figures.infrastructure_failures,
            "tail_ratio": {
                label or "training": {
                    "per_turn": round(tail_ratio(figures.turn_lengths[label]), 2),
                    "per_rollout": round(tail_ratio(figures.rollout_lengths[label]), 2),
                }
                for label in sorted(figures.turn_lengths)
            },
        }

    async def _processes(self, before: Sequence[Life]) -> dict[str, Any]:
        ranking = await self.services.ranker_status()
        return {
            "node_lendings": self.watch.moves.num_lent,
            "node_returns": self.watch.moves.num_returned,
            "process_restarts": self.processes.num_restarts
            + sum(len(life.restarts) for life in before),
            "processes_given_up": ", ".join(self.processes.given_up),
            "ranker_turns_learned": ranking.num_turns if ranking else None,
            "ranker_recall": round(ranking.recall, 2) if ranking else None,
        }

    async def _mechanisms(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """How often each acted, if it did; counters of processes are those of this life."""
        moves = self.watch.moves
        found = {
            **{f"switches_to_{tag or 'idle'}": number for tag, number in moves.switches.items()},
            "tails_computed": moves.num_tails,
            "trainer_resizes": moves.num_resizes,
            **mechanisms.of_steps(steps),
            **await mechanisms.of_processes(self.layout.logs()),
        }
        return {name: number for name, number in found.items() if number}

    async def _health(self) -> list[str]:
        ready = (await self.services.snapshot()).readiness
        found = await HealthNotes(self.layout.folder, self.services).findings(ready)
        return [f"{finding.sentence} {finding.cure}" for finding in found]
