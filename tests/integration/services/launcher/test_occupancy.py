"""The timeline is drawn from what the table counts."""

from __future__ import annotations

from pathlib import Path

from services.launcher.report.occupancy import Occupancy, draw_timeline
from tests.unit.services.launcher.test_occupancy import node, snapshot


def test_the_timeline_is_drawn_from_what_the_table_counts(tmp_path: Path) -> None:
    """Stretches add up to the shares; the first switch is a start."""
    occupancy = Occupancy()
    occupancy.add(snapshot(node("rollout", reported=2)), now=10.0)
    occupancy.add(snapshot(node("rollout", reported=2)), now=12.0)
    occupancy.add(snapshot(node("rollout"), running=1), now=13.0)
    occupancy.add(snapshot(node("train", reported=2)), now=14.0)
    assert [(each.activity, each.begin, each.end) for each in occupancy.stretches] == [
        ("starting", 0.0, 2.0),
        ("rollout", 2.0, 3.0),
        ("switching", 3.0, 4.0),
    ]
    shares = occupancy.shares()["node-a"]
    assert (shares["starting"], shares["rollout"], shares["switching"]) == (0.5, 0.25, 0.25)
    draw_timeline(tmp_path / "timeline.png", occupancy, [{"time": (occupancy.began or 0) + 1}])
    assert (tmp_path / "timeline.png").stat().st_size > 1000
