"""The emulated agents: they ask for answers of given lengths, and their tools only take time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from seamflow.agent import Task
from seamflow.client import Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

from bench.sim.emulation.prompts import Emulation, prompt
from bench.sim.workloads import Workload


class Room:
    """How many rollouts may be under way; grows and shrinks with the nodes that serve."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._limit = self._taken = 0

    async def resize(self, limit: int) -> None:
        """From now on so many; those that are under way stay."""
        async with self._changed:
            self._limit = limit
            self._changed.notify(max(limit - self._taken, 0))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for room, and keep it for the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._taken < self._limit)
            self._taken += 1
        try:
            yield
        finally:
            async with self._changed:
                self._taken -= 1
                self._changed.notify()


@dataclass(slots=True)
class EmulatedAgent:
    """Acts out the rollouts of a workload, a group for each task."""

    workload: Workload
    """What to do."""
    seed: int
    """Of the workload."""
    emulation: Emulation
    """How fast."""
    room: Room = field(default_factory=Room)
    """For rollouts under way."""
    num_ended: int = 0
    """Rollouts."""

    _begun: Counter[int] = field(default_factory=Counter)

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Turn, tool, turn; its reward is 1 for the even rollouts of a group."""
        group = int(task.payload["group"])
        number = self._begun[group] % self.workload.group_size
        self._begun[group] += 1
        plan = self.workload.group(self.seed, group)[number]
        name = group * self.workload.group_size + number
        thinning = self.emulation.thinning
        token_ids: list[int] = []
        async with self.room.taken():
            for turn in plan.turns:
                token_ids += prompt(turn.new_tokens, name, turn.output_tokens, thinning)
                answer = await rollout.generate(
                    token_ids=token_ids,
                    sampling=SamplingParams(max_new_tokens=1 << 20, ignore_eos=True),
                )
                token_ids += answer.token_ids
                await asyncio.sleep(turn.tool_seconds / self.emulation.speed)
        self.num_ended += 1
        return float(number % 2 == 0)
