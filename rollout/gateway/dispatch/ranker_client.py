"""Client of the ranker service, with running means where it has not answered."""

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

from rollout.gateway import limits
from rollout.gateway.dispatch.length_estimators import LengthQuery, RunningMeans
from services.chassis import metrics
from services.chassis.rpc import clients
from services.lib.token_bytes import pack_ids

if TYPE_CHECKING:
    from rollout.gateway.config import GatewayConfig

_FRESH_SECONDS = 60.0
_MAX_KNOWN = 16_384
_MAX_BATCH = 64
_ESTIMATES = metrics.counter(
    "rollout_gateway",
    "length_estimates_total",
    "Predicted lengths by source: ranker, or running_means where it had no answer.",
    ("source",),
)
_FAILURES = metrics.counter(
    "rollout_gateway", "ranker_failures_total", "Calls that the ranker did not answer in time."
)

_Key = tuple[str, int]  # group, turn index


class RankerLengths:
    """Queries the ranker asynchronously; a turn uses the cached answer.

    A query is sent while the store opens the turn, once for all turns of a group; queries that
    arrive during a call form the next batch.
    """

    def __init__(
        self, config: GatewayConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open a channel to the configured `ranker`; call this in an event loop."""
        assert config.ranker is not None  # checked by GatewayConfig
        self._run_id = config.run_id
        self._seconds = limits.RANKER_SECONDS
        self._clock = clock
        self._channel = clients.channel(config, config.ranker)
        self._stub = async_stub(RankerServiceStub, self._channel)
        self._means = RunningMeans()
        self._known: OrderedDict[_Key, tuple[float, float]] = OrderedDict()  # tokens, when
        self._pending: dict[_Key, LengthQuery] = {}
        self._sending: asyncio.Task[None] | None = None

    def prefetch(self, query: LengthQuery) -> None:
        """Query the ranker in the background, unless the prompt is unknown or the answer fresh."""
        if not query.token_ids or self._is_fresh(_key(query)):
            return
        self._pending.setdefault(_key(query), query)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    def predict(self, query: LengthQuery) -> float | None:
        """The cached answer of the ranker, or the running mean."""
        if (known := self._known.get(_key(query))) is not None:
            _ESTIMATES.labels("ranker").inc()
            return known[0]
        _ESTIMATES.labels("running_means").inc()
        return self._means.predict(query)

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """Update the running means; the ranker reads lengths from the store."""
        self._means.observe(query, num_tokens)

    async def close(self) -> None:
        """Cancel the call in flight and close the channel."""
        if self._sending is not None:
            self._sending.cancel()
        await self._channel.close()

    async def _send(self) -> None:
        while self._pending:
            batch = dict(islice(self._pending.items(), _MAX_BATCH))
            try:
                self._learn(batch, await self._answers(list(batch.values())))
            except grpc.aio.AioRpcError:
                _FAILURES.inc()
            for key in batch:
                del self._pending[key]

    async def _answers(self, queries: Sequence[LengthQuery]) -> Sequence[float]:
        request = pb.PredictLengthsRequest(
            run_id=self._run_id,
            prompts=[
                pb.Prompt(task_id=b.group, token_ids=pack_ids(b.token_ids), turn_index=b.turn_index)
                for b in queries
            ],
        )
        response = await self._stub.PredictLengths(request, timeout=self._seconds)
        return response.expected_tokens

    def _learn(self, batch: Mapping[_Key, LengthQuery], tokens: Sequence[float]) -> None:
        for key, expected in zip(batch, tokens, strict=True):
            self._known[key] = (expected, self._clock())
            self._known.move_to_end(key)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _is_fresh(self, key: _Key) -> bool:
        known = self._known.get(key)
        return known is not None and self._clock() - known[1] < _FRESH_SECONDS


def _key(query: LengthQuery) -> _Key:
    return query.group, query.turn_index
