"""One engine under continuous batching, simulated from finish to finish."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from services.lib.decode_latency import DecodeLatency


class Instance:
    """Decodes its samples in one batch, one token each per step.

    Between two changes of the batch all steps take equally long, so the simulation goes from one
    finish to the next instead of step by step.

    Args:
        samples: number and tokens of each, in the order of admission.
        latency: seconds of a step by batch size.
        slots: samples in the batch at most; the others wait.
    """

    def __init__(
        self, samples: Iterable[tuple[int, int]], latency: DecodeLatency, slots: int
    ) -> None:
        self._latency = latency
        self._slots = slots
        self._steps = 0
        # Heap of (step after which it ends, step at which it began, number).
        self._running: list[tuple[int, int, int]] = []
        self._waiting = deque(samples)
        self.clock = 0.0
        """When its last step ended."""

    @property
    def num_samples(self) -> int:
        """Samples that have not ended."""
        return len(self._running) + len(self._waiting)

    def samples(self) -> list[tuple[int, int, int]]:
        """Number, tokens decoded and tokens left of each sample that has not ended."""
        running = [
            (number, self._steps - begun, end - self._steps)
            for end, begun, number in sorted(self._running)
        ]
        return running + [(number, 0, tokens) for number, tokens in self._waiting]

    def receive(self, number: int, left: int, seconds: float) -> None:
        """Take a sample with `left` tokens to go from elsewhere; its prefill takes `seconds`."""
        self._waiting.append((number, left))
        self.clock += seconds

    def run(self, until: float = math.inf) -> dict[int, float]:
        """Decode as long as a step ends no later than `until`; ends of samples, by number."""
        ends: dict[int, float] = {}
        while self._admitted():
            step_seconds = self._latency.seconds(len(self._running))
            steps = self._running[0][0] - self._steps
            if self.clock + steps * step_seconds > until:
                steps = math.floor((until - self.clock) / step_seconds)
            self.clock += steps * step_seconds
            self._steps += steps
            ended = self._ended()
            ends |= dict.fromkeys(ended, self.clock)
            if not ended:
                break
        return ends

    def _admitted(self) -> bool:
        """Fill the batch; whether there is one."""
        while self._waiting and len(self._running) < self._slots:
            number, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, self._steps, number))
        return bool(self._running)

    def _ended(self) -> list[int]:
        ended = []
        while self._running and self._running[0][0] == self._steps:
            ended.append(heapq.heappop(self._running)[2])
        return ended
