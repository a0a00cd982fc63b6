"""Figures of `make bench-model`, from what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.language_model.learning import figures_of
from bench.language_model.watched_run import WatchedRun, module_of


def step(number: int, seconds: float, tokens: float, diff: float) -> dict[str, object]:
    """A line of metrics.jsonl, as far as it is read."""
    return {
        "step": number,
        "seconds": {"train": seconds},
        "completion_tokens_mean": tokens,
        "train_rollout_logprob_abs_diff": diff,
    }


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    """A run of three steps, with evaluations of which one was given up."""
    steps = [step(1, 9.0, 24.0, 0.001), step(2, 1.0, 20.0, 0.03), step(3, 2.0, 12.0, 0.002)]
    means = [0.2, None, 0.5]
    summary = {"nodes": {"a": {"idle": 0.1}, "b": {"idle": 0.3}}, "turns_resumed": 7}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    (tmp_path / "evaluation.jsonl").write_text(
        "".join(json.dumps({"mean": mean}) + "\n" for mean in means)
    )
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    computing = {"trainer": 60.0, "rollout.server": 5.0, "sglang::scheduler": 25.0}
    spent = {**computing, "scheduler": 4.0, "valkey-server": 6.0}
    return WatchedRun(folder=tmp_path, seconds=120.0, peak_bytes=2**31, cpu_seconds=spent)


def test_a_step_takes_the_median_and_log_probs_are_compared_on_the_first_weights(
    run: WatchedRun,
) -> None:
    assert figures_of(run) == {
        "success_before": 0.2,
        "success_after": 0.5,
        "optimizer_steps": 3.0,
        "run_minutes": 2.0,
        "train_seconds_median": 2.0,
        "completion_tokens_first": 24.0,
        "completion_tokens_last": 12.0,
        "logprob_diff_mean": 0.001,
        "services_cpu_share": pytest.approx(0.1),
        "idle_share": 0.3,
        "turns_resumed": 7.0,
        "peak_gib": 2.0,
    }


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (
            ["/venv/bin/python", "-P", "-m", "rollout.server", "--config", "a.toml"],
            "rollout.server",
        ),
        (["/venv/bin/python", "-P", "/code/render_process.py", "5"], "render_process"),
        (["/usr/bin/valkey-server", "127.0.0.1:1"], "valkey-server"),
        ([], "ended"),
    ],
)
def test_processes_are_counted_by_the_module_that_they_run(command: list[str], module: str) -> None:
    assert module_of(command) == module
