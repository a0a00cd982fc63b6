"""Length estimators: how many tokens a turn is expected to sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.chassis import plugins

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

    async def close(self) -> None:
        """Close connections and cancel background work."""
        ...


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
    "ranker": "rollout.gateway.dispatch.ranker_client:RankerLengths",
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
