"""Figures of `make bench-model`, from what a run leaves."""

from __future__ import annotations

from bench.quickstart.language_model import figures_of


def step(seconds: float, tokens: float, diff: float) -> dict[str, object]:
    """A line of metrics.jsonl, as far as it is read."""
    return {
        "seconds": {"train": seconds},
        "completion_tokens_mean": tokens,
        "train_rollout_logprob_abs_diff": diff,
    }


def test_a_step_takes_the_median_and_log_probs_are_compared_on_the_first_weights() -> None:
    summary = {"heldout_before": 0.2, "heldout_after": 0.5}
    steps = [step(9.0, 24.0, 0.001), step(1.0, 20.0, 0.03), step(2.0, 12.0, 0.002)]
    assert figures_of(steps, summary) == {
        "success_before": 0.2,
        "success_after": 0.5,
        "optimizer_steps": 3.0,
        "train_seconds_median": 2.0,
        "completion_tokens_first": 24.0,
        "completion_tokens_last": 12.0,
        "logprob_diff_mean": 0.001,
    }
