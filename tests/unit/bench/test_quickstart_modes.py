"""When a run has learned."""

from __future__ import annotations

from bench.quickstart.modes import WINDOW, seconds_to


def test_the_target_is_reached_when_the_mean_of_a_window_is() -> None:
    """One lucky step is not enough, and the time is that of the window's end."""
    seconds = [float(10 * step) for step in range(12)]
    lucky = [0.0] * 3 + [1.0] + [0.0] * 3 + [1.0] * 5
    assert seconds_to(0.8, seconds, lucky) == 100.0
    assert seconds_to(1.0, seconds, lucky) == 110.0


def test_a_run_that_never_gets_there_has_no_time() -> None:
    """Nor does one that ended before a window was full."""
    assert seconds_to(0.8, [1.0] * WINDOW, [0.7] * WINDOW) == -1
    assert seconds_to(0.8, [1.0, 2.0], [1.0, 1.0]) == -1
