"""Fields of requests: what passes, and what an error says."""

from __future__ import annotations

import math

import pytest

from services.chassis.errors import ServiceError
from services.chassis.rpc.fields import not_empty, not_negative, positive, required


def test_what_is_allowed_is_returned() -> None:
    """At its bounds."""
    assert (positive("n", 1), not_negative("n", 0), not_negative("s", 0.0)) == (1, 0, 0.0)
    assert (not_empty("id", "x" * 999), required("id", "x" * 256)) == ("x" * 999, "x" * 256)


@pytest.mark.parametrize(
    ("value", "cure"), [(-1, "at least 0"), (-math.inf, "at least 0"), (math.nan, "finite")]
)
def test_a_number_below_0_or_not_finite_is_refused(value: float, cure: str) -> None:
    """The error names the field, the value and the cure."""
    with pytest.raises(ServiceError, match=f"policy.share is {value}: must be {cure}") as caught:
        not_negative("policy.share", value)
    assert [each.field for each in caught.value.violations] == ["policy.share"]


def test_what_is_missing_or_too_long_is_refused() -> None:
    """A count of 0, and a text that is empty or longer than 256 characters."""
    with pytest.raises(ServiceError, match="step is 0: must be at least 1"):
        positive("step", 0)
    with pytest.raises(ServiceError, match="run_id is '': must not be empty"):
        not_empty("run_id", "")
    for text in ("", "x" * 257):
        with pytest.raises(ServiceError, match=r"run_id is .*: must have 1 to 256 characters"):
            required("run_id", text)
