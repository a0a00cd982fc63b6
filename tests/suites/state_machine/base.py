"""What all rules of the machine share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from services.chassis.errors import ServiceError
from services.chassis.redis.connect import connect
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import RULES
from tests.suites.state_machine.clock import Clock
from tests.suites.state_machine.store_pair import Call, Flow, Pair, Side
from tests.suites.state_machine.view import view
from trajectory_manager.model.records import (
    Durability,
    Purpose,
    ReplayStrategy,
    RolloutState,
    StalenessPolicy,
    Topic,
)
from trajectory_manager.model.runs import Replay, RunConfig
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import redis_store

RUN_ID = "run"
COLUMNS = ("critic", "reference")
# Drawn from a list: integers would favour the constants of whatever modules are loaded.
PICK = st.sampled_from(range(60))
LOST = st.sampled_from([False, False, True])
STEPS = st.sampled_from([None, None, None, 0, 1, 2, 3, 4, 5])

T = TypeVar("T")


@st.composite
def rules_of_runs(draw: st.DrawFn) -> RunConfig:
    """Rules of all kinds."""
    groups_per_step = draw(st.integers(1, 2))
    replay = Replay(
        strategy=draw(st.sampled_from(ReplayStrategy)),
        capacity_groups=draw(st.integers(2, 4)),
        groups_per_step=draw(st.integers(1, 2)),
        reward_name="reward",
        temperature=draw(st.sampled_from([0.1, 1.0])),
    )
    return replace(
        RULES,
        group_size=2,
        groups_per_step=groups_per_step,
        max_staleness=draw(st.integers(0, 2)),
        staleness_policy=draw(st.sampled_from(StalenessPolicy)),
        zero_variance_reward=draw(st.sampled_from(["", "reward"])),
        num_extra_samples=draw(st.integers(0, 1)),
        fifo_window=draw(st.sampled_from([0, groups_per_step, groups_per_step + 2])),
        publish_wait_seconds=10.0,
        required_columns=draw(st.sampled_from([(), (), COLUMNS[:1], COLUMNS])),
        replay=draw(st.sampled_from([None, replay])),
        max_deliveries=draw(st.integers(0, 2)),
        max_stored_tokens=draw(st.sampled_from([0, 0, 20])),
        retention_steps=draw(st.integers(0, 2)),
    )


@dataclass(slots=True)
class Rig:
    """A Redis server, the scripts that run on it, and what was counted."""

    server: RedisServer
    scripts: Path
    restarts: bool
    loop: asyncio.AbstractEventLoop
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Held:
    """A task lease in an agent's hands."""

    rollout_id: str
    nonce: str
    purpose: Purpose
    started: bool = False


@dataclass(slots=True)
class Writing:
    """A turn in the hands of those who opened it."""

    rollout_id: str
    turn_id: str
    prompt: list[int]
    prefix: int = 0
    length: int = 0
    epochs: list[tuple[int, int]] = field(default_factory=list)


class Base(RuleBasedStateMachine):
    """A run on both stores; after each rule they show the same."""

    num_tasks = 0

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.config = RULES
        self.held: list[Held] = []
        self.names: set[str] = set()
        self.turns: dict[tuple[str, str], Writing] = {}
        self.epoch = self.step = self.committed = 0
        self.epochs: list[int] = [0]
        self.delivered: set[int] = set()
        self.ended: dict[str, Any] = {}
        self.versions: dict[Topic, list[int]] = {}
        self.stack = AsyncExitStack()
        self.wait(self._open())

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Run until it is done."""
        return self.rig.loop.run_until_complete(awaitable)

    async def _open(self) -> None:
        redis = connect(self.rig.server.url)
        self.stack.push_async_callback(redis.aclose)
        await redis.flushall()
        durability = Durability.DURABLE if self.rig.restarts else Durability.FAST
        real = await self.stack.enter_async_context(
            redis_store(self.rig.server.url, durability, 5.0, self.rig.scripts)
        )
        clock = Clock()
        model = memory_store(clock)
        self.pair = Pair(
            real=Side(real, 0, Rollouts(real)),
            model=Side(model, 1, Rollouts(model)),
            clock=clock,
            redis=redis,
            counts=self.rig.counts,
        )

    def teardown(self) -> None:
        """Leave the server as it was found."""
        self.wait(self.stack.aclose())

    def both(self, call: Call, **options: Any) -> Any:
        """The answer of the model, which Redis gave as well."""
        return self.answers(call, **options)[1]

    def answers(self, call: Call, **options: Any) -> tuple[Any, Any]:
        """The answers of both."""
        return self.wait(self.pair.both(call, **options))

    def flow(self, flow: Flow, steps: int | None = None) -> Any:
        """The answer of the model's manager, which the one on Redis gave as well."""
        return self.wait(self.pair.flow(flow, steps))[1]

    @initialize(rules=rules_of_runs())
    def create(self, rules: RunConfig) -> None:
        """The run, and its first trainer."""
        self.config = rules
        self.both(lambda on: on.store.runs.create_run(RUN_ID, rules))
        self.take_over("trainer-0", 0)

    def take_over(self, trainer_id: str, step: int, *, lost: bool = False) -> None:
        """A trainer reconciles."""
        answer = self.both(
            lambda on: on.store.ledger.reconcile(RUN_ID, step, trainer_id), lost=lost
        )
        if isinstance(answer, ServiceError):
            return
        self.epoch = answer.epoch
        self.epochs.append(answer.epoch)
        self.delivered.clear()
        self.committed, self.step = step, max((step, *answer.pending_steps))

    @invariant()
    def both_show_the_same(self) -> None:
        """Every rollout, group, step and column; and what has ended stays as it is."""
        if self.config is RULES:
            return
        given = (RUN_ID, self.names, self.epoch, self.delivered)
        real, model = self.wait(self._views(*given))
        for name, shown in model.items():
            assert real[name] == shown, f"{name}: Redis {real[name]!r}, the model {shown!r}"
        self._check_ends(real["rollouts"])
        self.wait(self._check_wakeups())

    async def _check_wakeups(self) -> None:
        """Long polls wake on one store exactly when they do on the other."""
        for topic in (Topic.TASKS, Topic.READY):
            versions = [
                await side.store.runs.version(RUN_ID, topic)
                for side in (self.pair.real, self.pair.model)
            ]
            before = self.versions.get(topic, [0, 0])
            woken = [now != then for now, then in zip(versions, before, strict=True)]
            assert woken[0] == woken[1], f"{topic}: woken on Redis, on the model: {woken}"
            self.versions[topic] = versions

    async def _views(self, *given: Any) -> list[dict[str, Any]]:
        return [await view(side.store, *given) for side in (self.pair.real, self.pair.model)]

    def _check_ends(self, rollouts: Sequence[Any]) -> None:
        for name, found in zip(sorted(self.names), rollouts, strict=True):
            ended = found is not None and found[0]["state"] is not RolloutState.RUNNING
            assert not ended or self.ended.setdefault(name, found) == found, f"{name} changed"
            if found is None:
                self.ended.pop(name, None)


def picked(items: Sequence[T], number: int) -> T:
    """One of `items`."""
    return items[number % len(items)]
