"""Bytes and calls in progress are bounded, with a share for each owner."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from services.chassis.errors import ServiceError
from services.chassis.rpc.request_budget import RequestBudget

BYTES, CALLS = 800, 3
SHARE = BYTES // 8


def reserve(budget: RequestBudget, stack: ExitStack, owner: str, *sizes: int) -> None:
    """Requests of these sizes that stay in progress."""
    for size in sizes:
        stack.enter_context(budget.reserve(owner, size))


@pytest.mark.parametrize(
    ("before", "owner", "size", "limit"),
    [
        ([("a", 1)] * CALLS, "a", 1, f"max_calls_per_rollout ({CALLS})"),
        ([("a", SHARE)], "a", 1, "an eighth of max_inflight_bytes"),
        ([(str(n), SHARE) for n in range(8)], "a", 1, f"max_inflight_bytes ({BYTES})"),
    ],
)
def test_what_would_exceed_a_limit_is_refused_by_its_name(
    before: list[tuple[str, int]], owner: str, size: int, limit: str
) -> None:
    """With a time to retry; and passes once the others have ended."""
    budget = RequestBudget(BYTES, CALLS)
    with ExitStack() as stack:
        for name, num_bytes in before:
            reserve(budget, stack, name, num_bytes)
        with pytest.raises(ServiceError) as refused, budget.reserve(owner, size):
            pass
        assert limit in str(refused.value)
        assert refused.value.retry_after
    with budget.reserve(owner, size):
        pass


@pytest.mark.parametrize("size", [SHARE + 1, BYTES * 10])
def test_an_only_request_always_passes(size: int) -> None:
    """However large: or it could never be sent."""
    with RequestBudget(BYTES, CALLS).reserve("a", size):
        pass


def test_owners_do_not_use_each_others_share() -> None:
    """One that has used its own does not hinder another."""
    budget = RequestBudget(BYTES, CALLS)
    with ExitStack() as stack:
        reserve(budget, stack, "a", SHARE)
        reserve(budget, stack, "b", SHARE)
        with pytest.raises(ServiceError):
            reserve(budget, stack, "a", 1)


def test_a_request_that_fails_gives_its_bytes_back() -> None:
    """And so does one that was refused, which had none."""
    budget = RequestBudget(BYTES, 1)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), budget.reserve("a", BYTES):
            with pytest.raises(ServiceError), budget.reserve("a", 1):
                pass
            _ = 1 / 0
    with budget.reserve("a", BYTES):
        pass
