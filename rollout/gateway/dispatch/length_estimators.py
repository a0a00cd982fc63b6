"""Length estimators: how many tokens a turn is expected to sample."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import grpc.aio
from seamflow.ranker.v1 import ranker_service_pb2 as pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.stubs import async_stub
from seamflow.waits import in_background

from rollout.gateway import limits
from services.chassis import metrics, plugins
from services.chassis.rpc import clients
from services.lib.token_bytes import pack_ids

if TYPE_CHECKING:
    from rollout.gateway.config import GatewayConfig

_MAX_GROUPS = 4096
_WINDOW = 256
"""Turns that a mean remembers: lengths change as the policy is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQuery:
    """What an estimator knows of a turn before it is sampled."""

    group: str
    """The task of its rollout, or the rollout itself: turns of a group have similar lengths."""
    token_ids: Sequence[int] = ()
    """The whole prompt; empty until the store has matched its recorded prefix."""
    turn_index: int = 0
    """Earlier turns of the rollout, counted by the answers among the agent's messages."""


class LengthEstimator(Protocol):
    """Constructed with the gateway's configuration. No method may block a turn."""

    def prefetch(self, query: LengthQuery) -> None:
        """A turn is about to begin: start slow work in the background."""
        ...

    def predict(self, query: LengthQuery) -> float | None:
        """Tokens that the whole turn is expected to sample; None: unknown."""
        ...

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """The turn has ended after `num_tokens` sampled tokens."""
        ...

    async def close(self) -> None: ...


class RunningMeans:
    """Mean length of the group's ended turns; of the run's while the group has none."""

    def __init__(
        self, config: GatewayConfig | None = None, *, max_groups: int = _MAX_GROUPS
    ) -> None:
        """Remember the `max_groups` groups whose turns ended last; `config` is not used."""
        self._max_groups = max_groups
        self._groups: OrderedDict[str, _Mean] = OrderedDict()
        self._run = _Mean()

    def prefetch(self, query: LengthQuery) -> None:
        """Do nothing: the mean needs no preparation."""

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """Add the length to the means of the group and of the run."""
        self._run.add(num_tokens)
        self._groups.setdefault(query.group, _Mean()).add(num_tokens)
        self._groups.move_to_end(query.group)
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)

    def predict(self, query: LengthQuery) -> float | None:
        """The mean; None before the first turn has ended."""
        mean = self._groups.get(query.group, self._run)
        return mean.value if mean.count else None

    async def close(self) -> None:
        """Do nothing: no resource is held."""


BUILT_IN = {
    "running_means": f"{__name__}:RunningMeans",
    "ranker": "rollout.gateway.dispatch.length_estimators:RankerLengths",
}


def load_lengths(config: GatewayConfig) -> LengthEstimator:
    """The estimator that `lengths` names: built in, or a plug-in "package.module:Name"."""
    estimator: LengthEstimator = plugins.make("lengths", config.lengths, BUILT_IN, config)
    return estimator


def remaining_tokens(predicted: float | None, num_sampled: int, max_new_tokens: int) -> float:
    """Tokens that a turn with `num_sampled` tokens is still expected to sample.

    At most `max_new_tokens`, which is also the answer for an unknown length. Lengths have long
    tails: past half of the prediction, as many tokens are expected again as were sampled.
    """
    if predicted is None:
        return float(max_new_tokens)
    return min(max(predicted - num_sampled, num_sampled, 1.0), max_new_tokens)


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, number: float) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.value += (number - self.value) / self.count


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
            self._sending = in_background(self._send(), "asking the ranker")

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
