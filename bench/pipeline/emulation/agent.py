"""The emulated agents: they ask for answers of given lengths, and their tools only take time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from seamflow.agent import Task
from seamflow.client import Rollout

from bench.pipeline.emulation.prompts import Emulation, prompt
from bench.pipeline.workloads import Workload

__all__ = ["EmulatedAgent"]


@dataclass(slots=True)
class EmulatedAgent:
    """Acts out the rollouts of a workload, a group for each task."""

    workload: Workload
    """What to do."""
    seed: int
    """Of the workload."""
    emulation: Emulation
    """How fast."""

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
        for turn in plan.turns:
            token_ids += prompt(turn.new_tokens, name, turn.output_tokens, thinning)
            answer = await rollout.generate(
                token_ids=token_ids, max_new_tokens=1 << 20, ignore_eos=True
            )
            token_ids += answer.token_ids
            await asyncio.sleep(turn.tool_seconds / self.emulation.speed)
        return float(number % 2 == 0)
