"""The real store and its model: every call goes to both, and both must return the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from seamflow.trajectory.v1.trajectory_service_pb2 import BegunTurn

from services.chassis.errors import Reason, ServiceError
from tests.suites.state_machine.clock import Clock
from tests.suites.state_machine.crashes import Fuse, KilledError, dying
from trajectory_manager.model.tokens import Span, Turn
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.service.sweeper import Retention
from trajectory_manager.store.redis.connect import Store


@dataclass(slots=True)
class Side:
    """One of the two stores, and the manager that works on it."""

    store: Store
    index: int
    rollouts: Rollouts

    def manager(self, fuse: Fuse | None) -> tuple[Rollouts, Retention]:
        """The living manager, or one that will be killed."""
        if fuse is None:
            return self.rollouts, Retention(self.store)
        mortal = dying(self.store, fuse)
        return Rollouts(mortal), Retention(mortal)


Call = Callable[[Side], Awaitable[Any]]
Flow = Callable[[Rollouts, Retention, Side], Awaitable[Any]]


@dataclass(slots=True)
class Pair:
    """Both stores, in lockstep."""

    real: Side
    model: Side
    clock: Clock
    redis: Any
    counts: Counter[str] = field(default_factory=Counter)

    async def both(
        self, call: Call, *, lost: bool = False, stable: Callable[[Any], Any] | None = None
    ) -> tuple[Any, Any]:
        """The answers of both, which are equal.

        With `lost` the real store's first answer is lost and the call sent again, as a client does
        that got UNAVAILABLE: `stable` is what of the answer the second one repeats (default: all).
        """
        await self._begin()
        if lost:
            self.counts["retries_injected"] += 1
            await _answer(call, self.real)
        real, model = await _answer(call, self.real), await _answer(call, self.model)
        self._compare(real, model, stable if lost else None)
        return real, model

    async def flow(self, flow: Flow, steps: int | None = None) -> tuple[Any, Any]:
        """A flow of the manager on both; with `steps` it is killed after that many store calls."""
        await self._begin()
        answers, called = [], []
        for side in (self.real, self.model):
            fuse = None if steps is None else Fuse(steps)
            rollouts, retention = side.manager(fuse)
            answers.append(await _answer(lambda s: flow(rollouts, retention, s), side))  # noqa: B023
            called.append(fuse.called if fuse else [])
        assert called[0] == called[1], "the stores led the manager different ways"
        if answers[0] == "killed":
            self.counts["crashes_injected"] += 1
        self._compare(answers[0], answers[1], None)
        return answers[0], answers[1]

    async def _begin(self) -> None:
        self.counts["operations"] += 1
        self.clock.tick()
        await self.clock.publish(self.redis)

    def _compare(self, real: Any, model: Any, stable: Callable[[Any], Any] | None) -> None:
        same = comparable(real) == comparable(model)
        if stable is not None and not same:
            same = comparable(stable(real)) == comparable(stable(model))
        assert same, f"Redis returned {comparable(real)!r}, the model {comparable(model)!r}"


async def _answer(call: Call, side: Side) -> Any:
    try:
        return await call(side)
    except ServiceError as error:
        return error
    except KilledError:
        return "killed"


def comparable(answer: Any) -> Any:
    """A comparable answer, without the epochs of turns, which differ between the stores."""
    if isinstance(answer, ServiceError):
        stale = answer.reason is Reason.STALE_EPOCH
        return answer.reason, answer.message.partition("epoch")[0] if stale else answer.message
    if isinstance(answer, BegunTurn):
        return _comparable_turn(answer)
    if isinstance(answer, Turn):
        answer = replace(answer, epoch=0)
    if isinstance(answer, tuple | list) and answer and all(isinstance(x, Span) for x in answer):
        return [span._replace(num_tokens=1) for span in answer for _ in range(span.num_tokens)]
    if isinstance(answer, list | tuple):
        return [comparable(part) for part in answer]
    if isinstance(answer, dict):
        return {name: comparable(part) for name, part in answer.items()}
    if is_dataclass(answer) and not isinstance(answer, type):
        return {one.name: comparable(getattr(answer, one.name)) for one in fields(answer)}
    return answer


def _comparable_turn(begun: BegunTurn) -> Any:
    """Each token with what its span says: the stores may cut spans differently."""
    known = BegunTurn()
    known.CopyFrom(begun)
    known.ClearField("epoch")
    kinds = [
        (span.origin, span.weight_version, span.version_source, span.server_id)
        for span in known.tokens.spans
        for _ in range(span.num_tokens)
    ]
    del known.tokens.spans[:]
    return known, kinds
