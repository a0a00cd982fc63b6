"""Prompts, turns and rewards of the tool loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed, Step
from seamflow.errors import PreconditionError

from services.chassis.errors import ConfigError, ExitCode
from services.tool_loop.cli import build
from services.tool_loop.score_client import ScoreClient
from services.tool_loop.tool_loop import Rewards
from tests.lib.tool_loop.support import HERE, calls, config, says, serving, task

TOOLS = [f"{HERE}:later"]
CALL = calls(("later", {"text": "x"}))
ROOT = Path(__file__).parents[4]


async def last_step(*messages: Any, payload: dict[str, Any] | None = None, **settings: Any) -> Step:
    """The answer to the last message of an episode."""
    async with (
        serving(tools=TOOLS, **settings) as client,
        await client.reset(task(**(payload or {}))) as episode,
    ):
        steps = [await episode.step(message) for message in messages]
    return steps[-1]


async def test_an_episode_starts_with_the_prompts() -> None:
    """Fields that are no text are JSON, doubled braces are braces."""
    prompt = "{{x}} {question} {numbers}"
    async with (
        serving(system_prompt="Be brief {or not}.", prompt=prompt) as client,
        await client.reset(task(question="why", numbers=[1, "ü"])) as episode,
    ):
        assert list(episode.observation.messages) == [
            {"role": "system", "content": "Be brief {or not}."},
            {"role": "user", "content": '{x} why [1, "ü"]'},
        ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": "{problem}"}, "prompt names the field 'problem', which task 't' lacks; its"),
        ({"rewards": {"reward": "exact"}}, "answer_field names the field 'answer', which task"),
    ],
)
async def test_a_missing_field_fails_and_is_named(settings: Any, words: str) -> None:
    """With those that are there; it is no reward."""
    with pytest.raises(PreconditionError, match=words) as failed:
        await last_step(says("4"), **settings)
    assert "fields are: question" in str(failed.value)
    assert failed.value.reason == "ENVIRONMENT_FAILED"


@pytest.mark.parametrize(
    ("how", "pattern", "answer", "expected", "reward"),
    [
        ("exact", "", " 4 ", "4", 1.0),
        ("exact", "", "It is 4", "4", 0.0),
        ("exact", "", "4", 4, 1.0),
        ("exact", "", "4.0", 4, 1.0),
        ("exact", "", "1,000", 1000.0, 1.0),
        ("exact", "", "0.30", 0.3, 1.0),
        ("exact", "", "4 apples", 4, 0.0),
        ("exact", "", "4.0", "4", 0.0),
        ("exact", "", "True", True, 1.0),
        ("exact", "", "1", True, 0.0),
        ("exact", "", "four", ["4", "four"], 1.0),
        ("exact", "", "['4', 'four']", ["4", "four"], 0.0),
        ("math", "", r"\boxed{4}", [3, "2+2"], 1.0),
        ("exact", r"is (\d+)", "it is 5, no, it is 4", "4", 1.0),
        ("exact", r"is (\d+)", "it is 4, no, it is 5", "4", 0.0),
        ("exact", r"\d+", "say 4", "4", 1.0),
        ("exact", r"is (\d+)", "no idea", "", 0.0),
        ("regex:^4$", "", "4", "unused", 1.0),
        ("regex:^4$", "", "44", "unused", 0.0),
        ("math", "", r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("math", "", r"so \boxed{\frac{1}{3}}", "0.5", 0.0),
        ("math", "", "the answer is 1,000", 1000, 1.0),
        ("math", "", "no idea", "0.5", 0.0),
        ("math", "", "$1$", "x^2+1", 0.0),
        ("math", "", "$1 + x^2$", "x^2+1", 1.0),
        ("math", "", "$(1, 2)$", r"so it is $(1,2)$", 1.0),
        (f"{HERE}:num_messages", "", "4", "unused", 2.0),
    ],
)
async def test_the_last_message_is_scored(
    how: str, pattern: str, answer: str, expected: Any, reward: float
) -> None:
    """Once it calls no tool, the episode is done."""
    step = await last_step(
        says(answer),
        payload={"answer": expected},
        rewards={"reward": how},
        answer_pattern=pattern,
    )
    assert step.rewards == {"reward": reward}
    assert step.done
    assert not step.truncated


@pytest.mark.parametrize("expected", [None, [], [None], {"target": ["4"]}])
@pytest.mark.parametrize("how", ["exact", "math"])
async def test_a_task_without_an_answer_is_broken(how: str, expected: Any) -> None:
    """No answer can be right, so none is wrong."""
    with pytest.raises(PreconditionError, match="answer_field names the field 'answer', which "):
        await last_step(says("null"), payload={"answer": expected}, rewards={"reward": how})


async def test_rewards_are_several_and_named() -> None:
    """Of several functions, or of one; before the end they are 0."""
    rewards = {"reward": f"{HERE}:several", "length": f"{HERE}:num_messages"}
    step = await last_step(says("4"), rewards=rewards)
    assert step.rewards == {"reward": 1.0, "style": 0.5, "length": 2.0}
    step = await last_step(CALL, rewards=rewards)
    assert step.rewards == {"reward": 0.0, "length": 0.0}


async def test_the_last_turn_is_cut_off_and_scored() -> None:
    """Its calls are not made."""
    rewards = {"reward": f"{HERE}:num_messages", "right": "exact"}
    settings: Any = {"rewards": rewards, "max_turns": 2, "payload": {"answer": ""}}
    step = await last_step(CALL, CALL, **settings)
    assert step.truncated
    assert not step.done
    assert step.messages == []
    assert step.rewards == {"reward": 4.0, "right": 1.0}


@pytest.mark.parametrize(
    ("rewards", "kind", "words"),
    [
        ({"reward": f"{HERE}:breaks"}, "ENVIRONMENT", "RuntimeError\\('no judge'\\)"),
        (
            {"reward": f"{HERE}:nothing"},
            "ENVIRONMENT",
            f"reward = '{HERE}:nothing' returned nan as reward 'reward'",
        ),
        ({"reward": f"{HERE}:text"}, "ENVIRONMENT", f"'{HERE}:text' returned '1.0' as reward"),
        ({"reward": f"{HERE}:never"}, "TIMEOUT", "reward took over 0.3 s"),
        ({"score": f"{HERE}:several"}, "ENVIRONMENT", "name the setting after one .*reward, style"),
        (
            {"style": f"{HERE}:num_messages", "reward": f"{HERE}:several"},
            "ENVIRONMENT",
            "gives the reward 'style' twice, the second time by 'reward'",
        ),
        ({"reward": "math"}, "ENVIRONMENT", "which is empty in task 't'"),
    ],
)
async def test_a_reward_that_fails_is_no_reward(rewards: Any, kind: str, words: str) -> None:
    """The episode fails by the fault of its class."""
    with pytest.raises(PreconditionError, match=words) as failed:
        await last_step(
            says("4"),
            payload={"answer": ""},
            rewards=rewards,
            reward_timeout_seconds=10.0 if rewards == {"reward": "math"} else 0.3,
        )
    assert failed.value.metadata["failure_class"] == kind


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rewards": {"reward": "exactly"}}, "rewards.reward is 'exactly': give \"exact\""),
        ({"rewards": {"reward": "regex:("}}, "rewards.reward is '\\('"),
        ({"answer_pattern": "["}, "answer_pattern is '\\['"),
        ({"prompt": "{"}, "prompt is '{'"),
        ({"prompt": "{a.b}"}, "prompt has {a.b}: write the name of one field"),
        ({"mcp_servers": {"a": {}}}, "give url for a server that runs, or command"),
        ({"mcp_servers": {"a": {"url": "u", "command": "c"}}}, "give url for a server that"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: Any, words: str) -> None:
    """With their value and the cure."""
    with pytest.raises(ValidationError, match=words):
        config(**settings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:f", r"\[tool_loop.rewards\] reward is 'nowhere:f'"),
        (f"{HERE}:no_transcript", "define it as reward\\(task, transcript\\)"),
    ],
)
async def test_a_reward_function_that_cannot_work_ends_the_start(name: str, words: str) -> None:
    """With the setting."""
    with pytest.raises(ConfigError, match=words):
        async with build(config(rewards={"reward": name})):
            pass


def test_the_process_ends_with_the_code_of_a_wrong_setting(tmp_path: Path) -> None:
    """And one line, as a user sees it."""
    path = tmp_path / "run.toml"
    path.write_text('[tool_loop]\ntools = ["nowhere:search"]\n')
    command = [sys.executable, "-m", "services.tool_loop", "--config", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == ExitCode.CONFIG
    assert ended.stderr.startswith("tool_loop: tools[0] is 'nowhere:search': No module named")
    assert ended.stderr.count("\n") == 1


SHORT_LEVELS = ((0.05, 4), (0.1, 2), (0.3, 1))


@pytest.fixture
def short_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison without an end needs 0.45 s of CPU."""
    monkeypatch.setattr("services.tool_loop.score_client.LEVELS", SHORT_LEVELS)


