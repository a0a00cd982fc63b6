"""Metrics that alerts ask for an increase of."""

from __future__ import annotations

from prometheus_client import REGISTRY

from trajectory_manager.model.records import DeadLetterReason
from trajectory_manager.service import metrics


def test_every_reason_to_discard_groups_begins_at_zero() -> None:
    """Twelve groups discarded between two scrapes are an increase only from a value before."""
    name = metrics.DISCARDED._name + "_total"
    for reason in ("staleness", *(each.name.lower() for each in DeadLetterReason)):
        assert REGISTRY.get_sample_value(f"{name}", {"reason": reason}) is not None, reason
    assert REGISTRY.get_sample_value(name, {"reason": "unknown"}) is None
