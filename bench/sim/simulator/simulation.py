"""One run in virtual time: agents, gateway, trainer and scheduler, as the services play them.

Everything that decides is the services' own code: the scheduler's draft and policy, the gateway's
waiting turns and dispatch policy. What is played: tokens, the trajectory manager's bookkeeping
(`ledger.py`), the trainer's loop, and the GPUs (`decoding.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from bench.sim.costs import Costs
from bench.sim.modes import Mode, Split
from bench.sim.simulator import virtual_time
from bench.sim.simulator.cluster import Cluster, EmulatedNode, NodeSeconds, node_tags
from bench.sim.simulator.decoding import Work
from bench.sim.simulator.gateways import Gateways, Server
from bench.sim.simulator.ledger import Group, Ledger
from bench.sim.simulator.virtual_time import Clock
from bench.sim.workloads import Workload
from rollout.gateway.dispatch.policies import TurnRequest
from scheduler.model.lending_state import BatchForecast
from scheduler.policy.allocation_policy import LendingMode, PreemptivePolicy
from scheduler.policy.training_nodes import SplitRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run."""

    mode: Mode
    workload: Workload
    split: Split
    costs: Costs
    other_costs: Costs | None = None
    """What it takes on nodes of another kind; None: there are none."""
    num_other: int = 0
    """Of the nodes that only roll out, those of the other kind."""
    transfer_seconds: float = 0.0
    """From a publish until servers have the weights, as over a slow link."""
    seed: int = 0
    warm_up: int = 4
    """Steps before anything counts."""
    steps: int = 8
    max_staleness: int | None = None
    """Bound; None: the workload's."""
    lending: LendingMode = "gated"
    """Whether the scheduler lends the nodes of a gang that waits."""
    split_rule: SplitRule | None = None
    """When the scheduler moves a node that does both between training and generation; None: the
    gang has all of these nodes."""
    first_gang: int = 1
    """Nodes of the gang at first, if they move."""
    dispatch: str = "least_load"
    keep_turns: bool = False

    @property
    def bound(self) -> int:
        """On staleness, in versions."""
        return self.workload.max_staleness if self.max_staleness is None else self.max_staleness

    @property
    def ahead(self) -> int:
        """Batches generated ahead."""
        return self.bound if self.mode.ahead is None else self.mode.ahead

    @property
    def most_behind(self) -> int:
        """Versions that a sample may be behind.

        The trajectory manager has one number for this and for how much is generated ahead, counted
        in leases, so where a batch is leased in parts it allows more.
        """
        return (self.ahead + 1) * self.mode.parts - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that ended where it began."""

    node_id: str
    begun: float
    """When it asked for a server."""
    ended: float
    """When its last token was sampled."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it, between the ends of the last warm-up step and of the last step."""

    seconds: float
    """Between the two."""
    rollouts: int
    node_seconds: NodeSeconds
    staleness: tuple[int, ...]
    """Of each group trained, in versions."""
    stretches: dict[str, list[tuple[float, str]]]
    """Node -> when it began to do what, from the beginning of the run."""
    step_ends: tuple[float, ...]
    """When each step ended, from the beginning of the run."""
    lag: tuple[int, ...]
    """Staleness in optimizer steps: more than in versions where a publish was put off."""
    turns: tuple[Turn, ...]
    """All turns that ended, if asked for."""
    gangs: tuple[int, ...] = ()
    """Nodes of the gang in each step, from the beginning of the run."""
    moves: tuple[str, ...] = ()
    """Why nodes moved, as the audit log says."""

    @property
    def rollouts_per_second(self) -> float:
        """Throughput."""
        return self.rollouts / self.seconds


def simulate(setting: Setting) -> Result:
    """Run it. A pure function of the setting."""
    return virtual_time.run(_run(setting))


async def _run(setting: Setting) -> Result:
    result = await _Run(setting).train()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return result


