"""One engine under continuous batching, simulated from finish to finish."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from services.lib.decode_latency import DecodeLatency

__all__ = ["Instance"]


class Instance:
    """Decodes its samples in one batch, one token each per step.

    Between two changes of the batch all steps take equally long, so the simulation goes from one
    finish to the next instead of step by step.

    Args:
        lengths: tokens of its samples, in the order of admission.
        latency: seconds of a step by batch size.
        slots: samples in the batch at most; the others wait.
    """

    def __init__(self, lengths: Sequence[int], latency: DecodeLatency, slots: int) -> None:
        self._latency = latency
        self._slots = slots
        self._steps = 0
        # Heap of (step after which it ends, step at which it began).
        self._running: list[tuple[int, int]] = []
        self._waiting = deque(lengths)
        self.clock = 0.0
        """When its last step ended."""

    @property
    def num_samples(self) -> int:
        """Samples that have not ended."""
        return len(self._running) + len(self._waiting)

    def samples(self) -> list[tuple[int, int]]:
        """Tokens decoded and tokens left of each sample that has not ended."""
        running = [(self._steps - begun, end - self._steps) for end, begun in sorted(self._running)]
        return running + [(0, length) for length in self._waiting]

    def receive(self, left: int, seconds: float) -> None:
        """Take a sample with `left` tokens to go from elsewhere; its prefill takes `seconds`."""
        self._waiting.append(left)
        self.clock += seconds

    def run(self, until: float = math.inf) -> list[float]:
        """Decode as long as a step ends no later than `until`; gives the ends of samples."""
        ends: list[float] = []
        while self._admitted():
            step_seconds = self._latency.seconds(len(self._running))
            steps = self._running[0][0] - self._steps
            if self.clock + steps * step_seconds > until:
                steps = math.floor((until - self.clock) / step_seconds)
            self.clock += steps * step_seconds
            self._steps += steps
            ended = self._ended()
            ends += [self.clock] * ended
            if not ended:
                break
        return ends

    def _admitted(self) -> bool:
        """Fill the batch; whether there is one."""
        while self._waiting and len(self._running) < self._slots:
            heapq.heappush(self._running, (self._steps + self._waiting.popleft(), self._steps))
        return bool(self._running)

    def _ended(self) -> int:
        ended = 0
        while self._running and self._running[0][0] == self._steps:
            heapq.heappop(self._running)
            ended += 1
        return ended
