"""How long a turn will probably be: the estimators, and what their answer means midway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.chassis import plugins

if TYPE_CHECKING:
    from rollout.gateway.config import GatewayConfig

__all__ = ["LengthEstimator", "LengthQuery", "RunningMeans", "load_lengths", "remaining_tokens"]

_MAX_GROUPS = 4096
_WINDOW = 256
"""Turns after which a mean forgets: the policy that is trained changes its lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQuery:
    """What is known of a turn before it is sampled."""

    group: str
    """The task of its rollout, or the rollout: turns of a group are about equally long."""
    token_ids: Sequence[int] = ()
    """The whole prompt; empty while the store has not told yet what it continues."""
    turn_index: int = 0
    """Turns of the same rollout before it, as far as the caller's messages tell."""


class LengthEstimator(Protocol):
    """Made with the gateway's configuration. Nothing here may make a turn wait."""

    def prefetch(self, query: LengthQuery) -> None:
        """A turn is about to begin: what takes time starts now, and goes on behind its back."""
        ...

    def predict(self, query: LengthQuery) -> float | None:
        """Tokens that the turn samples from its query to its end; None: no idea."""
        ...

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """The turn has ended after `num_tokens` sampled tokens."""
        ...

    async def close(self) -> None:
        """Let go of what it holds open."""
        ...


class RunningMeans:
    """The mean of a group's turns that have ended, or of the run's while the group has none."""

    def __init__(
        self, config: GatewayConfig | None = None, *, max_groups: int = _MAX_GROUPS
    ) -> None:
        """Remember the groups whose turns ended last. Nothing of the configuration matters."""
        self._max_groups = max_groups
        self._groups: OrderedDict[str, _Mean] = OrderedDict()
        self._run = _Mean()

    def prefetch(self, query: LengthQuery) -> None:
        """See `LengthEstimator`: there is nothing to prepare."""

    def observe(self, query: LengthQuery, num_tokens: int) -> None:
        """See `LengthEstimator`."""
        self._run.add(num_tokens)
        self._groups.setdefault(query.group, _Mean()).add(num_tokens)
        self._groups.move_to_end(query.group)
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)

    def predict(self, query: LengthQuery) -> float | None:
        """See `LengthEstimator`."""
        mean = self._groups.get(query.group, self._run)
        return mean.value if mean.count else None

    async def close(self) -> None:
        """See `LengthEstimator`: nothing is open."""


BUILT_IN = {
    "running_means": f"{__name__}:RunningMeans",
    "ranker": "rollout.gateway.dispatch.ranker_client:RankerLengths",
}


def load_lengths(config: GatewayConfig) -> LengthEstimator:
    """The estimator that `lengths` names: built in, or anyone's own "package.module:Name"."""
    estimator: LengthEstimator = plugins.make("lengths", config.lengths, BUILT_IN, config)
    return estimator


def remaining_tokens(predicted: float | None, num_sampled: int, max_new_tokens: int) -> float:
    """Tokens still to come of a turn that has `num_sampled`, at most `max_new_tokens`.

    A turn that has passed half of what was expected is expected to go on for as long as it has
    been going: lengths have long tails, and whoever outlived the mean is in the tail.
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
