"""Carries out a rank's list of actions: forward and backward tasks of its stages, in order.

Which messages are awaited and sent follows from an action and the place of its stage. Sending never
waits, and the only wait is that for the input of the action at hand: a list that the planner can
place in time cannot end in a deadlock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, Queue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.pipeline.fused_schedule.problem import FORWARD
from trainer.pipeline.layout import Channel, Layout

Shape = tuple[tuple[int, ...], torch.dtype]
"""Of a message: its size and type."""

_FAILED = "failed"
_POLL_SECONDS = 1.0
_AHEAD = 2
"""Messages of a channel that are received ahead of need."""


class PeerFailedError(RuntimeError):
    """Another rank failed or died while this one waited for it."""


class Peers:
    """What connects this rank with the others.

    A rank that waits asks the command store every second whether another one failed: by itself it
    would notice the death of a neighbour only, and that of others at the timeout of the group.
    """

    def __init__(self, layout: Layout, rank: int, device: str, store: Store | None) -> None:
        """Connect; collective.

        Args:
            layout: of all stages.
            rank: this one.
            device: of the messages.
            store: the command store, in which ranks say that they failed; None: they do not.
        """
        self.device = device
        self._rank, self._store = rank, store
        # NCCL knows no tags: there each channel has a group.
        channels = layout.channels() if device == "cuda" else ()
        self._groups = {each: dist.new_group([each.sender, each.receiver]) for each in channels}

    def receive(self, channel: Channel, shape: Shape) -> torch.Tensor:
        """Wait for the next message of a channel."""
        size, dtype = shape
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        dist.recv(tensor, channel.sender, group=self._groups.get(channel), tag=channel.tag)
        return tensor

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Send a message and wait until it is received."""
        group = self._groups.get(channel)
        dist.send(tensor.contiguous(), channel.receiver, group=group, tag=channel.tag)

    def report(self, error: Exception) -> None:
        """Tell the others that this rank failed."""
        if self._store is not None:
            self._store.set(_FAILED, f"rank {self._rank}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise `PeerFailedError` if another rank failed."""
        if self._store is not None and self._store.check([_FAILED]):
            raise PeerFailedError(self._store.get(_FAILED).decode())


class Inbox:
    """Receives the messages of a channel in a thread, a few ahead of need."""

    def __init__(self, peers: Peers, channel: Channel, shapes: Iterable[Shape]) -> None:
        """Begin to receive messages of these shapes."""
        self._peers, self._channel = peers, channel
        self._arrived: Queue[torch.Tensor | Exception] = Queue(_AHEAD)
        _start(lambda: self._receive(shapes), peers.device)

    def take(self) -> torch.Tensor:
        """Wait for the next message.

        Raises:
            PeerFailedError: the sender or another rank failed.
        """
        while True:
            try:
                found = self._arrived.get(timeout=_POLL_SECONDS)
            except Empty:
                self._peers.check()
                continue
            if isinstance(found, Exception):
                self._peers.check()
                raise PeerFailedError(f"rank {self._channel.sender} is gone: {found}") from found
            return found

    def _receive(self, shapes: Iterable[Shape]) -> None:
        try:
            for shape in shapes:
                self._arrived.put(self._peers.receive(self._channel, shape))
        except Exception as error:
            self._arrived.put(error)


class Outbox:
    """Sends the messages of a channel in a thread."""

    def __init__(self, peers: Peers, channel: Channel) -> None:
        self._peers, self._channel = peers, channel
        self._waiting: Queue[torch.Tensor | None] = Queue()
        self._error: Exception | None = None
        self._thread = _start(self._send, peers.device)

    def put(self, message: torch.Tensor) -> None:
        """Send a message after those before it; it must not change."""
        self._waiting.put(message)

    def close(self) -> None:
        """Wait until all messages are received.

        Raises:
            PeerFailedError: the receiver or another rank failed.
        """
        self._waiting.put(None)
        self._thread.join(_POLL_SECONDS)
        while self._thread.is_alive():
            self._peers.check()
            self._thread.join(_POLL_SECONDS)
        if self._error is not None:
            self._peers.check()
            raise PeerFailedError(f"rank {self._channel.receiver} is gone: {self._error}")

    def _send(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._peers.send(self._channel, message)
        except Exception as error:
            self._error = error


def _start(work: Callable[[], None], device: str) -> Thread:
    """A daemon thread: after the death of a rank it may wait forever."""
    place = torch.cuda.current_device() if device == "cuda" else None

    def run() -> None:
        if place is not None:
            torch.cuda.set_device(place)
        work()

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


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
