"""What a run has learned, for the beginning of its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from seamflow.failure_causes import causes
from seamflow.inspect.progress import WINDOW, Progress
from seamflow.trajectory.v1 import trajectory_pb2

from services.lib.evaluation.evaluation_config import EvaluationConfig
from services.lib.evaluation.evaluation_line import EvaluationLine, best_of


def learned(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[EvaluationLine],
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
        **_figures(evaluations),
        "best_note": _best_note(evaluations, settings),
        "trained_tokens_per_second": round(tokens / seconds, 1) if seconds else None,
    }


def _figures(evaluations: Sequence[EvaluationLine]) -> dict[str, object]:
    """Held-out figures of all evaluations with a result."""
    lines = [line for line in evaluations if line.mean is not None]
    best = best_of(lines)
    return {
        "heldout_before": lines[0].mean if lines else None,
        "heldout_after": lines[-1].mean if lines else None,
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


def failure_lines(trajectories: Iterable[trajectory_pb2.Trajectory]) -> list[str]:
    """A line for each cause of failed rollouts, the most frequent first."""
    return [f"{each.number} × {each.line}. {each.cure}" for each in causes(trajectories)]
