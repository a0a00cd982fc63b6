"""Seconds in which real engines generate a batch, by the gateway's queue and dispatch policies.

The queue of waiting turns, the policies and the embedded engines are the product's; between them
are no processes and no network. Each turn samples a quarter of the tokens that the real answer had,
whatever it samples, so that every order has the same work. An engine has work from the arrival of
the batch until its last turn ends, so its thread's CPU time is when it would end on a core of its
own; that of the busiest one is taken, since wall time is that of the machine's other work, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from bench.real_lengths.generations import Generated, sampled_tokens
from rollout.gateway.dispatch.length_estimators import remaining_tokens
from rollout.gateway.dispatch.policies import DispatchPolicy, LeastLoad, LongestFirst, TurnRequest
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.dispatch.skew_aware import SkewAware
from rollout.gateway.dispatch.waiting_turns import WaitingTurns
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine
from services.lib.decode_latency import DecodeLatency

_MEASURED_TOKENS = 48
_SHORTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A way to dispatch a batch."""

    policy: type[DispatchPolicy]
    """The gateway's."""
    expected: Sequence[float]
    """Tokens that it is told of each turn."""


def orders_of(
    answers: Sequence[Generated], rankers: Mapping[str, Sequence[float]], limit: int
) -> dict[str, Order]:
    """FIFO, and both policies that use lengths with each ranker and with the true lengths."""
    oracle = [float(answer.num_tokens) for answer in answers]
    found = {"fifo": Order(policy=LeastLoad, expected=[float(limit)] * len(answers))}
    for ranker, expected in {**rankers, "oracle": oracle}.items():
        bounded = [remaining_tokens(tokens, 0, limit) for tokens in expected]
        found[f"longest_first_{ranker}"] = Order(policy=LongestFirst, expected=bounded)
        found[f"skew_aware_{ranker}"] = Order(policy=SkewAware, expected=bounded)
    return found


class Engines:
    """Embedded engines of one process, each with its thread; an asynchronous context manager."""

    def __init__(self, model: Path, number: int, slots: int) -> None:
        self._slots = slots
        self._engines = {
            f"engine-{i}": TorchEngine(
                RolloutServerConfig(model=model, max_running=slots, max_context=1024)
            )
            for i in range(number)
        }

    async def __aenter__(self) -> Engines:
        for engine in self._engines.values():
            await engine.start()
        self._latency = await self._measured_latency()
        return self

    async def __aexit__(self, *error: object) -> None:
        for engine in self._engines.values():
            await engine.close()

    async def generate(self, answers: Sequence[Generated], order: Order) -> float:
        """CPU seconds of the busiest engine from the arrival of all turns to the last end."""
        servers = [self._server(name) for name in self._engines]

        def with_room(*needs: object) -> Sequence[Server]:
            return [server for server in servers if server.has_room(1.0)]

        turns = WaitingTurns(
            order.policy(),
            with_room,
            len(answers),
            serving=lambda: servers,
            latency=self._latency,
        )
        planning = asyncio.create_task(turns.keep_planning())
        began = await self._cpu_seconds()
        await asyncio.gather(
            *(
                self._turn(turns, i, answer, expected)
                for i, (answer, expected) in enumerate(zip(answers, order.expected, strict=True))
            )
        )
        ended = await self._cpu_seconds()
        planning.cancel()
        with suppress(asyncio.CancelledError):
            await planning
        return max(after - before for before, after in zip(began, ended, strict=True))

    async def _cpu_seconds(self) -> list[float]:
        """Of the thread of each engine so far."""
        return [await engine._call(time.thread_time) for engine in self._engines.values()]

    async def _turn(
        self, turns: WaitingTurns, number: int, answer: Generated, expected: float
    ) -> None:
        request = TurnRequest(
            group=str(number),
            rollout=str(number),
            num_tokens=len(answer.token_ids),
            max_new_tokens=answer.num_tokens,
            expected_tokens=expected,
        )
        server = await turns.acquire(request)
        await self._sample(server.address, answer.token_ids, -(-answer.num_tokens // _SHORTER))
        turns.release(server)

    async def _sample(self, name: str, ids: Sequence[int], tokens: int) -> None:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        engine = self._engines[name]
        vocabulary = engine.info.vocab_size
        await sampled_tokens(engine, [each % vocabulary for each in ids], sampling)

    def _server(self, name: str) -> Server:
        nothing: Any = None
        info = pb.GetServerInfoResponse(server_id=name, max_running=self._slots)
        return Server(name, nothing, nothing, info)

    async def _measured_latency(self) -> DecodeLatency:
        """Of all engines busy with one row each, and with all their slots."""
        one, full = [await self._step_seconds(rows) for rows in (1, self._slots)]
        # On a machine with other work one row may take longer than all slots a moment later.
        return DecodeLatency.of({1: min(one, full), self._slots: full})

    async def _step_seconds(self, rows: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(
            *(
                self._sample(name, [1], _MEASURED_TOKENS)
                for name in self._engines
                for _ in range(rows)
            )
        )
        return (time.perf_counter() - began) / _MEASURED_TOKENS


async def order_seconds(
    engines: Engines, answers: Sequence[Generated], orders: Mapping[str, Order]
) -> dict[str, float]:
    """One round: each order after the other, on the same warm engines."""
    return {name: await engines.generate(answers, order) for name, order in orders.items()}
