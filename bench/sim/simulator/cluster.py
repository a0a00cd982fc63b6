"""The simulated nodes: the scheduler's own rules with node agents in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from bench.sim.costs import Costs
from bench.sim.modes import Split
from bench.sim.simulator.decoding import Work
from bench.sim.simulator.engine_loop import EngineLoop
from bench.sim.simulator.virtual_time import Clock
from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import (
    ROLLOUT,
    TRAIN,
    EventKind,
    Gang,
    Node,
    NodeState,
    State,
)
from scheduler.policy.allocation_policy import AllocationPolicy
from scheduler.policy.training_nodes import SplitRule
from scheduler.pool.gang_measurements import Allocation, GenerationLoad
from scheduler.pool.state_transaction import StateTransaction

_RUN = "run"
_GANG = "trainer"
_REPORT_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeconds:
    """What nodes did with their time. The bins add up to the nodes times the time that passed."""

    generation: float = 0.0
    """Decode steps, and the first prefill of each token."""
    training: float = 0.0
    """Optimizer steps, scoring included."""
    switching: float = 0.0
    """Changes of activity, and updates of weights."""
    repeated_prefill: float = 0.0
    """Prefill of tokens that had been prefilled before."""
    idle: float = 0.0

    def __add__(self, other: NodeSeconds) -> NodeSeconds:
        return self._with(other, 1.0)

    def __sub__(self, other: NodeSeconds) -> NodeSeconds:
        return self._with(other, -1.0)

    @property
    def total(self) -> float:
        """All of it."""
        busy = self.generation + self.training + self.switching + self.repeated_prefill
        return busy + self.idle

    @property
    def useful_share(self) -> float:
        """Trained work in all of it."""
        return (self.generation + self.training) / self.total

    @property
    def idle_share(self) -> float:
        """Idle in all of it."""
        # What is left over of sums of floats may be a little less than nothing.
        return max(self.idle / self.total, 0.0)

    def _with(self, other: NodeSeconds, sign: float) -> NodeSeconds:
        return NodeSeconds(
            **{name: getattr(self, name) + sign * getattr(other, name) for name in self.__slots__}
        )


class EmulatedNode:
    """A node with its agent: follows assignments, one activity at a time."""

    def __init__(
        self,
        node_id: str,
        tags: tuple[str, ...],
        costs: Costs,
        slots: int,
        clock: Clock,
        changed: Callable[[EmulatedNode], None],
    ) -> None:
        """`changed` is called whenever it begins or ends an activity."""
        self.node_id, self.tags = node_id, tags
        self.tag = ""
        """Its activity."""
        self.slots = slots
        """Sequences its engine decodes at once."""
        self._clock = clock
        self._engine = EngineLoop(costs.engine, slots, clock)
        self._engine.hold()
        self._costs = costs
        self._changed = changed
        self._switching = self._training = 0.0
        self._num_turns = 0
        self.stretches: list[tuple[float, str]] = []
        """When it began to do what."""

    @property
    def tokens_per_second(self) -> float:
        """Present rate."""
        return self._engine.tokens_per_second if self.serving else 0.0

    @property
    def serving(self) -> bool:
        """Whether it takes turns."""
        return self.tag == ROLLOUT

    async def sample(self, work: Work) -> bool:
        """Sample the rest of a turn; False if the node was taken away meanwhile."""
        if not self.serving:
            return False
        if not self._num_turns:
            self.stretches.append((self._clock.now(), "generation"))
        self._num_turns += 1
        whole = await self._engine.submit(work)
        self._num_turns -= 1
        if self.serving and not self._num_turns:
            self.stretches.append((self._clock.now(), "idle"))
        return whole

    async def update_weights(self) -> None:
        """Swap weights: all turns wait, and are then prefilled again."""
        if not self.serving or self._engine.holding:
            return
        began = self._clock.now()
        self._engine.hold()
        await self._clock.sleep(self._costs.engine.update_seconds)
        if self.serving:
            self._engine.go_on()
            self._switching += self._clock.now() - began

    async def switch(self, tag: str) -> None:
        """End one activity and begin another; the very first costs nothing."""
        began = self._clock.now()
        if self.serving:
            self._engine.give_up()
        if self.tag:
            await self._move(self._costs.switching.deactivate_seconds)
        if tag and self.stretches:
            await self._move(self._costs.switching.activate_seconds)
        self.tag = tag
        if self.serving:
            self._engine.go_on()
        self._switching += self._clock.now() - began
        self._note("idle")

    async def _move(self, seconds: float) -> None:
        self.tag = ""
        self._note("switching")
        await self._clock.sleep(seconds)

    async def train(self, seconds: float) -> None:
        """Take part in a step."""
        self._note("training")
        await self._clock.sleep(seconds)
        self._training += seconds
        self._note("idle")

    def seconds(self) -> NodeSeconds:
        """What it did up to now."""
        busy = self._engine.update()
        generation = busy.decode + busy.prefill
        done = generation + busy.repeated_prefill + self._switching + self._training
        return NodeSeconds(
            generation=generation,
            training=self._training,
            switching=self._switching,
            repeated_prefill=busy.repeated_prefill,
            idle=self._clock.now() - done,
        )

    def _note(self, doing: str) -> None:
        self.stretches.append((self._clock.now(), doing))
        self._changed(self)


class Cluster:
    """The scheduler's state, changed by its own `StateTransaction` and `AllocationPolicy`."""

    def __init__(
        self,
        split: Split,
        policy: AllocationPolicy,
        costs: Mapping[str, Costs],
        slots: int,
        clock: Clock,
        changed: Callable[[EmulatedNode], None],
    ) -> None:
        """`costs` are those of each node; `changed` is called whenever one begins or ends an
        activity."""
        self._policy = policy
        self._clock = clock
        self._state = State()
        self._told = changed
        self._serving: set[str] = set()
        self._granted = asyncio.Event()
        self._split = split
        self._batch = 0
        self._num_nodes = split.gang
        self.done_tokens = 0
        """Of the newest batch that the gang trained on."""
        self._allocation: Allocation | None = None
        self._load = GenerationLoad()
        self.moves: list[str] = []
        """Entries of the audit log about other numbers of nodes for the gang."""
        self._agents: dict[str, asyncio.Task[None]] = {}
        self.nodes = {
            node_id: EmulatedNode(node_id, tags, costs[node_id], slots, clock, self._moved)
            for node_id, tags in node_tags(split).items()
        }
        """By name."""
        records = [
            Node(node_id=node.node_id, run_id=_RUN, capability_tags=node.tags)
            for node in self.nodes.values()
        ]
        self._change(lambda tx: tx.register(*records))

    def rolling_out(self) -> list[EmulatedNode]:
        """The nodes that take turns."""
        return [node for node in self.nodes.values() if node.serving]

    @property
    def num_serving(self) -> int:
        """How many take turns."""
        return len(self._serving)

    def move_nodes(self, rule: SplitRule, first: int) -> None:
        """Let the gang have `first` of the nodes that do both, and as many as is advised later."""
        self._num_nodes = first
        self._allocation = Allocation(rule=rule, load=self._load.share)

    async def report_rates(self) -> None:
        """What node agents report, if nodes move."""
        while self._allocation is not None:
            await self._clock.sleep(_REPORT_SECONDS)
            for node_id, node in self.nodes.items():
                report = NodeReport(tokens_per_second=node.tokens_per_second)
                record = replace(self._state.nodes[node_id], report=report)
                self._load.observe(record, self._clock.now())

    async def acquire(self) -> list[EmulatedNode]:
        """Ask for the training gang and wait until all of it is at work."""
        self._batch += 1
        balance = self._state.balances.get((_RUN, _GANG))
        if self._allocation is not None and balance is not None and balance.advised_nodes:
            self._num_nodes = balance.advised_nodes
        gang = Gang(
            run_id=_RUN,
            gang_id=_GANG,
            tag=TRAIN,
            num_nodes=self._num_nodes,
            unit_nodes=int(self._allocation is not None),
            max_nodes=self._split.gang,
            batch=self._batch,
            done_tokens=self.done_tokens,
        )
        self._change(lambda tx: tx.request(gang))
        while not self._state.granted(gang):
            self._granted.clear()
            await self._granted.wait()
        return [self.nodes[node.node_id] for node in self._state.members(gang)]

    def release(self, forecast: BatchForecast | None) -> None:
        """Give the gang's nodes back; the scheduler judges whether they are lent meanwhile."""
        self._change(lambda tx: tx.release((_RUN, _GANG), forecast, self._batch + 1))

    def _change(self, change: Callable[[StateTransaction], object]) -> None:
        tx = StateTransaction(self._state, self._policy, self._clock.now(), self._allocation)
        change(tx)
        self._state = tx.state
        for event in tx.events:
            self.moves += [event.cause] * (event.kind is EventKind.SPLIT)
            if event.node is not None and event.kind is EventKind.ASSIGNED:
                self._follow(event.node.node_id)
        self._granted.set()

    def _moved(self, node: EmulatedNode) -> None:
        (self._serving.add if node.serving else self._serving.discard)(node.node_id)
        self._told(node)

    def _follow(self, node_id: str) -> None:
        if node_id not in self._agents or self._agents[node_id].done():
            self._agents[node_id] = asyncio.create_task(self._agent(node_id))

    async def _agent(self, node_id: str) -> None:
        """A node agent: until it does what it shall do."""
        node, epoch = self.nodes[node_id], -1
        seconds: float | None = None
        while (assignment := self._state.nodes[node_id].assignment).epoch != epoch:
            epoch = assignment.epoch
            if node.tag != assignment.tag:
                began = self._clock.now()
                await node.switch(assignment.tag)
                seconds = self._clock.now() - began
        state = NodeState.ACTIVE if assignment.tag else NodeState.IDLE
        self._change(lambda tx: tx.report(node_id, state, epoch, epoch, switch_seconds=seconds))


def node_tags(split: Split) -> dict[str, tuple[str, ...]]:
    """Node -> what it can do."""
    kinds: list[tuple[str, tuple[str, ...], int]] = [
        ("rollout", (ROLLOUT,), split.rollout),
        ("train", (TRAIN,), split.train),
        ("both", (ROLLOUT, TRAIN), split.both),
    ]
    return {f"{kind}-{number:04}": tags for kind, tags, count in kinds for number in range(count)}
