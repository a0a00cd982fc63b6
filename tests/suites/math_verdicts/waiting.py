"""How long quick scores take beside slow ones, through the process of the tool loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from seamflow.client.turn import Task
from seamflow.environment import EnvironmentFailed

from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.tool_loop import Rewards

SLOW = r"\boxed{9^{9^{9^{9}}}}"
_AT_ONCE = 8
_TASK = Task(task_id="t", payload={"answer": "61"})


async def measured(slow: int, quick: int, limit: float) -> dict[str, float]:
    """Seconds of `quick` scores alone, then beside `slow` ones that all reach their limit.

    Twice: when the slow ones have been computing for half their limit, and all asked for at once.

    Args:
        slow: scores that never end.
        quick: eight at a time.
        limit: seconds of a score.
    """
    config = ToolLoopConfig(rewards={"reward": "math"}, reward_timeout_seconds=limit)
    rewards = Rewards(config)
    try:
        await _seconds(rewards, quick)
        alone = await _seconds(rewards, quick)
        endless = [asyncio.create_task(_score(rewards, SLOW)) for _ in range(slow)]
        await asyncio.sleep(limit / 2)
        beside = await _seconds(rewards, quick)
        ended = await asyncio.gather(*endless, return_exceptions=True)
        endless = [asyncio.create_task(_score(rewards, SLOW)) for _ in range(slow)]
        at_once = await _seconds(rewards, quick)
        ended += await asyncio.gather(*endless, return_exceptions=True)
    finally:
        await rewards.close()
    p99_alone, p99_beside, p99_at_once = (
        statistics.quantiles(each, n=100)[98] for each in (alone, beside, at_once)
    )
    return {
        "quick.p99_alone_s": round(p99_alone, 4),
        "quick.p99_beside_slow_s": round(p99_beside, 4),
        "quick.p99_ratio": round(p99_beside / p99_alone, 2),
        "quick.p99_at_once_s": round(p99_at_once, 4),
        "slow.scored_0": ended.count(0.0),
        "slow.failed": sum(isinstance(each, EnvironmentFailed) for each in ended),
    }


async def _score(rewards: Rewards, text: str) -> float:
    said: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
    return (await rewards.of(_TASK, said))["reward"]


async def _seconds(rewards: Rewards, count: int) -> list[float]:
    limit = asyncio.Semaphore(_AT_ONCE)

    async def timed() -> float:
        async with limit:
            began = time.monotonic()
            assert await _score(rewards, r"It is \boxed{61}.") == 1.0
            return time.monotonic() - began

    return await asyncio.gather(*(timed() for _ in range(count)))
