"""Carries out a rank's list of actions: forward and backward tasks of its stages, in order.

Which messages are awaited and sent follows from an action and the place of its stage. Sending never
waits, and the only wait is that for the input of the action at hand: a list that the planner can
place in time cannot end in a deadlock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from trainer.pipeline.fused_schedule.problem import FORWARD
from trainer.pipeline.layout import Channel, Layout
from trainer.pipeline.messages import Inbox, Outbox, Peers, Shape

Action = tuple[int, int, int]
"""Model, kind (FORWARD, BACKWARD or VALUES), micro-batch."""
Seconds = dict[tuple[int, int], list[float]]
"""By model and kind: the time of each task, without its wait."""


class StageWork(Protocol):
    """A stage at work on the micro-batches of a step."""

    def incoming(self, kind: int, micro_batch: int) -> Shape:
        """Size and type of a task's input."""
        ...

    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Compute a micro-batch; what the next stage gets, or its values, or None."""
        ...

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Add its gradient; what the stage before gets, or None. Also takes values."""
        ...


class Interpreter:
    """Of one rank."""

    def __init__(self, layout: Layout, rank: int, peers: Peers) -> None:
        self._layout, self._peers = layout, peers
        self._stages = layout.stages_on(rank)

    def run(self, actions: Sequence[Action], works: Mapping[int, StageWork]) -> Seconds:
        """Carry out the actions on the works, by model; how long each task took.

        Raises:
            PeerFailedError: another rank failed or died.
        """
        try:
            return self._run(actions, works)
        except Exception as error:
            self._peers.report(error)
            raise

    def _run(self, actions: Sequence[Action], works: Mapping[int, StageWork]) -> Seconds:
        messages, seconds = _Messages(self._peers), defaultdict(list)
        for channel, shapes in self._expected(actions, works).items():
            messages.expect(channel, shapes)
        for action in actions:
            model, kind, micro_batch = action
            given = messages.take(self._source(action), micro_batch)
            began = time.perf_counter()
            work = works[model]
            task = work.forward if kind == FORWARD else work.backward
            made = task(micro_batch, given)
            seconds[model, kind].append(time.perf_counter() - began)
            messages.put(self._layout.target(model, kind, self._stages[model]), micro_batch, made)
        messages.close()
        return seconds

    def _expected(
        self, actions: Sequence[Action], works: Mapping[int, StageWork]
    ) -> dict[Channel, list[Shape]]:
        """The messages from other ranks, in order."""
        expected: dict[Channel, list[Shape]] = defaultdict(list)
        for action in actions:
            model, kind, micro_batch = action
            channel = self._source(action)
            if channel is not None and channel.sender != channel.receiver:
                expected[channel].append(works[model].incoming(kind, micro_batch))
        return expected

    def _source(self, action: Action) -> Channel | None:
        model, kind, micro_batch = action
        return self._layout.source(model, kind, self._stages[model], micro_batch)


class _Messages:
    """All messages of a step; those to the own rank are handed over."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._inboxes: dict[Channel, Inbox] = {}
        self._outboxes: dict[Channel, Outbox] = {}
        self._own: dict[tuple[Channel, int], torch.Tensor] = {}

    def expect(self, channel: Channel, shapes: list[Shape]) -> None:
        self._inboxes[channel] = Inbox(self._peers, channel, shapes)

    def take(self, channel: Channel | None, micro_batch: int) -> torch.Tensor | None:
        if channel is None:
            return None
        if channel.sender == channel.receiver:
            return self._own.pop((channel, micro_batch))
        return self._inboxes[channel].take()

    def put(self, channel: Channel | None, micro_batch: int, message: torch.Tensor | None) -> None:
        if channel is None:
            return
        assert message is not None, "a task whose output is needed gave none"
        if channel.sender == channel.receiver:
            self._own[channel, micro_batch] = message
            return
        if channel not in self._outboxes:
            self._outboxes[channel] = Outbox(self._peers, channel)
        self._outboxes[channel].put(message)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
