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
SCORES = (0.25, 1.0, None, 0.5, 0.5)
"""Of the evaluations in their order, the last repeated; None: its rollouts hang."""
_TURNS = 3
_PAUSE_SECONDS = 0.25


class LabelledAgent:
    """Three turns; those of an evaluation take longer than a step."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Returns {"reward": 0 or 1, "score": of the evaluation}."""
        label = task.task_id.rpartition("@")[2]
        is_heldout = not label.isdecimal()
        score = SCORES[min(_number(label), len(SCORES) - 1)] if is_heldout else 0.0
        ids = []
        for _ in range(_TURNS):
            messages: list[Message] = [{"role": "user", "content": "go"}]
            turn = await rollout.generate(messages, _sampling(is_heldout))
            ids += turn.token_ids
            await asyncio.sleep(_PAUSE_SECONDS if is_heldout else 0.0)
        if score is None:
            await asyncio.Event().wait()
        return {"reward": float(sum(ids) % 2), "score": score or 0.0}


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
