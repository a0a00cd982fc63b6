"""StreamRL's dynamic adjustment acts: nodes of a waiting gang generate as long as it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import State
from scheduler.model.stage_balance import BatchTimes, NodeCounts, StageBalance
from scheduler.policy.allocation_policy import LendingMode, PreemptivePolicy
from scheduler.policy.split_advice import lends
from scheduler.pool.state_transaction import StateTransaction
from tests.lib.scheduler.support import BOTH, RUN, gang, node

GANG = (RUN, "g")
WHOLE = BatchForecast(remaining_rollouts=100, batch_rollouts=100)
AGREEING = 5
"""Batches in a row that must agree."""


class Played:
    """Two nodes that generate and a gang of one, whose node can too; training takes 20 s."""

    def __init__(self, lending: LendingMode) -> None:
        self._policy = PreemptivePolicy(lending=lending)
        self._state, self._now, self._batch = State(), 0.0, 1
        nodes = [node("a", "rollout"), node("b", "rollout"), node("both", *BOTH)]
        self._do("register", *nodes)
        self._request()

    def _do(self, name: str, *arguments: object) -> None:
        tx = StateTransaction(self._state, self._policy, self._now)
        getattr(tx, name)(*arguments)
        self._state = tx.state

    def _request(self) -> None:
        self._do("request", replace(gang("g", 1), batch=self._batch))
        self._now += 20.0

    def batches(self, number: int, work: float) -> list[str]:
        """Batches of `work` node-seconds of generation; what the gang's node did while it waited.

        The other two generate while it trains too.
        """
        tags = []
        for _ in range(number):
            self._batch += 1
            self._do("release", GANG, WHOLE, self._batch)
            tags.append(self._state.nodes["both"].assignment.tag)
            generating = 3 if tags[-1] == "rollout" else 2
            self._now += max(work - 2 * 20.0, 0.0) / generating
            self._request()
        return tags


def test_the_gang_s_node_generates_while_generation_is_slower_by_a_node_s_worth() -> None:
    """Not before five batches agree; then until five batches say that the two are enough."""
    played = Played("advised")
    # Two nodes need 60 s, of which the gang waits 40: a third would save 20.
    assert played.batches(1 + AGREEING, 120.0) == (1 + AGREEING) * ["train"]
    assert played.batches(10, 120.0) == 10 * ["rollout"], "lending does not undo its own reason"
    # Two nodes need 25 s now, of which the gang would wait 5: a third would save 8.
    tags = played.batches(10, 50.0)
    assert tags == [*["rollout"] * tags.count("rollout"), *["train"] * tags.count("train")]
    assert AGREEING <= tags.count("rollout") < 10
    assert played.batches(10, 50.0) == 10 * ["train"]


@pytest.mark.parametrize(("lending", "tag"), [("never", "train"), ("always", "rollout")])
def test_without_the_operator_s_leave_it_does_not_act(lending: LendingMode, tag: str) -> None:
    """Negative control: the same batches."""
    played = Played(lending)
    assert set(played.batches(16, 120.0) + played.batches(20, 50.0)) == {tag}


def test_what_lent_nodes_did_is_counted_as_work_of_the_others() -> None:
    """Else lending would look like a generation that needs no help."""
    counts = NodeCounts(generating=2, training=1, lent=1)
    batch = BatchTimes(node_counts=counts, waited=20.0, trained=20.0)
    assert batch.without_lent.waited == 30.0
    assert batch.without_lent.node_counts == replace(counts, lent=0)
    alone = replace(batch, node_counts=replace(counts, lent=0))
    assert alone.without_lent == alone


def test_batches_that_disagree_change_nothing() -> None:
    """Nor do too few."""
    counts = NodeCounts(generating=2, training=1)
    slow = BatchTimes(node_counts=counts, waited=40.0, trained=20.0)
    quick = replace(slow, waited=1.0)
    assert lends(StageBalance(batches=AGREEING * (slow,))) is True
    assert lends(StageBalance(batches=AGREEING * (quick,))) is False
    assert lends(StageBalance(batches=(*(AGREEING - 1) * (slow,), quick))) is None
    assert lends(StageBalance(batches=(AGREEING - 1) * (slow,))) is None
