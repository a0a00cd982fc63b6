"""An agent that does as the evaluation its task belongs to says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from seamflow.agent import Task
from seamflow.client import Message, Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

FOLDER_VARIABLE = "LABELLED_AGENT_FOLDER"
HANG_VARIABLE = "LABELLED_AGENT_HANGS"
SCORES = (0.25, 1.0, 0.5)
"""Of the evaluations in their order, the last repeated."""
HANGING = 2
"""The evaluation whose rollouts hang, if the variable is set."""
_TURNS = 3
_PAUSE_SECONDS = 0.25


class LabelledAgent:
    """Three turns; those of an evaluation take longer than a step."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Returns {"reward": 0 or 1, "score": of the evaluation}."""
        label = task.task_id.rpartition("@")[2]
        is_heldout = not label.isdecimal()
        number = _number(label) if is_heldout else 0
        ids = []
        for _ in range(_TURNS):
            messages: list[Message] = [{"role": "user", "content": "go"}]
            turn = await rollout.generate(messages, _sampling(is_heldout))
            ids += turn.token_ids
            await asyncio.sleep(_PAUSE_SECONDS if is_heldout else 0.0)
        if is_heldout and number == HANGING and HANG_VARIABLE in os.environ:
            await asyncio.Event().wait()
        return {"reward": float(sum(ids) % 2), "score": SCORES[min(number, len(SCORES) - 1)]}


def _sampling(is_heldout: bool) -> SamplingParams:
    return SamplingParams(max_new_tokens=64 if is_heldout else 16)


def _number(label: str) -> int:
    """How many evaluations came before this one."""
    file = Path(os.environ[FOLDER_VARIABLE]) / "labels"
    known = file.read_text().split() if file.exists() else []
    if label not in known:
        known.append(label)
        file.write_text(" ".join(known))
    return known.index(label)
