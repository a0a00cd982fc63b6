"""What a scenario of `make chaos-scheduler` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.chaos.scheduler.checker import Verdict
from tests.chaos.scheduler.ledger import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Violations, figures, and what happened."""

    verdict: Verdict = field(default_factory=Verdict)
    """Violations."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Additional figures by name."""
    raw: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Samples behind them."""
    events: Sequence[Event] = ()
    """Its history; none where nodes are not real."""
    histories: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    """Those of several scenarios, by name."""

    def named(self, name: str) -> Outcome:
        """With its history as that of scenario `name`."""
        return replace(self, events=(), histories={name: self.events} if self.events else {})

    def __add__(self, other: Outcome) -> Outcome:
        """Both together."""
        return Outcome(
            verdict=self.verdict + other.verdict,
            figures={**self.figures, **other.figures},
            raw={**self.raw, **other.raw},
            histories={**self.histories, **other.histories},
        )
