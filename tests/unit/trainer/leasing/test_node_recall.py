"""When a batch will be full, as a pure function, and what follows from it."""

from __future__ import annotations

import pytest

from trainer.clients.sample_client import BatchProgress, BatchTimeout
from trainer.leasing.batch_source import NodeRecall, predict_full

NEVER = BatchTimeout()


@pytest.mark.parametrize(
    ("seen", "needed", "expected"),
    [
        ([(0, 0), (10, 5), (20, 10)], 20, 40.0),  # steady
        ([(0, 0), (10, 10), (40, 15)], 20, 70.0),  # slower of late: the tail counts
        ([(0, 0), (10, 10), (20, 15), (40, 15)], 20, 70.0),  # nothing new puts it off
        ([(20, 10)], 20, None),  # nothing to compare with
        ([(0, 0), (10, 5)], 20, None),  # less than half
        ([(0, 0), (10, 2)], 3, None),  # too few groups for a rate
    ],
)
def test_the_recent_rate_predicts_when_a_batch_is_full(
    seen: list[tuple[float, int]], needed: int, expected: float | None
) -> None:
    """Extrapolates the rate of the last quarter of a batch; None if there is too little history."""
    assert predict_full(seen, needed) == expected


def simulate(
    lead_seconds: float, arrivals: list[float], until: float, timeout: BatchTimeout = NEVER
) -> list[tuple[str, float]]:
    """What a trainer does that waits for 20 groups arriving at `arrivals`."""
    recall, done, now = NodeRecall(lead_seconds, timeout), list[tuple[str, float]](), 0.0
    while now <= until:
        progress = BatchProgress(sum(arrival <= now for arrival in arrivals), 20)
        if timeout.allows_start(now, progress):
            return [*done, ("full" if progress.full else "timeout", now)]
        recall.observe(now, progress)
        if recall.take_request(now):
            done.append(("ask", now))
        elif recall.take_release(now):
            done.append(("give back", now))
        nearest = min((a for a in arrivals if a > now), default=until + 1)
        now = min(now + recall.poll_seconds(now), nearest)
    return done


def test_nodes_are_back_when_the_batch_is_full() -> None:
    """One group a second, a way back of 5 s: asked for 5 s before the batch is full."""
    arrivals = [float(second) for second in range(1, 21)]
    assert simulate(5.0, arrivals, 100.0) == [("ask", 15.0), ("full", 20.0)]
    assert simulate(0.0, arrivals, 100.0) == [("full", 20.0)], "0 asks for nothing"


def test_nodes_that_came_too_early_are_given_back_once() -> None:
    """The last group is a straggler: the nodes do not wait for it, and are not asked for again."""
    arrivals = [*(float(second) for second in range(1, 20)), 90.0]
    assert simulate(5.0, arrivals, 100.0) == [
        ("ask", 15.0),
        ("give back", 25.0),
        ("full", 90.0),
    ]


def test_a_timeout_ends_the_wait_with_the_groups_that_are_complete() -> None:
    """The rest of the batch never comes: the nodes are back by the timeout, not before."""
    arrivals = [1.0, 2.0, 3.0]
    assert simulate(5.0, arrivals, 100.0) == []
    assert simulate(5.0, arrivals, 100.0, BatchTimeout(time=60.0)) == [
        ("ask", 55.0),
        ("timeout", 60.0),
    ]


def test_a_batch_that_is_full_before_its_timeout_is_whole() -> None:
    """The timeout changes nothing for it."""
    arrivals = [float(second) for second in range(1, 21)]
    assert simulate(5.0, arrivals, 100.0, BatchTimeout(time=60.0)) == [
        ("ask", 15.0),
        ("full", 20.0),
    ]


def test_after_the_timeout_the_least_part_is_waited_for() -> None:
    """Nodes are not asked for while there is nothing to train on; then they are at once."""
    late = BatchTimeout(time=60.0, min_groups=3)
    assert simulate(5.0, [1.0, 2.0, 90.0], 100.0, late) == [("timeout", 90.0)]
    assert simulate(5.0, [1.0, 2.0], 100.0, late) == []
    assert simulate(5.0, [], 100.0, BatchTimeout(time=60.0)) == [], "one group is the least"
