"""How long a turn will probably be, learned from the turns that have ended."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RunningMeans", "remaining"]

_MAX_GROUPS = 4096
_WINDOW = 256
"""Turns after which a mean forgets: the policy that is trained changes its lengths."""


class RunningMeans:
    """The mean of a group's turns that have ended, or of the run's while the group has none."""

    def __init__(self, max_groups: int = _MAX_GROUPS) -> None:
        """Remember the groups whose turns ended last."""
        self._max_groups = max_groups
        self._groups: OrderedDict[str, _Mean] = OrderedDict()
        self._run = _Mean()

    def ended(self, group: str, num_tokens: int) -> None:
        """A turn of `group` has ended after `num_tokens` sampled tokens."""
        self._run.add(num_tokens)
        self._groups.setdefault(group, _Mean()).add(num_tokens)
        self._groups.move_to_end(group)
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)

    def expected(self, group: str) -> float | None:
        """Tokens that a turn of `group` samples from its beginning to its end; None: no idea."""
        mean = self._groups.get(group, self._run)
        return mean.value if mean.count else None


def remaining(expected: float | None, num_sampled: int, max_new_tokens: int) -> float:
    """Tokens still to come of a turn that has `num_sampled`, at most `max_new_tokens`.

    A turn that has passed half of what was expected is expected to go on for as long as it has
    been going: lengths have long tails, and whoever outlived the mean is in the tail.
    """
    if expected is None:
        return float(max_new_tokens)
    return min(max(expected - num_sampled, num_sampled, 1.0), max_new_tokens)


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, number: float) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.value += (number - self.value) / self.count
