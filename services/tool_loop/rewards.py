"""The rewards of the tool loop: matches with the expected answer, and the user's functions."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed
from seamflow.environment.environment_class import reward_function
from seamflow.user_code.user_calls import awaited

from services.tool_loop.config import BUILT_IN, REGEX, ToolLoopConfig
from services.tool_loop.score_client import ScoreClient
from services.tool_loop.score_process import Transcript, named_scores
from services.tool_loop.user_function import load_function


class Rewards:
    """All rewards of [tool_loop.rewards].

    Coroutine functions run in the loop of this process and are cancelled at the limit; all others
    are computed by a `ScoreClient`.
    """

    def __init__(self, config: ToolLoopConfig) -> None:
        """Load the functions.

        Raises:
            ValueError: one does not exist or does not take (task, transcript).
        """
        self._names = tuple(config.rewards)
        self._timeout = config.reward_timeout_seconds
        functions = {
            name: reward_function(load_function(how, f"[tool_loop.rewards] {name}"))
            for name, how in config.rewards.items()
            if how not in BUILT_IN and not how.startswith(REGEX)
        }
        self._coroutines = {
            name: function
            for name, function in functions.items()
            if inspect.iscoroutinefunction(function)
        }
        others = {name: how for name, how in config.rewards.items() if name not in self._coroutines}
        self._scores = ScoreClient(
            others, config.answer_field, config.answer_pattern, config.reward_timeout_seconds
        )
        self._has_others = bool(others)

    def none_yet(self) -> dict[str, float]:
        """Each reward as it is before the end: 0."""
        return dict.fromkeys(self._names, 0.0)

    async def check(self) -> None:
        """Start what scores need; `EnvironmentFailed` if that is impossible."""
        if self._has_others:
            await self._scores.start()

    async def close(self) -> None:
        """End the process of scores."""
        await self._scores.close()

    async def of(self, task: Task, transcript: Transcript) -> dict[str, float]:
        """Rewards by name, each once.

        Raises:
            EnvironmentFailed: a reward cannot be computed; others are those of coroutine functions.
        """
        rewards: dict[str, float] = {}
        for name in self._names:
            for key, value in (await self._score(name, task, transcript)).items():
                if key in rewards:
                    raise EnvironmentFailed(
                        f"[tool_loop.rewards] gives the reward {key!r} twice, the second time by "
                        f"{name!r}: rename one of them"
                    )
                rewards[key] = value
        return rewards

    async def _score(self, name: str, task: Task, transcript: Transcript) -> dict[str, float]:
        function: Any = self._coroutines.get(name)
        if function is None:
            return await self._scores.score(name, task, transcript)
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return named_scores(name, await awaited(function(task, transcript)))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._scores.too_slow(name, "make it faster, or") from error
