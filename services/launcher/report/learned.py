"""What a run has learned, for the beginning of its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from seamflow.cli.health.progress import WINDOW, Progress
from seamflow.failure_causes import causes
from seamflow.trajectory.v1 import trajectory_pb2

from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.evaluation_log import EvaluationLog, evaluation_figures

__all__ = ["failure_lines", "learned"]


def learned(
    steps: Sequence[Mapping[str, Any]],
    evaluations: EvaluationLog | None,
    settings: EvaluationConfig,
    seconds: float,
) -> dict[str, object]:
    """Reward first and last, held-out before, best and after, and trained tokens per second.

    Rewards are means of the first and of the last `WINDOW` steps. `seconds`: of training.
    """
    progress = Progress(steps=steps)
    rewards = progress.all("reward_mean")
    tokens = sum(progress.all("num_tokens"))
    return {
        "reward_first": round(fmean(rewards[:WINDOW]), 4) if rewards else None,
        "reward_last": round(fmean(rewards[-WINDOW:]), 4) if rewards else None,
        **evaluation_figures(evaluations),
        "best_note": _best_note(evaluations, settings),
        "trained_tokens_per_second": round(tokens / seconds, 1) if seconds else None,
    }


def _best_note(log: EvaluationLog | None, settings: EvaluationConfig) -> str:
    """Why there is no checkpoint of the best step; empty: there is one."""
    best = log.best if log is not None else None
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


def failure_lines(trajectories: Iterable[trajectory_pb2.Trajectory]) -> list[str]:
    """A line for each cause of failed rollouts, the most frequent first."""
    return [f"{each.number} × {each.line}. {each.cure}" for each in causes(trajectories)]
