"""Batches as measured from a gang's requests and releases: each counts once, by its number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import Gang, State
from scheduler.policy.allocation_policy import LendingMode, PreemptivePolicy
from scheduler.pool.state_transaction import StateTransaction
from tests.lib.scheduler.support import BOTH, RUN, gang, node

GANG = (RUN, "g")
HALF = BatchForecast(remaining_rollouts=50, batch_rollouts=100)
BLOCK = 3
"""Cycles before a way is judged."""


class Played:
    """A run on a rollout node and one that trains, played against the scheduler's own steps."""

    def __init__(self, lending: LendingMode = "gated", *tags: str) -> None:
        self.policy = PreemptivePolicy(lending=lending)
        self.state, self.now = State(), 0.0
        self.causes: list[str] = []
        self.do("register", node("other", "rollout"), node("both", *(tags or BOTH)))

    def do(self, name: str, *arguments: object) -> None:
        """One change."""
        tx = StateTransaction(self.state, self.policy, self.now)
        getattr(tx, name)(*arguments)
        self.state = tx.state
        self.causes += [event.cause for event in tx.events if event.kind == "kept"]

    def step(self, batch: int, *, too_early: bool = False) -> str:
        """Wait for 80 s, train for 20 s; what the node does while it is waited."""
        self.do("release", GANG, HALF, batch)
        self.now += 40.0
        if too_early:
            self.do("request", expected(batch, needed_time=self.now))
            self.do("release", GANG, HALF, batch)
        tag = self.state.nodes["both"].assignment.tag
        self.now += 40.0
        self.do("request", expected(batch))
        self.now += 20.0
        return tag


def expected(batch: int = 0, **fields: Any) -> Gang:
    """The gang as it asks for a batch."""
    return replace(gang("g", 1), batch=batch, **fields)


@pytest.mark.parametrize("too_early", [False, True])
def test_nodes_that_return_too_early_change_neither_the_decision_nor_the_measurements(
    too_early: bool,
) -> None:
    """Given back once more for the same batch they stay as they were: kept in the first block,
    then lent, and both ways are measured as if nothing had happened."""
    played = Played()
    played.do("request", expected(1))
    played.now += 20.0
    tags = [played.step(batch, too_early=too_early) for batch in range(2, 2 + BLOCK + 2)]
    assert tags == BLOCK * ["train"] + 2 * ["rollout"]
    played.do("release", GANG, HALF, 9)
    lending = played.state.lendings[GANG]
    assert (lending.dedicated.value, lending.full.value) == (100.0, 100.0)
    assert lending.generation.value == pytest.approx(160.0), "80 s for half of a batch"
    (balance,) = played.state.balances.values()
    assert {batch.waited for batch in balance.batches} == {80.0}


def test_without_its_number_the_same_release_ends_a_cycle() -> None:
    """Negative control: each early return counts as a batch."""
    played = Played()
    played.do("request", expected())
    for _ in range(BLOCK):
        played.step(0, too_early=True)
    duration = played.state.lendings[GANG].dedicated.value
    assert duration is not None
    assert duration < 100.0


def test_a_request_that_is_repeated_is_no_batch() -> None:
    """A trainer that does not get its device asks again and again; another number is one more."""
    played = Played()
    played.do("request", expected(1))
    played.step(2)
    before = played.state
    for _ in range(5):
        played.now += 1.0
        played.do("request", expected(2))
        played.do("request", expected())  # restarted, it does not know yet which
    assert played.state == before
    played.do("request", expected(3))
    assert played.state.lendings[GANG].batches == 2
    (balance,) = played.state.balances.values()
    assert balance.done_time == balance.full_time == played.now


def test_a_batch_that_was_not_full_after_all_is_waited_for_again() -> None:
    """Its samples grew too old, or the nodes were needed for a checkpoint only."""
    played = Played("never")
    played.do("request", expected(1))
    played.step(2)
    played.do("release", GANG, HALF, 3)
    played.do("request", expected(3))
    played.do("release", GANG, HALF, 3)
    assert played.causes[-1] == "gang g: kept: decided before for batch 3"
    played.now += 80.0
    played.do("request", expected(3))
    played.now += 20.0
    played.do("release", GANG, HALF, 4)
    (balance,) = played.state.balances.values()
    assert [(batch.waited, batch.trained) for batch in balance.batches] == 2 * [(80.0, 20.0)]


def test_a_restarted_trainer_continues_the_measurements() -> None:
    """Its first wait has no batch size; a permanent release ends all measurements."""
    played = Played()
    played.do("request", expected(1))
    for batch in range(2, 2 + BLOCK):
        played.step(batch)
    learned = played.state.lendings[GANG]
    played.do("release", GANG, None, 5)
    assert played.state.lendings[GANG] == learned.abandon_cycle()
    assert played.state.balances[GANG].full_time is None
    played.do("release", GANG)
    assert (played.state.lendings, played.state.balances) == ({}, {})


@pytest.mark.parametrize("message", [(HALF, 4), (HALF, 0)])
def test_a_gang_that_lost_its_nodes_has_none_to_keep(message: tuple[BatchForecast, int]) -> None:
    """Its cycle ends there, and the log does not claim that they cannot do rollout."""
    played = Played()
    played.do("request", expected(1))
    played.step(2)
    played.step(3)
    num_told = len(played.causes)
    played.do("lose", ["both"])
    played.do("release", GANG, *message)
    assert played.causes[num_told:] == []
    assert GANG not in played.state.gangs
    lending = played.state.lendings[GANG]
    assert (lending.cycles, lending.since, lending.batches) == (2, None, 0)


def test_a_gang_whose_nodes_another_gang_took_has_none_to_keep() -> None:
    """It requested ahead too early; measurements continue."""
    played = Played()
    played.do("request", expected(1))
    played.do("release", GANG, HALF, 2)
    num_told = len(played.causes)
    played.do("request", gang("h", 1))
    played.do("request", expected(2, needed_time=played.now))
    assert played.state.gangs[GANG].waits_for
    played.do("release", GANG, HALF, 2)
    assert played.causes[num_told:] == []
    assert played.state.lendings[GANG].is_decided(2)


def test_a_cycle_ends_when_nodes_cannot_do_rollout() -> None:
    """The next one would be measured with it."""
    played = Played()
    played.do("request", expected(1))
    played.step(2)
    played.do("register", node("both", "train"))
    played.do("release", GANG, HALF, 3)
    assert played.causes[-1] == "gang g: kept: its nodes cannot do rollout"
    assert played.state.lendings[GANG].since is None


def test_a_gang_that_an_older_scheduler_granted_may_ask_again() -> None:
    """Its state knows the gang, and nothing of what it measured."""
    played = Played()
    played.do("request", expected())
    played.state = replace(played.state, balances={}, lendings={})
    played.do("request", expected())
    assert played.state.gangs[GANG].tag == "train"
