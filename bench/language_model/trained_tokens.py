"""What is trained beside what is generated: lengths of answers, and log-probs of either side.

One run on one node that is lent, so that answers are in progress during every update. The control
leaves those out of the same record, as a system would that discards them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ks_2samp

from bench.language_model.recorded_tokens import RecordedRun, TokenDifferences, read_run
from bench.language_model.watched_run import make_project, train
from bench.report import RESULTS, Report

_PLACES = (0, 1, 2, 4, 8, 16, 24)
"""First place of each range of tokens in an answer, and the end of the last one."""
_RUN = "recorded"
_STEPS = 4
"""Of the run whose engine serves another type."""


def measure_trained_tokens(seeds: Sequence[int]) -> None:
    """Train once, read what was recorded, draw and publish."""
    run = _recorded("trained-tokens", seeds[0])
    draw_lengths(RESULTS / "language_model_lengths.png", run)
    figures = _lengths(run) | _alignment(run.tokens)
    Report(bench="language_model_tokens", figures=figures, raw=_raw(run), seeds=seeds[:1]).publish()


def measure_served_type(seeds: Sequence[int]) -> None:
    """A few steps with an engine in bfloat16 beside a trainer in float32, compared and published.

    Each step trains on answers of the weights it begins with, so the types alone differ.
    """
    settings = {
        "rollout_server.torch_dtype": "bfloat16",
        "launcher.max_staleness": 0,
        "trainer.num_steps": _STEPS,
    }
    run = _recorded("served-type", seeds[0], settings)
    figures = _alignment(run.tokens) | {"steps": float(_STEPS)}
    Report(
        bench="language_model_served_type", figures=figures, raw=_raw(run), seeds=seeds[:1]
    ).publish()


def _recorded(name: str, seed: int, settings: Mapping[str, object] | None = None) -> RecordedRun:
    recorded = {"launcher.seed": seed, "trainer.tracking.recorded_steps": 1000}
    run = train(make_project(name), _RUN, recorded | dict(settings or {}))
    return asyncio.run(read_run(run.folder, _RUN))


def _lengths(run: RecordedRun) -> dict[str, float]:
    generated = [each.num_policy_tokens for each in run.rollouts]
    trained = [each.num_policy_tokens for each in run.rollouts if each.step]
    finished = [each.num_policy_tokens for each in run.rollouts if not _interrupted(each)]
    return {
        "length_ks": _ks_distance(trained, generated),
        "length_ks_of_the_control": _ks_distance(finished, generated),
        "length_mean_generated": float(np.mean(generated)),
        "length_mean_trained": float(np.mean(trained)),
        "length_mean_of_the_control": float(np.mean(finished)),
        "rollouts_generated": float(len(generated)),
        "rollouts_trained": float(len(trained)),
        "rollouts_over_an_update_share": 1 - len(finished) / len(generated),
    }


def _ks_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Greatest difference of the two empirical distribution functions (Kolmogorov-Smirnov)."""
    return float(ks_2samp(first, second).statistic)


def _interrupted(rollout: Any) -> bool:
    """Whether it was in progress during a weight update."""
    return bool(rollout.min_weight_version != rollout.max_weight_version)


def _alignment(tokens: Sequence[TokenDifferences]) -> dict[str, float]:
    """Mean and greatest difference by distance of versions; on equal ones by place in answers."""
    place = np.concatenate([np.arange(len(each.differences)) for each in tokens])
    distance = np.concatenate([np.abs(each.differences) for each in tokens])
    stale = np.concatenate([each.staleness for each in tokens])
    found = {
        f"logprob_diff_at_staleness_{staleness}": distance[stale == staleness]
        for staleness in np.unique(stale)
    } | {
        f"logprob_diff_at_places_{first}_to_{end - 1}": distance[
            (stale == 0) & (place >= first) & (place < end)
        ]
        for first, end in pairwise(_PLACES)
    }
    means = {name: float(values.mean()) for name, values in found.items() if len(values)}
    most = {f"{name}_max": float(values.max()) for name, values in found.items() if len(values)}
    return means | most


def _raw(run: RecordedRun) -> dict[str, list[Any]]:
    """Lengths, and log-prob differences of the same weights' tokens."""
    same = [each.differences[each.staleness == 0] for each in run.tokens]
    by_staleness: Mapping[int, list[int]] = {
        staleness: [len(each.staleness) for each in run.tokens if each.staleness.max() == staleness]
        for staleness in sorted({int(each.staleness.max()) for each in run.tokens})
    }
    return {
        "lengths_generated": [each.num_policy_tokens for each in run.rollouts],
        "lengths_trained": [each.num_policy_tokens for each in run.rollouts if each.step],
        **{f"lengths_at_staleness_{name}": lengths for name, lengths in by_staleness.items()},
        "differences_on_the_same_weights": np.concatenate(same).round(6).tolist(),
    }


def draw_lengths(file: Path, run: RecordedRun) -> None:
    """Write a PNG: share of answers up to each length, generated, trained, and of the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    whole = [each for each in run.rollouts if not _interrupted(each)]
    lines = {
        "generated": ("C0-", run.rollouts),
        "trained": ("C1--", [each for each in run.rollouts if each.step]),
        "without answers in progress during an update": ("C3:", whole),
    }
    for name, (style, rollouts) in lines.items():
        lengths = np.sort([each.num_policy_tokens for each in rollouts])
        shares = np.arange(1, len(lengths) + 1) / len(lengths)
        axes.step(lengths, shares, style, where="post", label=name)
    axes.set(xlabel="tokens of an answer", ylabel="share of answers", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file, dpi=120)
