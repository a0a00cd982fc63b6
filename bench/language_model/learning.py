"""Three seeds learn sums, and one run with shuffled rewards does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.language_model.held_out_picture import draw_held_out
from bench.language_model.watched_run import WatchedRun, make_project, train
from bench.report import RESULTS, Report

CONTROL = "shuffled"
_QUICK = {"trainer.num_steps": 2, "evaluation.every_steps": 2}
_SETTINGS: dict[str, object] = {"evaluation.samples": 2}
"""Beyond the project's own: more answers to each held-out task, so that intervals are narrower."""


def measure(seeds: Sequence[int]) -> None:
    """Train once for each seed, and the control; draw and publish."""
    project = make_project("learning")
    runs = {
        f"seed {seed}": train(project, f"seed-{seed}", _SETTINGS | {"launcher.seed": seed})
        for seed in seeds
    }
    shuffled = _SETTINGS | {"trainer.algorithm.shuffle_rewards": "true"}
    control = train(project, CONTROL, shuffled)
    draw_held_out(RESULTS / "language_model.png", runs, {"shuffled rewards": control})
    figures = _worst([figures_of(each) for each in runs.values()])
    figures["gain_with_shuffled_rewards"] = _gain(control)
    Report(bench="language_model", figures=figures, raw=_raw(runs, control), seeds=seeds).publish()


def quick() -> None:
    """Two steps of one seed; shows its figures and writes no result."""
    run = train(make_project("learning"), "quick", _QUICK)
    Report(bench="language_model", figures=figures_of(run), seeds=[0]).show()


def figures_of(run: WatchedRun) -> dict[str, float]:
    """Held-out success, what a step and the run took, and how far engine and trainer differ."""
    steps, evaluations, summary = run.steps, run.evaluations, run.summary
    return {
        "success_before": evaluations[0]["mean"],
        "success_after": evaluations[-1]["mean"],
        "optimizer_steps": float(len(steps)),
        "run_minutes": run.seconds / 60,
        "train_seconds_median": median(step["seconds"]["train"] for step in steps),
        "completion_tokens_first": steps[0]["completion_tokens_mean"],
        "completion_tokens_last": steps[-1]["completion_tokens_mean"],
        # Later samples may come from the weights before.
        "logprob_diff_mean": steps[0]["train_rollout_logprob_abs_diff"],
        "services_cpu_share": run.services_cpu_share,
        "idle_share": max(node["idle"] for node in summary["nodes"].values()),
        "turns_resumed": float(summary["turns_resumed"]),
        "peak_gib": run.peak_bytes / 2**30,
    }


def _worst(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each at its worst seed: the highest start, the lowest end, the most of all that is spent."""
    small = {"success_after", "optimizer_steps", "turns_resumed"}
    return {
        name: (min if name in small else max)(each[name] for each in figures) for name in figures[0]
    }


def _gain(run: WatchedRun) -> float:
    means: list[float] = [line["mean"] for line in run.evaluations]
    return means[-1] - means[0]


def _raw(runs: Mapping[str, WatchedRun], control: WatchedRun) -> dict[str, list[Any]]:
    """The curves of each run, and CPU seconds by process of the first."""
    raw: dict[str, list[Any]] = {}
    for name, run in {**runs, CONTROL: control}.items():
        raw[f"{name}.held_out"] = [line["mean"] for line in run.evaluations]
        raw[f"{name}.held_out_steps"] = [line["step"] for line in run.evaluations]
        raw[f"{name}.reward_mean"] = [step["reward_mean"] for step in run.steps]
    first = next(iter(runs.values()))
    spent = sorted(first.cpu_seconds.items(), key=lambda item: -item[1])
    return raw | {f"cpu_seconds.{module}": [round(seconds, 1)] for module, seconds in spent}
