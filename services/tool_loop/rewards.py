"""The rewards of the tool loop: matches with the expected answer, and the user's functions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from seamflow.client.messages import Message
from seamflow.client.task import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed
from seamflow.environment.environment import RewardFunction
from seamflow.environment.environment_class import reward_function

from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.expected_answer import Expected, as_text, expected_answers, is_exactly
from services.tool_loop.math_answers.boxes import has_open_box
from services.tool_loop.math_answers.math_match import MathMatch
from services.tool_loop.prompt_template import payload_field
from services.tool_loop.user_function import call_function, load_function

__all__ = ["Rewards"]

Transcript = Sequence[Message]
Score = Callable[[Task, Transcript], Awaitable[Any]]
_REGEX = "regex:"


class Rewards:
    """All rewards of [tool_loop.rewards]."""

    def __init__(self, config: ToolLoopConfig) -> None:
        """Load the functions.

        Raises:
            ValueError: one does not exist or does not take (task, transcript).
        """
        self._answer_field = config.answer_field
        self._answer_pattern = re.compile(config.answer_pattern)
        self._timeout = config.reward_timeout_seconds
        self._math = MathMatch(config.reward_timeout_seconds)
        self._uses_math = "math" in config.rewards.values()
        self._scores = {name: self._score(name, how) for name, how in config.rewards.items()}

    def none_yet(self) -> dict[str, float]:
        """Each reward as it is before the end: 0."""
        return dict.fromkeys(self._scores, 0.0)

    async def check(self) -> None:
        """Start what comparisons need; `EnvironmentFailed` if that is impossible."""
        if self._uses_math:
            await self._math.check()

    async def close(self) -> None:
        """End the process of comparisons."""
        await self._math.close()

    async def of(self, task: Task, transcript: Transcript) -> dict[str, float]:
        """Rewards by name, each once.

        Raises:
            EnvironmentFailed: a reward cannot be computed; other exceptions are those of the user's
                functions.
        """
        rewards: dict[str, float] = {}
        for name, score in self._scores.items():
            for key, value in _named(name, await score(task, transcript)).items():
                if key in rewards:
                    raise EnvironmentFailed(
                        f"[tool_loop.rewards] gives the reward {key!r} twice, the second time by "
                        f"{name!r}: rename one of them"
                    )
                rewards[key] = value
        return rewards

    def _score(self, name: str, how: str) -> Score:
        if how == "exact":
            return self._exact
        if how == "math":
            return self._by_math
        if how.startswith(_REGEX):
            return self._by_pattern(re.compile(how.removeprefix(_REGEX)))
        field = f"[tool_loop.rewards] {name}"
        return self._by_function(name, reward_function(load_function(how, field)))

    async def _exact(self, task: Task, transcript: Transcript) -> float:
        answer, expected = self._answer(transcript), self._expected(task)
        return float(answer is not None and any(is_exactly(each, answer) for each in expected))

    async def _by_math(self, task: Task, transcript: Transcript) -> float:
        expected, answer = self._expected(task), self._answer(transcript)
        if answer is None or has_open_box(_last_text(transcript)):
            return 0.0
        return float(await self._math.is_right([as_text(each) for each in expected], answer))

    def _by_pattern(self, pattern: re.Pattern[str]) -> Score:
        async def score(task: Task, transcript: Transcript) -> float:
            answer = self._answer(transcript)
            return float(answer is not None and pattern.search(answer) is not None)

        return score

    def _by_function(self, name: str, function: RewardFunction) -> Score:
        async def score(task: Task, transcript: Transcript) -> Any:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    return await call_function(function, task, transcript)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise EnvironmentFailed(
                    f"[tool_loop.rewards] {name} took over {self._timeout:g} s: raise "
                    "reward_timeout_seconds, or make it faster",
                    tokens_pb2.FAILURE_CLASS_TIMEOUT,
                ) from error

        return score

    def _answer(self, transcript: Transcript) -> str | None:
        """The answer in the last message of the policy; None: there is none."""
        text = _last_text(transcript)
        if not self._answer_pattern.pattern:
            return text.strip()
        matches = list(self._answer_pattern.finditer(text))
        if not matches:
            return None
        found = matches[-1].group(1 if self._answer_pattern.groups else 0)
        return (found or "").strip()

    def _expected(self, task: Task) -> list[Expected]:
        field = self._answer_field
        return expected_answers(payload_field("answer_field", task, field), field, task.task_id)


def _last_text(transcript: Transcript) -> str:
    """The last message, if it is the policy's."""
    last = transcript[-1]
    return str(last.get("content") or "") if last["role"] == "assistant" else ""


def _named(name: str, returned: Any) -> dict[str, float]:
    """What a reward gave, by name; values are checked by the server."""
    if not isinstance(returned, Mapping):
        return {name: returned}
    if name not in returned:
        there = ", ".join(map(str, returned)) or "none"
        raise EnvironmentFailed(
            f"[tool_loop.rewards] {name} returned no reward of this name: name the setting after "
            f"one that it returns ({there})"
        )
    return dict(returned)
