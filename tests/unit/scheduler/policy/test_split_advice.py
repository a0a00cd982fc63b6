"""Advice on the split of a run's nodes: the rule, the measurements and the events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from prometheus_client import REGISTRY
from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.api.conversion import run_messages
from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import AllocationEvent, NodeState, State
from scheduler.model.stage_balance import BatchTimes, NodeCounts, SplitAdvice, StageBalance
from scheduler.policy.allocation_policy import LendingMode, PreemptivePolicy
from scheduler.policy.node_split import split_nodes
from scheduler.policy.split_advice import advise, needs_generation_node
from scheduler.pool.node_leases import NodeLeases
from scheduler.pool.pool import Pool
from scheduler.pool.state_transaction import StateTransaction
from scheduler.store.redis_store import decode, encode
from tests.lib.scheduler.memory_store import MemoryStore
from tests.lib.scheduler.support import BOTH, RUN, gang, node

GANG = (RUN, "g")


HALF = BatchForecast(remaining_rollouts=1, batch_rollouts=2)


BATCHES = 5
"""Batches that must agree."""


INSTANCES = 1000


@dataclass(kw_only=True)
class World:
    """A run whose stages scale perfectly, played against the scheduler's own steps.

    The gang trains for `training_seconds`; the nodes that generate make the next batch meanwhile,
    which takes them `work` node-seconds, and no more than that one.
    """

    work: float
    training_seconds: float
    num_generating: int
    num_training: int = 2
    lending: LendingMode = "never"
    trainers_roll_out: bool = False
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.state, self.batch = State(), 1
        self.events: list[AllocationEvent] = []
        tags = BOTH if self.trainers_roll_out else ("train",)
        with_tags = [node(f"t{i}", *tags) for i in range(self.num_training)]
        self.do("register", *(node(f"r{i}", "rollout") for i in range(self.num_generating)))
        self.do("register", *with_tags)
        self.request()

    def request(self) -> None:
        """The gang asks for its nodes."""
        self.do("request", gang("g", self.num_training, batch=self.batch))

    def do(self, name: str, *arguments: object) -> None:
        """One change of the scheduler's state; then every node has taken up its assignment."""
        tx = StateTransaction(self.state, PreemptivePolicy(lending=self.lending), self.now)
        getattr(tx, name)(*arguments)
        for entry in list(tx.state.nodes.values()):
            epoch = entry.assignment.epoch
            tx.report(entry.node_id, NodeState.ACTIVE, epoch, epoch)
        self.state = tx.state
        self.events += tx.events

    def train(self, num_batches: int) -> None:
        """Run this number of batches."""
        for _ in range(num_batches):
            self.now += self.training_seconds
            self.batch += 1
            left = self.work - self.num_generating * self.training_seconds
            if left > 0:
                self.do("release", GANG, HALF, self.batch)
                rolls_out = [n for n in self.state.nodes.values() if n.assignment.tag == "rollout"]
                self.now += left / len(rolls_out)
            self.request()

    def add_node(self) -> None:
        """What an operator does who takes the advice."""
        self.do("register", node(f"r{self.num_generating}", "rollout"))
        self.num_generating += 1

    @property
    def balance(self) -> StageBalance:
        """What the scheduler makes of it."""
        return self.state.balances[GANG]

    @property
    def message(self) -> list[str]:
        """The advice in the audit log."""
        return [event.cause for event in self.events if event.kind == "advice"]


def batch(waited: float, trained: float, generating: int = 4) -> BatchTimes:
    """One that four nodes generated and two trained."""
    return BatchTimes(
        node_counts=NodeCounts(generating=generating, training=2), waited=waited, trained=trained
    )


