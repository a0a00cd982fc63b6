"""A taskset of verifiers 0.4: say the word that is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

from tests.lib.environments.self_driving.words import TASKS, score


class WordData(vf.TaskData):
    """What a task is made of."""

    word: str


class WordTask(vf.Task[WordData]):
    """Scores the answer."""

    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        """As `score` says."""
        return score(self.data.word, trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Words of the answer."""
        return float(len(trace.last_reply.split()))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    """A task for each word; the last one fails."""

    def load(self) -> Iterable[WordTask]:
        """All tasks."""
        for word in TASKS:
            yield WordTask(WordData(prompt=f"at {word}", word=word))