class _Run:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._clock = Clock()
        self._version = 0
        self._published = 0
        self._ledger = Ledger(setting.workload, setting.seed, self._ahead, self._begin)
        moves = setting.split_rule is not None
        self._cluster = Cluster(
            setting.split,
            PreemptivePolicy(lending=setting.lending, moves_nodes=moves),
            _costs_of_nodes(setting),
            setting.workload.slots,
            self._clock,
            self._rollout_changed,
        )
        if setting.split_rule is not None:
            self._cluster.move_nodes(setting.split_rule, setting.first_gang)
        nodes = self._cluster.nodes.values()
        self._gateways = Gateways(nodes, setting.dispatch, self._clock.now)
        self._admitted: deque[tuple[Group, int]] = deque()
        self._active = 0
        self._trace: list[Turn] = []

    async def train(self) -> Result:
        """The trainer's loop."""
        setting, workload = self._setting, self._setting.workload
        if not setting.split.both:
            await self._cluster.acquire()
        self._spawn(self._cluster.report_rates())
        await asyncio.sleep(0)  # node agents start
        self._ledger.admit()
        ends: list[float] = []
        gangs: list[int] = []
        before, leased_before = NodeSeconds(), 0
        while len(ends) < setting.warm_up + setting.steps:
            if len(ends) == setting.warm_up:
                before, leased_before = self._seconds(), len(self._ledger.staleness)
            for _ in range(setting.mode.parts):
                groups = await self._groups(workload.groups_per_step // setting.mode.parts)
                await self._optimize(groups)
            await self._publish()
            ends.append(self._clock.now())
            gangs.append(len(self._gang))
        staleness = self._ledger.staleness[leased_before:]
        return Result(
            seconds=ends[-1] - ends[setting.warm_up - 1],
            rollouts=(len(ends) - setting.warm_up) * workload.rollouts_per_step,
            node_seconds=self._seconds() - before,
            staleness=tuple(staleness),
            stretches={name: node.stretches for name, node in self._cluster.nodes.items()},
            step_ends=tuple(ends),
            lag=tuple(self._ledger.lag[leased_before:]),
            turns=tuple(self._trace),
            gangs=tuple(gangs),
            moves=tuple(self._cluster.moves),
        )

    async def _groups(self, number: int) -> Sequence[Group]:
        """Wait for groups, giving nodes that can roll out back meanwhile."""
        if self._ledger.ready < number:
            if self._setting.split.both:
                self._cluster.release(self._outlook(number))
            await self._ledger.until(lambda: self._ledger.ready >= number)
        self._gang = await self._cluster.acquire()
        return self._ledger.lease(number, self._version, self._published)

    def _outlook(self, groups: int) -> BatchForecast | None:
        """What is left of the batch; None before the first, as the trainer knows no sizes yet."""
        workload = self._setting.workload
        if not self._ledger.leased:
            return None
        remaining = (groups - self._ledger.ready) * workload.group_size
        return BatchForecast(
            remaining_rollouts=remaining,
            batch_rollouts=workload.rollouts_per_step,
            done_tokens=self._cluster.done_tokens,
        )

    async def _optimize(self, groups: Sequence[Group]) -> None:
        tokens = sum(group.tokens for group in groups)
        share = 1 / self._setting.mode.parts
        seconds = self._setting.costs.training.seconds(tokens, len(self._gang), share=share)
        await asyncio.gather(*(node.train(seconds) for node in self._gang))
        self._cluster.done_tokens = tokens

    async def _publish(self) -> None:
        """Give all engines the new weights, unless that would make work in flight too old."""
        mode = self._setting.mode
        if mode.barrier:
            await self._ledger.until(lambda: self._ledger.idle)
        self._published += 1
        if self._ledger.may_publish(self._version + 1, self._setting.most_behind):
            self._version += 1
            for node in self._cluster.rolling_out():
                self._spawn(self._update(node))
        self._ledger.admit()

    async def _update(self, node: EmulatedNode) -> None:
        if self._setting.transfer_seconds:
            await self._clock.sleep(self._setting.transfer_seconds)
        await node.update_weights()

    def _ahead(self, leased: int) -> int:
        mode, size = self._setting.mode, self._setting.workload.groups_per_step
        base = self._published * size if mode.admission == "published" else leased
        return base + (self._setting.ahead + 1) * size

    def _begin(self, group: Group) -> None:
        self._admitted += [(group, number) for number in range(len(group.plans))]
        self._start_rollouts()

    def _start_rollouts(self) -> None:
        """The streaming dataloader: as many at a time as the serving nodes have room for."""
        room = self._setting.workload.rollouts_per_node * self._cluster.num_serving
        while self._admitted and self._active < room:
            self._active += 1
            self._spawn(self._play(*self._admitted.popleft()))

    def _rollout_changed(self, node: EmulatedNode) -> None:
        self._gateways.changed(node)
        self._start_rollouts()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # Whoever ends what it waits for holds it: a queue, an engine, the clock.
        asyncio.create_task(coroutine)  # noqa: RUF006

    async def _play(self, group: Group, number: int) -> None:
        """An agent's life: turn, tool, turn."""
        plan, context = group.plans[number], 0
        rollout = group.number * len(group.plans) + number
        for turn in plan.turns:
            work = Work(
                rollout=rollout,
                context=context + turn.new_tokens,
                tokens=turn.output_tokens,
                fresh=turn.new_tokens,
            )
            await self._turn(group, number, work)
            context += turn.new_tokens + turn.output_tokens
            if turn.tool_seconds:
                await self._clock.sleep(turn.tool_seconds)
        self._active -= 1
        self._ledger.ended(group)
        self._start_rollouts()

    async def _turn(self, group: Group, number: int, work: Work) -> None:
        """The gateway: until it is sampled whole, on whatever servers."""
        continues, begun, rollout = False, self._clock.now(), f"{group.number}:{number}"
        gateway = self._gateways.of(rollout)
        while True:
            turn = TurnRequest(
                group=str(group.number),
                rollout=rollout,
                num_tokens=work.context + work.sampled,
                max_new_tokens=work.tokens - work.sampled,
                expected_tokens=float(work.tokens - work.sampled),
                continues=continues,
            )
            server: Server = await gateway.acquire(turn)  # type: ignore[assignment]
            group.oldest.setdefault(number, (self._version, self._published))
            whole = await server.node.sample(work)
            gateway.release(server)  # type: ignore[arg-type]
            if whole:
                break
            continues = True
        if self._setting.keep_turns:
            self._trace.append(_turn(server, begun, self._clock.now(), work))

    def _seconds(self) -> NodeSeconds:
        return sum((node.seconds() for node in self._cluster.nodes.values()), NodeSeconds())


def _costs_of_nodes(setting: Setting) -> dict[str, Costs]:
    """By node; those of the other kind are the first that only roll out."""
    names = list(node_tags(setting.split))
    others = dict.fromkeys(names[: setting.num_other], setting.other_costs or setting.costs)
    return {**dict.fromkeys(names, setting.costs), **others}


def _turn(server: Server, begun: float, ended: float, work: Work) -> Turn:
    return Turn(
        node_id=server.node.node_id,
        begun=begun,
        ended=ended,
        prompt_tokens=work.context,
        output_tokens=work.tokens,
    )
