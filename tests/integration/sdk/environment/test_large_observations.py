"""An observation of 50 MB fails its own episode, by the name of the limit, before it is copied."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from seamflow.client.turn import Task
from seamflow.environment import EnvironmentClient, Observation, Step
from seamflow.environment.environment_server import EnvironmentServerConfig, serving
from seamflow.environment.returned_values import check_size
from seamflow.errors import ExhaustedError, SeamflowError

from services.environments.episode_loop import failure_class

_SIZE = 50_000_000
_LIMIT = 1 << 16
_NAMED = r"observation of more than 4194304 bytes \(max_observation_bytes of the .*: return less"


def _nested() -> dict[str, Any]:
    return {"rows": [{"cell": {"text": "x" * 100}} for _ in range(_SIZE // 400)]}


def _endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["itself"] = [value, value]
    return value


HI = [{"role": "user", "content": "hi"}]
LARGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "x" * _SIZE,
    "messages": lambda: [{"role": "user", "content": "x" * 1_000_000}] * 50,
    "nested": lambda: Observation(messages=HI, info=_nested()),
    "endless": lambda: Observation(messages=HI, info=_endless()),
}


class Large:
    """Returns what the task names, at its first step, or where the task says so at its reset."""

    def reset(self, task: Task, seed: int) -> Any:
        self.kind = task.payload["kind"]
        return LARGE[self.kind]() if task.payload["at"] == "reset" else "begin"

    def step(self, message: Any) -> Step:
        if self.kind == "small":
            return Step(rewards=1.0, done=True)
        given = LARGE[self.kind]()
        seen = given if isinstance(given, Observation) else Observation(messages=given)
        return Step(messages=seen.messages, info=seen.info)


def _task(kind: str, at: str) -> Task:
    return Task(task_id=kind, payload={"kind": kind, "at": at})


@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize("kind", LARGE)
async def test_it_fails_its_episode_and_no_other(kind: str, at: str) -> None:
    """As a failure of the environment; an episode that was open goes on."""
    answer = {"role": "assistant", "content": "x"}
    async with serving(Large) as port, EnvironmentClient(f"127.0.0.1:{port}") as client:
        other = await client.reset(_task("small", "step"))
        with pytest.raises(SeamflowError, match=_NAMED) as raised:
            await (await client.reset(_task(kind, at))).step(answer)
        assert raised.value.reason == "ENVIRONMENT_FAILED"
        assert (await other.step(answer)).rewards == {"reward": 1.0}


async def test_a_larger_limit_lets_it_pass() -> None:
    """Negative control: without the limit the same observation arrives."""
    config = EnvironmentServerConfig(max_observation_bytes=60_000_000)
    async with serving(Large, config) as port, EnvironmentClient(f"127.0.0.1:{port}") as client:
        episode = await client.reset(_task("text", "reset"))
        (message,) = episode.observation.messages
        assert len(str(message["content"])) == _SIZE


@pytest.mark.parametrize("make", [_nested, _endless])
def test_it_is_not_copied_to_be_measured(make: Callable[[], Any]) -> None:
    """The look takes a part of the limit, whatever the value has."""
    value = make()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than"):
            check_size("step returned an observation", _LIMIT, value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * _LIMIT


def test_what_no_message_takes_is_the_environments_failure() -> None:
    """Of a server in another language, which has no such limit; back-pressure is not meant."""
    assert failure_class(ExhaustedError("too large")) == failure_class(ValueError("wrong"))
    assert failure_class(ExhaustedError("busy", retry_after=1.0)) != failure_class(ValueError(""))
