"""How a run of pytest ended, by its last line."""

from __future__ import annotations

import pytest

from tests.suites.busy_machine.__main__ import counts


def test_the_last_line_is_read() -> None:
    """After the summary of what failed."""
    last = "1 failed, 7112 passed, 2 skipped in 538.48s (0:08:58)"
    output = f"1 passed in 2.00s\n....\nFAILED a.py::test - 3 failed in 1 of 2\n{last}\n"
    assert counts(output) == {"failed": 1, "passed": 7112, "skipped": 2, "seconds": 538.48}


def test_a_run_without_a_result_is_an_error() -> None:
    """Not a run without failures."""
    with pytest.raises(SystemExit, match="without a result"):
        counts("INTERNALERROR> no")
