"""Random mixes of gangs on nodes that fail, drain and return: no part is held, nobody is forgotten.

A mix is played against a world (`scheduler_worlds.py`): the scheduler's own rules with a virtual
clock, or a real scheduler over gRPC. What is checked is told by the mix itself, not by the
scheduler: who asked for what, in which order, and which nodes could do it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.chaos.scheduler.checker import Verdict

GangName = tuple[str, str]
"""run_id and gang_id."""

_TAGS = ("train", "score")
_MOST_NODES = 10
_MOST_RUNS = 3
_STEPS = 30
_LONGEST_DELAY_SECONDS = 20.0
_AFTERWARDS_SECONDS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node's capabilities."""

    name: str
    """Node."""
    tags: tuple[str, ...]
    """Its capability in addition to rollout."""
    runs: tuple[str, ...]
    """Jobs it has workers of."""

    def can(self, ask: Ask) -> bool:
        """Whether the gang could use it."""
        return ask.run_id in self.runs and ask.tag in self.tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A gang's request."""

    run_id: str
    """Job."""
    gang_id: str
    """Gang."""
    tag: str
    """Capability."""
    num_nodes: int
    """Nodes, all or none."""
    delay_seconds: float
    """How long before they are needed it asks."""
    turn: int
    """Place in the order of requests; those that asked at once have the same."""

    @property
    def name(self) -> GangName:
        """Unique."""
        return self.run_id, self.gang_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node's assignment to a gang."""

    gang: GangName
    """For whom."""
    rank: int
    """As which of its members."""
    size: int
    """How many they are."""


class World(Protocol):
    """What a mix is played against."""

    async def join(self, machine: Machine) -> None:
        """A node registers, for the first time or again."""
        ...

    async def fail(self, machine: Machine) -> None:
        """A node is gone."""
        ...

    async def drain(self, machine: Machine, expected: bool) -> None:
        """An operator wants no work on a node, or work again."""
        ...

    async def obey(self, machines: Iterable[Machine]) -> None:
        """Nodes take up their assignments."""
        ...

    async def request(self, asks: Sequence[Ask]) -> None:
        """Gangs ask, all at once."""
        ...

    async def release(self, ask: Ask) -> None:
        """A gang gives its nodes back, or gives up waiting."""
        ...

    async def set_policy(self, run_id: str, priority: int, max_nodes: int) -> None:
        """A job gets another place among the others."""
        ...

    async def pass_time(self, seconds: float) -> None:
        """Time goes by, for nodes that obey and for those that do not."""
        ...

    async def states(self) -> Sequence[Mapping[str, Place]]:
        """What was told to whom, by node, in every state that is known of since the last question.

        Nodes of no gang are left out. The last one is the present.
        """
        ...


def partial_gangs(places: Iterable[Place], asks: Iterable[Ask]) -> int:
    """Gangs that were given some of their nodes, or more than they asked for, or a rank twice."""
    ranks: dict[GangName, list[int]] = {ask.name: [] for ask in asks}
    sizes: dict[GangName, set[int]] = {ask.name: set() for ask in asks}
    for place in places:
        ranks.setdefault(place.gang, []).append(place.rank)
        sizes.setdefault(place.gang, set()).add(place.size)
    expected = {ask.name: ask.num_nodes for ask in asks}
    return sum(
        sorted(held) != list(range(expected.get(name, 0))) or sizes[name] != {expected[name]}
        for name, held in ranks.items()
        if held
    )


async def play(world: World, random: Random, *, num_steps: int = _STEPS) -> Verdict:
    """One random mix, with a look after every step, and everybody's turn at its end."""
    mix = _Mix(world=world, random=random)
    await mix.begin()
    for _ in range(num_steps):
        await mix.step()
    await mix.rest()
    return Verdict(
        partial_gangs=len(mix.partial), deadlocks=len(mix.stuck), gangs_served=mix.served
    )


