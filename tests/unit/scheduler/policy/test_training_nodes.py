"""Nodes move between training and generation as Alg. 1 on measured batches says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import AllocationEvent, Assignment, NodeState, State
from scheduler.model.stage_balance import BatchTimes, NodeCounts, StageBalance
from scheduler.policy.allocation_policy import PreemptivePolicy
from scheduler.policy.training_nodes import SplitRule, advised
from scheduler.pool.gang_measurements import Allocation, GenerationLoad
from scheduler.pool.state_transaction import StateTransaction
from scheduler.store.redis_store import decode, encode
from services.chassis.errors import Reason, ServiceError
from tests.lib.scheduler.support import BOTH, RUN, gang, node

GANG = (RUN, "g")
NODES = 8
RULE = SplitRule(max_nodes=NODES - 1)


class World:
    """Measurements of eight nodes: `generation` and `training` are node-seconds of a batch.

    The gang has as many nodes as the scheduler advises, from the next batch on.
    """

    def __init__(
        self,
        generation: float,
        training: float,
        first: int,
        rule: SplitRule | None = RULE,
        num_both: int = NODES,
    ) -> None:
        self.generation, self.training = generation, training
        self.num_training, self.batch, self.now = first, 1, 1000.0
        self.state, self.events, self.tokens = State(), list[AllocationEvent](), 1000
        self._load = 1.0
        self._allocation = None if rule is None else Allocation(rule=rule, load=self._share)
        tags = [BOTH if number < num_both else ("rollout",) for number in range(NODES)]
        self.do("register", *(node(f"n{number}", *each) for number, each in enumerate(tags)))
        self.request()

    def do(self, name: str, *arguments: object) -> None:
        """One change; then every node has taken up its assignment."""
        policy = PreemptivePolicy(lending="never", moves_nodes=True)
        tx = StateTransaction(self.state, policy, self.now, self._allocation)
        getattr(tx, name)(*arguments)
        for entry in list(tx.state.nodes.values()):
            epoch = entry.assignment.epoch
            tx.report(entry.node_id, NodeState.ACTIVE, epoch, epoch)
        self.state = tx.state
        self.events += tx.events

    def request(self) -> None:
        """Ask for the nodes of the next batch."""
        sizes = {"unit_nodes": 1, "max_nodes": NODES - 1, "done_tokens": self.tokens}
        self.do("request", gang("g", self.num_training, batch=self.batch, **sizes))

    def train(self, num_batches: int) -> World:
        """Run this number of batches."""
        for _ in range(num_batches):
            trained = self.training / self.num_training
            generated = self.generation / (NODES - self.num_training)
            self._load = min(generated / max(trained, generated), 1.0)
            self.now += trained
            self.batch += 1
            if generated > trained:
                forecast = BatchForecast(
                    remaining_rollouts=1, batch_rollouts=2, done_tokens=self.tokens
                )
                self.do("release", GANG, forecast, self.batch)
                self.now += generated - trained
            balance = self.state.balances[GANG]
            self.num_training = balance.advised_nodes or self.num_training
            self.request()
        return self

    @property
    def moves(self) -> list[str]:
        """In the audit log."""
        return [event.cause for event in self.events if event.kind == "split"]

    def tags(self) -> list[str]:
        """What the nodes do."""
        return sorted(entry.assignment.tag for entry in self.state.nodes.values())

    def _share(self, node_ids: Iterable[str], since: float, until: float) -> float:
        assert list(node_ids)
        assert since < until
        return self._load


@pytest.mark.parametrize("first", range(1, NODES))
@pytest.mark.parametrize(("generation", "training"), [(300, 100), (100, 300), (200, 200)])
def test_any_split_becomes_the_best_one_and_stays(
    generation: int, training: int, first: int
) -> None:
    """One node at a time; then not a single move more."""
    world = World(generation, training, first).train(60)
    best = {(300, 100): 2, (100, 300): 6, (200, 200): 4}[generation, training]
    assert world.num_training == best
    assert len(world.moves) == abs(best - first)
    assert world.tags() == ["rollout"] * (NODES - best) + ["train"] * best
    assert len(world.train(40).moves) == abs(best - first)


def test_a_split_follows_work_that_changes_in_the_middle() -> None:
    """Generation becomes three times as much; the log says from what to what, and why."""
    world = World(200, 200, 4).train(20)
    assert world.moves == []
    world.generation = 600
    world.train(40)
    assert world.num_training == 2
    assert world.moves[0] == (
        "gang g: 4 -> 3 training nodes: T_gen 150 s with 4, T_train 50 s with 4; "
        "expected 120 s with 5 and 3"
    )
    resized = [event.cause for event in world.events if event.kind == "resized"]
    assert resized == ["gang g: 4 -> 3 training nodes", "gang g: 3 -> 2 training nodes"]


@pytest.mark.parametrize(("first", "left"), [(4, 3), (3, 4)])
def test_a_way_back_must_save_twice_as_much(first: int, left: int) -> None:
    """Four training nodes would save 7 % as three: a gang that was never there leaves, and one that
    left them for four stays."""
    world = World(200, 200, first).train(20)
    assert world.num_training == 4
    world.generation, world.training = 300, 209
    assert world.train(40).num_training == left


def test_nothing_moves_unless_the_operator_allows_it_and_within_the_bounds() -> None:
    """Off by default; with bounds, up to them."""
    assert World(700, 100, 6, None).train(30).num_training == 6
    assert World(700, 100, 6, SplitRule(min_nodes=4, max_nodes=7)).train(40).num_training == 4
    assert World(100, 700, 2, SplitRule(max_nodes=3)).train(40).num_training == 3
    assert World(100, 700, 6, SplitRule(max_nodes=3)).train(40).num_training == 3
    assert World(700, 100, 2, SplitRule(min_nodes=4, max_nodes=7)).train(40).num_training == 4


def test_no_gang_grows_onto_nodes_that_are_not_there() -> None:
    """It would wait for ever for nodes that only roll out; the control has enough that train."""
    assert World(100, 700, 4, num_both=5).train(40).num_training == 5
    assert World(100, 700, 4, num_both=8).train(40).num_training == 7


def test_a_single_odd_batch_or_a_small_gain_moves_nothing() -> None:
    """Hysteresis; the control of each is in the same place and moves."""

    def found(seconds: list[float], **rule: float) -> int:
        counts = NodeCounts(generating=4, training=4)
        batches = tuple(
            BatchTimes(node_counts=counts, waited=each - 50, trained=50, tokens=1000)
            for each in seconds
        )
        balance = StageBalance(batches=batches, node_counts=counts)
        asked = replace(gang("g", 4), unit_nodes=1, max_nodes=7)
        return advised(balance, asked, SplitRule(max_nodes=7, **rule)).advised_nodes  # type: ignore[arg-type]

    assert found([100, 100, 50, 100]) == found([100, 100, 100]) == 0
    assert found([100, 100, 100, 100]) == 3
    assert found([100, 100, 100, 100], gain=0.25) == 0


def test_seconds_of_longer_batches_do_not_say_that_more_nodes_are_slower() -> None:
    """Lengths double just when a node joins training: seconds of a token are compared."""

    def balance(tokens: int) -> tuple[tuple[int, float], ...]:
        counts = NodeCounts(generating=3, training=5)
        batch = BatchTimes(node_counts=counts, waited=0, trained=80, load=0.5, tokens=tokens)
        before = StageBalance(
            batches=(batch,) * 4, node_counts=counts, training_points=((4, 50 / 1000),)
        )
        asked = replace(gang("g", 5), unit_nodes=1, max_nodes=7)
        return advised(before, asked, RULE).training_points

    assert balance(2000) == ((4, 0.05), (5, 0.04))
    assert balance(1000) == ((5, 0.08),)  # control: were they equal, both could not be true


def test_batches_in_which_nothing_was_sampled_move_nodes_to_training() -> None:
    """The load is 0 then, and T_gen is next to nothing."""
    world = World(1e-9, 100, 2)
    assert world.train(60).num_training == NODES - 1
    assert all(batch.load < 1e-9 for batch in world.state.balances[GANG].batches)


def test_a_gang_of_fixed_size_may_not_ask_for_another_number_of_nodes() -> None:
    """ALREADY_EXISTS, as for any other gang of the same name."""
    world = World(200, 200, 4)
    with pytest.raises(ServiceError) as caught:
        world.do("request", gang("g", 3))
    assert caught.value.reason is Reason.ALREADY_EXISTS


def test_the_profile_outlives_the_scheduler() -> None:
    """Through the store, with the advice."""
    balance = World(300, 100, 4).train(30).state.balances[GANG]
    assert balance.generation_points
    assert decode(StageBalance, encode(balance).encode()) == balance


def test_the_load_is_what_was_sampled_in_what_can_be() -> None:
    """Of the nodes asked for, in the time asked for; unknown ones count as loaded."""
    load = GenerationLoad()
    for number in range(100):
        _report(load, "a", number, 100.0 if number < 50 else 20.0)
    assert load.share(["a", "other"], 0, 49) == 1.0
    assert load.share(["a"], 50, 99) == pytest.approx(0.2)
    assert load.share(["a"], 0, 99) == pytest.approx(0.6)
    assert load.share(["other"], 0, 99) == 1.0


def _report(load: GenerationLoad, name: str, now: float, rate: float) -> None:
    report = NodeReport(tokens_per_second=rate)
    assignment = Assignment(tag="rollout", epoch=1)
    at_work = {"assignment": assignment, "state": NodeState.ACTIVE, "reported_epoch": 1}
    load.observe(node(name, *BOTH, report=report, **at_work), now)


def test_a_gang_of_one_unit_keeps_it_where_generation_is_slow() -> None:
    """There is nothing less than a unit, of which no seconds can be expected."""
    world = World(generation=40.0, training=0.5, first=1).train(8)
    assert world.moves == []
    assert world.num_training == 1