def test_the_rule_is_that_generation_stays_the_slower_stage() -> None:
    """In a world of perfect scaling one more node pays exactly while x + 1 nodes are not faster.

    Whether nodes are lent or not: their pace is (G + y * T) / (x + y).
    """
    draw = random.Random(1)
    paid = 0
    for _ in range(INSTANCES):
        generating, lent = draw.randint(0, 20), draw.choice([0, draw.randint(1, 20)])
        work, trained = draw.uniform(1, 1000), draw.uniform(1, 100)
        if generating + lent == 0:
            continue
        pace = max(trained, (work + lent * trained) / (generating + lent))
        node_counts = NodeCounts(generating=generating, training=draw.randint(1, 20), lent=lent)
        found = needs_generation_node(
            BatchTimes(node_counts=node_counts, waited=pace - trained, trained=trained)
        )
        assert found == (work / (generating + 1) >= trained)
        paid += found
    assert 100 < paid < INSTANCES - 100


@pytest.mark.parametrize(
    ("trainers_roll_out", "lending"), [(False, "gated"), (True, "never"), (True, "always")]
)
def test_taking_the_advice_leads_to_the_split_of_alg_1(
    trainers_roll_out: bool, lending: LendingMode
) -> None:
    """From one node on: Alg. 1 takes the fewest nodes that keep training's pace, and we stop no
    more than one before it, at the last split in which generation is the slower stage."""
    draw = random.Random(2)
    for _ in range(6):
        world = World(
            work=draw.uniform(50, 400),
            training_seconds=draw.uniform(40, 60),
            num_generating=1,
            trainers_roll_out=trainers_roll_out,
            lending=lending,
        )
        world.train(BATCHES + 1)
        while world.balance.advice is SplitAdvice.ADD_GENERATION:
            world.add_node()
            world.train(BATCHES + 1)
        paid_for = int(world.work / world.training_seconds)
        assert world.num_generating == max(1, paid_for)

        def training(num_nodes: int, of: World = world) -> float:
            return of.training_seconds if num_nodes >= of.num_training else float("inf")

        def generation(num_nodes: int, of: World = world) -> float:
            return of.work / num_nodes

        best = split_nodes(generation, training, 40)
        assert best.generation_nodes - world.num_generating in (0, 1)


def test_the_advice_is_logged_once_and_reset_when_the_nodes_change() -> None:
    """Unknown, add, unknown with one node more, keep; each change stands in the audit log."""
    world = World(work=220.0, training_seconds=50.0, num_generating=3)
    world.train(BATCHES)
    assert (world.balance.advice, world.message) == (SplitAdvice.UNKNOWN, [])
    world.train(20)
    world.add_node()
    world.train(20)
    assert world.message == [
        "gang g: add_generation: T_gen 73.3 s with 3 nodes, T_train 50 s with 2; "
        "means of 5 batches",
        "gang g: unknown: not measured with these nodes yet",
        "gang g: keep: T_gen 55 s with 4 nodes, T_train 50 s with 2; means of 5 batches",
    ]


def test_a_trainer_that_never_waits_is_measured_too() -> None:
    """It never gives its nodes back; how far generation is ahead cannot be known."""
    world = World(work=90.0, training_seconds=50.0, num_generating=2)
    world.train(BATCHES + 1)
    assert world.balance.advice is SplitAdvice.KEEP
    assert world.balance.generation_seconds == world.balance.training_seconds == 50.0


def test_lengths_that_drift_change_the_advice() -> None:
    """Both ways."""
    world = World(work=90.0, training_seconds=50.0, num_generating=2)
    for work, advice in (
        (90.0, SplitAdvice.KEEP),
        (180.0, SplitAdvice.ADD_GENERATION),
        (90.0, SplitAdvice.KEEP),
    ):
        world.work = work
        world.train(BATCHES + 2)
        assert world.balance.advice is advice


def test_noise_around_the_threshold_does_not_flap() -> None:
    """Negative control: the rule applied after each batch does."""
    draw = random.Random(3)
    batches = [batch(draw.uniform(5, 20), 50.0) for _ in range(300)]
    alone = [needs_generation_node(entry) for entry in batches]
    assert _changes(alone) > 100
    standing, advice = SplitAdvice.UNKNOWN, []
    for end in range(BATCHES, len(batches)):
        standing = advise(batches[end - BATCHES : end], standing)
        advice.append(standing)
    assert _changes(advice) < _changes(alone) / 10