@dataclass(slots=True, kw_only=True)
class _Mix:
    world: World
    random: Random
    machines: list[Machine] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    asks: dict[GangName, Ask] = field(default_factory=dict)
    policies: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Priority and quota (0 for none) by job."""
    partial: set[GangName] = field(default_factory=set)
    stuck: set[GangName] = field(default_factory=set)
    served: int = 0
    turn: int = 0

    async def begin(self) -> None:
        """Draw jobs and nodes."""
        runs = [f"run-{index}" for index in range(self.random.randint(1, _MOST_RUNS))]
        for run_id in runs:
            await self._set_policy(run_id)
        for index in range(self.random.randint(2, _MOST_NODES)):
            machine = Machine(
                name=f"node-{index}",
                tags=_some(self.random, _TAGS),
                runs=_some(self.random, runs),
            )
            self.machines.append(machine)
            await self.world.join(machine)

    async def step(self) -> None:
        """Something happens, and some of the nodes obey."""
        happens = [self._request, self._release, self._fail, self._return, self._drain]
        rarely = [self._change_policy, self._wait]
        await self.random.choices([*happens, *rarely], [6, 4, 2, 3, 2, 1, 1])[0]()
        await self._look()
        awake = [machine for machine in self._there() if self.random.random() < 0.7]
        await self.world.obey(awake)
        await self._look()

    async def rest(self) -> None:
        """Everybody comes back and everything stands still; then each gang has its turn."""
        for machine in self.machines:
            if machine.name in self.gone:
                await self._join(machine)
            await self.world.drain(machine, False)
        await self.world.obey(self.machines)
        await self.world.pass_time(_AFTERWARDS_SECONDS)
        await self.world.obey(self.machines)
        self.stuck |= {ask.name for ask in self._entitled(await self._look())}
        while whole := self._whole(await self._look()):
            for ask in whole:
                await self._end(ask)
            self.served += len(whole)
            await self.world.obey(self.machines)
        self.stuck |= {ask.name for ask in self.asks.values() if self._fits(ask)}
        for ask in list(self.asks.values()):
            await self._end(ask)

    async def _look(self) -> Mapping[str, Place]:
        """Hold every state against who asked for what; what is told at present."""
        states = await self.world.states()
        for places, ask in itertools.product(states, self.asks.values()):
            mine = [place for place in places.values() if place.gang == ask.name]
            if partial_gangs(mine, [ask]):
                self.partial.add(ask.name)
        return states[-1]

    def _whole(self, places: Mapping[str, Place]) -> list[Ask]:
        held = [place.gang for place in places.values()]
        return [ask for ask in self.asks.values() if held.count(ask.name) == ask.num_nodes]

    def _fits(self, ask: Ask) -> bool:
        """Whether it could have its nodes if nobody else had any."""
        _, quota = self.policies[ask.run_id]
        able = sum(machine.can(ask) for machine in self.machines)
        return ask.num_nodes <= (min(able, quota) if quota else able)

    def _entitled(self, places: Mapping[str, Place]) -> list[Ask]:
        """Gangs that have nothing though their nodes are free, and nobody before them waits."""
        waiting = [
            ask
            for ask in self.asks.values()
            if self._fits(ask) and ask.name not in {place.gang for place in places.values()}
        ]
        return [
            ask
            for ask in waiting
            if self._is_possible(ask, places)
            and not any(self._comes_before(other, ask) for other in waiting if other != ask)
        ]

    def _is_possible(self, ask: Ask, places: Mapping[str, Place]) -> bool:
        _, quota = self.policies[ask.run_id]
        held = {
            name
            for name, place in places.items()
            if place.gang not in self.asks or self._rank(self.asks[place.gang]) <= self._rank(ask)
        }
        used = sum(place.gang[0] == ask.run_id for place in places.values())
        free = sum(machine.can(ask) and machine.name not in held for machine in self.machines)
        return free >= ask.num_nodes and (not quota or used + ask.num_nodes <= quota)

    def _comes_before(self, other: Ask, ask: Ask) -> bool:
        """Whether `other` may reserve what `ask` could use."""
        rivals = other.run_id == ask.run_id or any(
            machine.can(other) and machine.can(ask) for machine in self.machines
        )
        return rivals and self._order(other) <= self._order(ask)

    def _order(self, ask: Ask) -> tuple[int, bool, int]:
        return *self._rank(ask), ask.turn

    def _rank(self, ask: Ask) -> tuple[int, bool]:
        """Within a priority, those that train come first."""
        return -self.policies[ask.run_id][0], ask.tag != "train"

    def _there(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.name not in self.gone]

    async def _request(self) -> None:
        self.turn += 1
        asks = [self._ask(index) for index in range(self.random.choice((1, 1, 2, 3)))]
        self.asks |= {ask.name: ask for ask in asks}
        await self.world.request(asks)

    def _ask(self, index: int) -> Ask:
        return Ask(
            run_id=self.random.choice(list(self.policies)),
            gang_id=f"gang-{self.turn}-{index}",
            tag=self.random.choice(_TAGS),
            num_nodes=self.random.randint(1, max(2, len(self.machines) * 2 // 3)),
            delay_seconds=self.random.choice((0.0, self.random.uniform(0, _LONGEST_DELAY_SECONDS))),
            turn=self.turn,
        )

    async def _release(self) -> None:
        if self.asks:
            await self._end(self.random.choice(list(self.asks.values())))

    async def _end(self, ask: Ask) -> None:
        del self.asks[ask.name]
        await self.world.release(ask)

    async def _fail(self) -> None:
        if there := self._there():
            machine = self.random.choice(there)
            self.gone.add(machine.name)
            await self.world.fail(machine)

    async def _return(self) -> None:
        """One that is gone comes back; one that is not was restarted without notice."""
        await self._join(self.random.choice(self.machines))

    async def _join(self, machine: Machine) -> None:
        self.gone.discard(machine.name)
        await self.world.join(machine)

    async def _drain(self) -> None:
        await self.world.drain(self.random.choice(self.machines), self.random.random() < 0.5)

    async def _change_policy(self) -> None:
        await self._set_policy(self.random.choice(list(self.policies)))

    async def _set_policy(self, run_id: str) -> None:
        quota = self.random.choice((0, 0, self.random.randint(1, _MOST_NODES)))
        self.policies[run_id] = self.random.randint(0, 2), quota
        await self.world.set_policy(run_id, *self.policies[run_id])

    async def _wait(self) -> None:
        await self.world.pass_time(self.random.uniform(0, _LONGEST_DELAY_SECONDS))


def _some(random: Random, names: Sequence[str]) -> tuple[str, ...]:
    """One or more of them."""
    return tuple(sorted(random.sample(names, random.randint(1, len(names)))))
