"""Expected lengths from the ranker service, and running means where it has not answered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.ranker.v1 import ranker_service_pb2 as pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.stubs import async_stub

from rollout.gateway.dispatch.length_estimators import LengthQuery, RunningMeans
from services.chassis import metrics
from services.chassis.rpc import clients

if TYPE_CHECKING:
    from rollout.gateway.config import GatewayConfig

__all__ = ["RankerLengths"]

_DEADLINE_SECONDS = 0.02
_FRESH_SECONDS = 60.0
_MAX_KNOWN = 16_384
_MAX_BATCH = 64
_ESTIMATES = metrics.counter(
    "rollout_gateway",
    "length_estimates_total",
    "Expected lengths, by where they came from: ranker, or running_means where it had no answer.",
    ("source",),
)
_FAILURES = metrics.counter(
    "rollout_gateway", "ranker_failures_total", "Questions that the ranker did not answer in time."
)

_Key = tuple[str, int]  # group, turn index


class RankerLengths:
    """Asks behind the turns' backs: a turn takes what is known when it needs it.

    The question goes out while the store opens the turn. It is asked once for all turns of a group,
    and whatever comes up during one question goes into the next.
    """

    def __init__(
        self, config: GatewayConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open a channel to the configured `ranker`; call this in an event loop."""
        assert config.ranker is not None  # the configuration has refused that
        self._run_id = config.run_id
        self._clock = clock
        self._channel = clients.channel(config, config.ranker)
        self._stub = async_stub(RankerServiceStub, self._channel)
        self._means = RunningMeans()
        self._known: OrderedDict[_Key, tuple[float, float]] = OrderedDict()  # tokens, when
        self._wanted: dict[_Key, LengthQuery] = {}
        self._asking: asyncio.Task[None] | None = None

    def prefetch(self, query: LengthQuery) -> None:
        """See `LengthEstimator`."""
        if not query.token_ids or self._is_fresh(_key(query)):
            return
        self._wanted.setdefault(_key(query), query)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    def predict(self, query: LengthQuery) -> float | None:
        """See `LengthEstimator`."""
        if (known := self._known.get(_key(query))) is not None:
            _ESTIMATES.labels("ranker").inc()
            return known[0]
        _ESTIMATES.labels("running_means").inc()
        return self._means.predict(query)

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """See `LengthEstimator`: the ranker learns it from the store."""
        self._means.observe(query, num_tokens)

    async def close(self) -> None:
        """See `LengthEstimator`."""
        if self._asking is not None:
            self._asking.cancel()
        await self._channel.close()

    async def _ask(self) -> None:
        while self._wanted:
            asked = dict(islice(self._wanted.items(), _MAX_BATCH))
            try:
                self._learn(asked, await self._answers(list(asked.values())))
            except grpc.aio.AioRpcError:
                _FAILURES.inc()
            for key in asked:
                del self._wanted[key]

    async def _answers(self, queries: Sequence[LengthQuery]) -> Sequence[float]:
        request = pb.PredictLengthsRequest(
            run_id=self._run_id,
            prompts=[
                pb.Prompt(task_id=b.group, token_ids=b.token_ids, turn_index=b.turn_index)
                for b in queries
            ],
        )
        response = await self._stub.PredictLengths(request, timeout=_DEADLINE_SECONDS)
        return response.expected_tokens

    def _learn(self, asked: Mapping[_Key, LengthQuery], tokens: Sequence[float]) -> None:
        for key, expected in zip(asked, tokens, strict=True):
            self._known[key] = (expected, self._clock())
            self._known.move_to_end(key)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _is_fresh(self, key: _Key) -> bool:
        known = self._known.get(key)
        return known is not None and self._clock() - known[1] < _FRESH_SECONDS


def _key(query: LengthQuery) -> _Key:
    return query.group, query.turn_index