@pytest.mark.parametrize(("usual", "outlier"), [(1.0, 500.0), (40.0, 0.0)])
def test_one_unusual_batch_changes_nothing(usual: float, outlier: float) -> None:
    """A straggler, or a batch that was full at once."""
    batches = [batch(usual, 50.0)] * BATCHES
    standing = advise(batches, SplitAdvice.UNKNOWN)
    for end in range(BATCHES + 1):
        window = [*batches, batch(outlier, 50.0), *batches][end + 1 : end + 1 + BATCHES]
        assert advise(window, standing) is standing


def test_few_batches_give_no_advice() -> None:
    """Also where some were known before."""
    for standing in SplitAdvice:
        assert advise([batch(50.0, 50.0)] * (BATCHES - 1), standing) is SplitAdvice.UNKNOWN


def test_batches_without_a_measure_do_not_count() -> None:
    """A request whose answer was lost and came again; a clock that was set back."""
    node_counts = NodeCounts(generating=4, training=2)
    balance = StageBalance().full(10.0).done(node_counts, 20.0).full(30.0)
    for now in (30.0, 25.0):
        assert balance.done(node_counts, now).batches == ()
    assert balance.done(node_counts, 45.0).batches == (batch(10.0, 15.0),)
    assert balance.full(40.0) == balance, "it is at work on a batch"
    waits = balance.done(node_counts, 45.0)
    assert waits.done(node_counts, 50.0) == waits, "it waits already"


def test_measurements_end_with_the_run() -> None:
    """Nodes given back for good; given back for a batch of which nothing is known, it goes on."""
    world = World(work=180.0, training_seconds=50.0, num_generating=2)
    world.train(BATCHES + 1)
    world.do("release", GANG, None, world.batch)
    assert world.balance.advice is SplitAdvice.ADD_GENERATION
    world.request()
    world.do("release", GANG)
    assert GANG not in world.state.balances


def test_it_survives_the_scheduler() -> None:
    """As the store keeps it."""
    world = World(work=180.0, training_seconds=50.0, num_generating=2)
    world.train(BATCHES + 1)
    assert decode(StageBalance, encode(world.balance).encode()) == world.balance


def test_runs_are_listed_with_their_balance() -> None:
    """Once it is known."""
    world = World(work=180.0, training_seconds=50.0, num_generating=2)
    world.train(BATCHES)
    (run,) = run_messages(world.state)
    assert not run.stage_times
    world.train(1)
    (run,) = run_messages(world.state)
    assert list(run.stage_times) == [
        pb.StageTimes(
            gang_id="g",
            num_generation_nodes=2,
            num_training_nodes=2,
            generation_duration=to_duration(90.0),
            training_duration=to_duration(50.0),
            advice=pb.SPLIT_ADVICE_ADD_GENERATION,
        )
    ]


async def test_autoscalers_see_it_as_a_metric() -> None:
    """Also right after a restart of the scheduler; absent when it is not known any more."""
    world = World(work=180.0, training_seconds=50.0, num_generating=2)
    world.train(BATCHES + 1)
    store = MemoryStore(max_events=9)
    await store.commit(await store.open(), State(), world.state, [])
    pool = Pool(
        store=store,
        policy=PreemptivePolicy(),
        leases=NodeLeases(9e9, 1.0, lambda: 0.0),
        clock=lambda: world.now,
        leave_seconds=9e9,
    )
    await pool.open()
    assert _metric("advised_generation_nodes") == 1.0
    assert _metric("stage_seconds", stage="generation") == 90.0
    await pool.change(lambda tx: tx.release(GANG))
    assert _metric("advised_generation_nodes") is None


def _changes(values: Sequence[object]) -> int:
    return sum(a != b for a, b in pairwise(values))


def _metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(
        f"seamflow_scheduler_{name}", {"run_id": RUN, "gang_id": "g", **labels}
    )
