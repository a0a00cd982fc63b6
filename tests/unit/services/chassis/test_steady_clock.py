"""Stored times that are compared do not follow a clock that somebody sets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from scheduler.model.records import NodeState, State
from scheduler.pool.state_transaction import StateTransaction
from services.chassis.steady_clock import SteadyClock
from tests.lib.scheduler.support import BOTH, after, gang, node

_LEAVE_SECONDS = 120.0


def _is_overdue(
    make: Callable[[], Callable[[], float]], jump: float, patch: pytest.MonkeyPatch
) -> bool:
    """Whether a node that was asked to leave its work is given up once the clock has jumped."""
    real, shift = time.time, [0.0]
    with patch.context() as patched:
        patched.setattr(time, "time", lambda: real() + shift[0])
        clock = make()
        state = after(State(), lambda tx: tx.register(node("a", *BOTH)), now=clock())
        epoch = state.nodes["a"].assignment.epoch

        def work(tx: StateTransaction) -> None:
            tx.report("a", NodeState.ACTIVE, epoch, epoch)
            tx.request(gang("g", 1))

        state = after(state, work, now=clock())
        shift[0] = jump
        state = after(state, lambda tx: tx.mark_overdue(_LEAVE_SECONDS), now=clock())
    return state.nodes["a"].overdue


@pytest.mark.parametrize("jump", [600.0, -600.0])
def test_a_clock_that_is_set_makes_no_node_late(
    jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes forward, and back."""
    assert not _is_overdue(SteadyClock, jump, monkeypatch)


def test_by_the_wall_clock_a_node_would_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same node, with the clock of the machine."""
    assert _is_overdue(lambda: lambda: time.time(), 600.0, monkeypatch)


def test_it_counts_from_the_time_of_its_start() -> None:
    """Other processes and people read the same times."""
    before = time.time()
    now = SteadyClock()()
    assert before - 1 <= now <= time.time() + 1
