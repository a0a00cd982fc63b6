"""The simulated trajectory manager: groups, admission and staleness, without tokens.

Its rules are those of `trajectory_manager/`: whole groups are admitted, the first that is complete
is leased first, and under WAIT a publish that would make work in flight too old is put off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.workloads import RolloutPlan, Workload


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one task."""

    number: int
    """Its place in the order of admission."""
    plans: list[RolloutPlan]
    running: int
    """Rollouts that have not ended."""
    oldest: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rollout -> version of its first token, and the trainer's step at that time."""

    @property
    def tokens(self) -> int:
        """Of all its rollouts, environment included."""
        return sum(plan.tokens for plan in self.plans)

    @property
    def oldest_version(self) -> int:
        """Of any of its tokens."""
        return min(version for version, _ in self.oldest.values())

    @property
    def oldest_step(self) -> int:
        """The trainer's step when the first of its tokens was sampled."""
        return min(step for _, step in self.oldest.values())


class Ledger:
    """Admits groups, and gives complete ones to the trainer."""

    def __init__(
        self,
        workload: Workload,
        seed: int,
        ahead: Callable[[int], int],
        begin: Callable[[Group], None],
    ) -> None:
        """`ahead`: groups that may be admitted in all, given the groups leased so far."""
        self._workload, self._seed = workload, seed
        self._ahead, self._begin = ahead, begin
        self._admitted = 0
        self._running: dict[int, Group] = {}
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self.leased = 0
        """Groups given to steps."""
        self.staleness: list[int] = []
        """Of each group leased, at its lease, in versions."""
        self.lag: list[int] = []
        """The same in optimizer steps, which differ where a publish was put off."""

    @property
    def ready(self) -> int:
        """Complete groups that no step has."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Whether nothing is being generated."""
        return not self._running

    @property
    def remaining_rollouts(self) -> int:
        """Rollouts of groups that are not complete."""
        return sum(group.running for group in self._running.values())

    def admit(self) -> None:
        """Begin groups, as many as may be."""
        while self._admitted < self._ahead(self.leased):
            plans = self._workload.group(self._seed, self._admitted)
            group = Group(self._admitted, plans, len(plans))
            self._running[self._admitted] = group
            self._admitted += 1
            self._begin(group)

    def ended(self, group: Group) -> None:
        """One rollout of the group has ended."""
        group.running -= 1
        if not group.running:
            del self._running[group.number]
            self._ready.append(group)
            self._wake()

    def lease(self, groups: int, version: int, step: int) -> list[Group]:
        """Take the groups that were complete first, for a step upon `step`, based on `version`."""
        taken = [self._ready.popleft() for _ in range(groups)]
        self.staleness += [version - group.oldest_version for group in taken]
        self.lag += [step - group.oldest_step for group in taken]
        self.leased += groups
        self.admit()
        return taken

    def may_publish(self, version: int, bound: int) -> bool:
        """Whether no token in flight would be older than `bound` versions."""
        begun = [group for group in (*self._running.values(), *self._ready) if group.oldest]
        return all(version - group.oldest_version <= bound for group in begun)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that changes when a group becomes complete."""
        while not condition():
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