def scores(how: str, timeout: float = 60.0, **settings: Any) -> Rewards:
    """One reward named "reward"."""
    given = config(rewards={"reward": how}, reward_timeout_seconds=timeout, **settings)
    return Rewards(given)


def processes_of_scores() -> list[psutil.Process]:
    """Those that this process has started."""
    children = psutil.Process().children()
    return [child for child in children if "services.tool_loop.score_process" in child.cmdline()]


async def scored(rewards: Rewards, answer: str, expected: Any = "5") -> float:
    """The reward of an answer."""
    return (await rewards.of(task(answer=expected), [says(answer)]))["reward"]


@pytest.mark.parametrize(
    ("how", "endless", "quick"),
    [
        ("math", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"),
        (r"regex:^(\w+\s?)+$", "a" * 60 + "!", "a b c"),
    ],
)
@pytest.mark.usefixtures("short_levels")
async def test_a_comparison_without_end_is_wrong_and_delays_no_other(
    how: str, endless: str, quick: str
) -> None:
    """It is killed at its limit; others are scored meanwhile."""
    rewards = scores(how)
    try:
        long = [asyncio.create_task(scored(rewards, endless)) for _ in range(4)]
        assert [await scored(rewards, quick) for _ in range(4)] == [1.0] * 4
        assert await asyncio.gather(*long) == [0.0] * 4
    finally:
        await rewards.close()


async def test_a_comparison_that_had_no_time_is_a_failure() -> None:
    """A machine too busy to compare is not a wrong answer."""
    rewards = scores("math", 0.001)
    await rewards.check()
    try:
        with pytest.raises(EnvironmentFailed, match="the machine is too busy") as failed:
            await scored(rewards, r"\boxed{5}")
    finally:
        await rewards.close()
    assert failed.value.failure_class == tokens_pb2.FAILURE_CLASS_TIMEOUT


@pytest.mark.usefixtures("short_levels")
async def test_a_pattern_of_the_answer_is_bounded_too() -> None:
    """It is read where the comparison is made."""
    rewards = scores("exact", answer_pattern=r"((\w+\s?)+)$")
    try:
        assert await scored(rewards, "a" * 60 + "!") == 0.0
        assert await scored(rewards, "so 5") == 0.0
        assert await scored(rewards, "5") == 1.0
    finally:
        await rewards.close()


@pytest.mark.parametrize("name", ["alarmed", "compares", "later_reward"])
async def test_a_reward_function_runs_where_signals_work(name: str) -> None:
    """Those that limit their own time by an alarm, as math-verify does."""
    rewards = scores(f"{HERE}:{name}", 20.0)
    try:
        assert await scored(rewards, "5") == 1.0
    finally:
        await rewards.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [("busy", "reward took over 5 s"), ("exits", "SystemExit"), ("dies", "its process ended")],
)
async def test_a_reward_function_ends_with_its_own_score(name: str, words: str) -> None:
    """At its limit, by exit() or by a signal; what it started goes with it."""
    rewards = scores(f"{HERE}:{name}", 5.0 if name == "busy" else 60.0)
    try:
        with pytest.raises(EnvironmentFailed, match=words):
            await scored(rewards, "never")
        assert await scored(rewards, "5") == 1.0
    finally:
        await rewards.close()


async def test_scores_end_with_the_tool_loop() -> None:
    """None goes on computing."""
    rewards = scores(f"{HERE}:busy", 60.0)
    await rewards.check()
    (process,) = processes_of_scores()
    waiting = asyncio.create_task(scored(rewards, "never"))
    while not (left := process.children(recursive=True)):
        await asyncio.sleep(0.02)
    await rewards.close()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, left, 20)
    assert gone
    assert not alive
    waiting.cancel()


async def test_a_killed_process_of_scores_is_started_again() -> None:
    """No score is lost, and none is wrong."""
    rewards = scores("math")
    await rewards.check()
    try:
        for _ in range(3):
            for process in processes_of_scores():
                process.kill()
            answers = [r"\boxed{5}", r"\boxed{6}"]
            assert [await scored(rewards, each) for each in answers] == [1.0, 0.0]
    finally:
        await rewards.close()


async def test_a_process_that_cannot_start_is_a_failure() -> None:
    """Never a wrong answer."""
    client = ScoreClient({"reward": "math"}, "answer", "", 3.0, command=("false",))
    with pytest.raises(EnvironmentFailed, match="is the extra tool-loop installed"):
        await client.score("reward", task(answer="5"), [says("5")])
    await client.close()
