"""Steps that begin with their first group: what is run, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from seamflow.agent import Task

from bench.train import streaming
from bench.train.model import save_model
from bench.train.sides import ROOT, Window, read_config
from bench.train.streaming import ANSWER_TOKENS, STREAMED, WHOLE, Run, read_run, tool_seconds
from bench.train.task import user_message
from services.chassis.config.load import load
from services.dataloader.config import DataloaderConfig
from services.launcher.config import LauncherConfig
from tests.lib.rendering import rendered_ids
from trainer.config import TrainerConfig

WINDOW = Window(warm_up=1, steps=2)


def line(step: int) -> dict[str, Any]:
    """Of a step that ended at 10 s times its number, and published for the last half second."""
    return {
        "step": step,
        "time": 10.0 * step,
        "seconds": {"train": 2.0, "publish": 0.5},
        "seconds_after_last_sample": 1.0,
        "computed_tokens": 100,
        "packing": 1.5,
        "sample_ids": [f"sum-{step}@0/{slot}/1#turn" for slot in range(2)],
    }


def arrivals() -> dict[str, float]:
    """The first rollout of a step ends 5 s before its line is written, the second one 2 s."""
    return {
        f"sum-{step}@0/{slot}/1": 10.0 * step - before
        for step in range(1, 5)
        for slot, before in enumerate((5.0, 2.0))
    }


def test_a_step_is_late_by_what_follows_its_last_rollout() -> None:
    """To the end of the optimizer step: what is published after it does not count."""
    found = read_run([line(step) for step in range(1, 5)], arrivals(), WINDOW)
    assert found.shares == pytest.approx([0.15] * 2)
    assert found.figures["after_arrival_share"] == pytest.approx(0.15)
    assert found.figures["after_last_sample_share"] == pytest.approx(0.1)
    assert found.figures["training_share"] == pytest.approx(0.2)
    assert found.figures["steps_per_minute"] == pytest.approx(6)
    assert found.figures["rollouts_not_trained"] == 0


def test_what_was_thrown_away_is_told() -> None:
    """A rollout that ended in time and is in no step, but none that ended after the window."""
    others = {"sum-9@0/0/1": 25.0, "sum-9@0/1/1": 31.0}
    found = read_run([line(step) for step in range(1, 5)], arrivals() | others, WINDOW)
    assert found.figures["rollouts_not_trained"] == 1


def test_a_sample_without_an_arrival_is_no_guess() -> None:
    """Nor is a step that is missing."""
    lines = [line(step) for step in range(1, 5)]
    with pytest.raises(KeyError):
        read_run(lines, {}, WINDOW)
    with pytest.raises(KeyError):
        read_run(lines[:2], arrivals(), WINDOW)


def test_the_speedup_is_of_neighbouring_runs() -> None:
    """Round by round; two rounds are too few."""
    runs = {
        side: [Run(figures={"seconds_per_step": each}, shares=[]) for each in seconds]
        for side, seconds in ((WHOLE, (8.0, 9.0, 20.0)), (STREAMED, (4.0, 6.0, 5.0)))
    }
    found = streaming.figures(runs)
    names = ("streaming_speedup", "streaming_speedup_lowest", "streaming_speedup_highest")
    assert [found[name] for name in names] == [2, 1.5, 4]
    assert found["whole.seconds_per_step"] == 9
    with pytest.raises(ValueError, match="at least 3"):
        streaming.figures({side: of_side[:2] for side, of_side in runs.items()})


def test_the_tool_takes_as_long_on_either_side() -> None:
    """By task and rollout alone, with a long tail between its bounds."""
    names = [f"sum-{number}@0/{slot}/1" for number in range(100) for slot in range(8)]
    seconds = [tool_seconds([4, 5], name) for name in names]
    assert seconds == [tool_seconds([4, 5], name) for name in names]
    assert len(set(seconds)) == len(names)
    assert tool_seconds([4, 6], names[0]) != seconds[0]
    assert streaming.SHORTEST <= min(seconds) < max(seconds) <= streaming.LONGEST
    assert max(seconds) > 3 * median(seconds)


def test_a_group_is_a_part_and_a_pass(tmp_path: Path) -> None:
    """Its tokens reach the budget, and those that are computed do not exceed it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path / "model", seed=0))
    size = read_config(streaming.CONFIG)["launcher"]["group_size"]
    for terms in ([0, 9], [4, 55], [99, 10]):
        asked = [{"role": "user", "content": user_message({"terms": terms})}]
        prompt = len(rendered_ids(tokenizer, asked, add_generation_prompt=True))
        budget = streaming.part_tokens(size)
        assert prompt + size * ANSWER_TOKENS <= budget <= size * (prompt + ANSWER_TOKENS)


async def test_the_agent_writes_down_when_a_rollout_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the log of the run's tokens."""

    async def generate(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(text="5 2")

    monkeypatch.setenv("SEAMFLOW_AGENT_RUNNER_TOKEN_LOG", str(tmp_path / "received.jsonl"))
    monkeypatch.setattr(streaming, "tool_seconds", lambda *_: 0.0)
    task = Task(task_id="sum-0@0", payload={"terms": [45, 7], "max_new_tokens": 2})
    rollout: Any = SimpleNamespace(rollout_id="sum-0@0/3/1", generate=generate)
    assert await streaming.ToolAgent().run(task, rollout) == {"reward": 1.0, "success": 1.0}
    [written] = (tmp_path / "arrivals.jsonl").read_text().splitlines()
    assert json.loads(written)["rollout_id"] == "sum-0@0/3/1"


def test_the_configuration_is_one() -> None:
    """Every table is valid, and training has a node of its own."""
    given = ["--config", str(ROOT / streaming.CONFIG)]
    config = load(LauncherConfig, "launcher", [*given, "--model", "m", "--tasks", "t"])
    assert [node.tags for node in config.node_plans()] == [("rollout",), ("train",)]
    run = [*given, "--run-id", "r"]
    streamed = ["--batch.stream-groups", "1", "--model", "m", "--checkpoint.folder", "c"]
    load(TrainerConfig, "trainer", [*run, *streamed])
    load(DataloaderConfig, "dataloader", [*run, "--tasks", "t"])
