"""Tokens per second over a sliding window."""

from __future__ import annotations

import pytest

from rollout.server.engines.engine import TokenRate


def test_rate_is_a_mean_over_recent_seconds_and_falls_to_zero() -> None:
    """A steady stream shows its rate, an idle engine none."""
    now = 100.0
    rate = TokenRate(window_seconds=5, clock=lambda: now)
    assert rate.per_second() == 0.0
    for _ in range(40):
        rate.add(25)
        now += 0.25
    assert rate.per_second() == pytest.approx(100, rel=0.2)
    now += 10
    assert rate.per_second() == 0.0
