"""The gate of lending: what is done at each release, and what is learned from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scheduler.model.lending_state import (
    BatchForecast,
    LendingDecision,
    LendingState,
)
from scheduler.model.records import NodeState, State
from scheduler.policy.allocation_policy import LendingMode, PreemptivePolicy
from scheduler.policy.lending import LendingInputs, decide_lending
from scheduler.pool.state_transaction import StateTransaction
from tests.lib.scheduler.support import BOTH, RUN, after, gang, node

HALF = BatchForecast(remaining_rollouts=50, batch_rollouts=100)
GANG = (RUN, "g")
BLOCK = 3
"""Cycles before a way is judged."""


def inputs(**fields: object) -> LendingInputs:
    """Four dedicated nodes, four that could be lent."""
    values = {"forecast": HALF, "num_dedicated": 4, "num_lent": 4, "round_trip_seconds": 14.0}
    return LendingInputs(**(values | fields))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What cycles of one batch take, in seconds."""

    kept: float
    """Whole, while the nodes are kept."""
    lent: float
    """Whole, while they are lent."""
    kept_wait: float = 50.0
    """Until the gang asks for its nodes, while they are kept."""
    lent_wait: float = 10.0
    """The same while they are lent."""
    left_behind: float = 0.0
    """More, in the first cycle after lending."""


def played(
    lending: LendingState, world: World, num_cycles: int, *, whole: bool = True
) -> tuple[LendingState, list[LendingDecision]]:
    """After so many cycles. Not `whole`: a gate that is blind to what follows a request."""
    now, decisions = 0.0, []
    for _ in range(num_cycles):
        lending = lending.end_cycle(now)
        left_behind = world.left_behind * lending.lends
        decisions.append(decide_lending(lending, inputs()))
        lend = decisions[-1].lend
        full = now + (world.lent_wait if lend else world.kept_wait)
        lending = lending.start_cycle(decisions[-1], HALF, now).request_batch().batch_full(full)
        lending = lending if whole else lending.end_cycle(full)
        now += world.lent if lend else world.kept + left_behind
    return lending.end_cycle(now), decisions


def ways(decisions: list[LendingDecision]) -> str:
    """What each release did: k for kept, l for lent."""
    return "".join("l" if decision.lend else "k" for decision in decisions)


def test_each_mode_is_measured_for_a_block_then_the_faster_one_stays() -> None:
    """Kept, lent, then the faster mode; the cause shows each quantity."""
    _, decisions = played(LendingState(), World(kept=200.0, lent=150.0), 8)
    assert ways(decisions) == "kkkl" + "llll"
    causes = [
        *("before modes are compared",) * 3,
        "expected gain",
        *("before modes are compared",) * 2,
        *("before the other mode is tried",) * 2,
    ]
    assert all(cause in decision.cause for cause, decision in zip(causes, decisions, strict=True))
    quantities = ("0.75 * 0.5 * (100 - 50) s > ", "14 s", "4 s", "T_ded 200 s", "T_full not")
    assert all(quantity in decisions[3].cause for quantity in quantities)
    assert "T_ded 200 s, T_full 150 s" in decisions[6].cause
    _, decisions = played(LendingState(), World(kept=200.0, lent=210.0), 9)
    assert ways(decisions) == "kkk" + "lll" + "kkk"
    assert "the other mode is faster" in decisions[6].cause
    assert "T_ded 200 s, T_full 210 s" in decisions[6].cause


def test_lending_is_not_tried_if_even_perfect_scaling_does_not_pay() -> None:
    """With perfect scaling of what the gang waits for lending would save too little."""
    _, decisions = played(LendingState(), World(kept=200.0, lent=150.0, kept_wait=20.0), 60)
    assert ways(decisions) == 60 * "k"
    assert "expected gain" in decisions[-1].cause
    assert "0.75 * 0.5 * (40 - 20) s <= " in decisions[-1].cause
    tried, _ = played(LendingState(), World(kept=200.0, lent=150.0, kept_wait=20.0), BLOCK)
    assert decide_lending(tried, inputs(round_trip_seconds=3.0)).lend
    assert decide_lending(tried, inputs(round_trip_seconds=0.0)).lend, "never measured"


def test_a_gain_that_only_perfect_scaling_promises_is_looked_for_late() -> None:
    """Once a try that lengthens its cycles by 40 % costs a hundredth of all time; then it stays."""
    world = World(kept=200.0, lent=150.0, kept_wait=40.0)
    _, decisions = played(LendingState(), world, 130)
    assert ways(decisions) == 120 * "k" + 10 * "l"
    assert "0.75 * 0.5 * (80 - 40) s <= " in decisions[119].cause
    assert " 1 * 0.5 * (80 - 40) s > " in decisions[120].cause
    _, decisions = played(LendingState(), replace(world, lent=280.0), 400)
    slower = ways(decisions).count("l")
    assert 0 < slower * 80.0 < 0.01 * 400 * 200.0


def test_switches_are_not_counted_twice() -> None:
    """Whole cycles contain them, so T_toggle is ignored once lending was measured."""
    lending, decisions = played(LendingState(), World(kept=200.0, lent=190.0), 8)
    assert decisions[-1].lend
    assert decide_lending(lending, inputs(round_trip_seconds=1000.0)).lend


def test_one_long_wait_is_no_reason_to_lend() -> None:
    """A way is kept for cycles, so the gate goes by the means of R / B and of the wait."""
    usual = World(kept=200.0, lent=150.0, kept_wait=20.0)
    lending, _ = played(LendingState(), usual, 20)
    lending, _ = played(lending, replace(usual, kept_wait=80.0), 1)
    assert not decide_lending(lending, inputs()).lend
    lending, _ = played(lending, replace(usual, kept_wait=80.0), 6)
    assert decide_lending(lending, inputs()).lend


def test_later_costs_of_lending_are_measured() -> None:
    """Batches are full sooner, but the next ones begin later. Negative control: blind to that."""
    world = World(kept=200.0, lent=230.0, kept_wait=80.0, lent_wait=40.0)
    assert ways(played(LendingState(), world, 12)[1]) == "kkk" + "ll" + "kkkkkkk"
    assert ways(played(LendingState(), world, 12, whole=False)[1]) == "kkk" + 9 * "l"


def test_the_first_cycle_of_a_mode_is_not_measured() -> None:
    """It begins with what the other way left behind."""
    world = World(kept=200.0, lent=260.0, left_behind=500.0)
    lending, _ = played(LendingState(), world, 12)
    assert lending.dedicated.value == pytest.approx(200.0)
    lending, _ = played(lending, replace(world, kept=700.0), 1)
    assert lending.dedicated.value is not None
    assert lending.dedicated.value > 210.0, "a later one is"


def test_a_small_difference_changes_nothing() -> None:
    """The way stays unless the other is faster by a clear margin."""
    assert ways(played(LendingState(), World(kept=200.0, lent=199.0), 8)[1]) == "kkk" + 5 * "l"
    assert ways(played(LendingState(), World(kept=200.0, lent=203.0), 8)[1]) == "kkk" + 5 * "l"
    assert ways(played(LendingState(), World(kept=200.0, lent=205.0), 8)[1]) == "kkk" + "lll" + "kk"


@pytest.mark.parametrize(("lent", "timeout"), [(206.0, 12), (216.0, 24), (300.0, 150)])
def test_the_other_mode_is_retried_for_a_small_part_of_the_time(lent: float, timeout: int) -> None:
    """The more a try costs the rarer and the shorter it is, and never all the time."""
    tried = "ll" if lent > 220.0 else "lll"
    _, decisions = played(LendingState(), World(kept=200.0, lent=lent), 2 * timeout + 12)
    kept = timeout * "k"
    assert ways(decisions).startswith("kkk" + tried + kept + tried + kept + tried)


def test_a_drift_of_lengths_is_noticed() -> None:
    """Lending that ceased to pay ends, and begins again when it pays again."""
    lending, _ = played(LendingState(), World(kept=200.0, lent=100.0), 8)
    assert lending.lends
    lending, _ = played(lending, World(kept=60.0, lent=80.0), 300)
    assert not lending.lends
    lending, _ = played(lending, World(kept=400.0, lent=200.0), 300)
    assert lending.lends


@pytest.mark.parametrize(
    ("changes", "lend"),
    [
        ({"num_dedicated": 0}, True),
        ({"forecast": BatchForecast(remaining_rollouts=0, batch_rollouts=9)}, False),
    ],
)
def test_decisions_without_choice_are_not_measured(changes: dict[str, object], lend: bool) -> None:
    """The only nodes are always lent; for nothing none are. The way stays, its cycle is ignored."""
    for world in (World(kept=200.0, lent=100.0), World(kept=200.0, lent=300.0)):
        before, _ = played(LendingState(), world, 12)
        decision = decide_lending(before, inputs(**changes))
        assert decision.lend is lend
        after_it = (
            before.start_cycle(decision, HALF, 0.0).request_batch().batch_full(1.0).end_cycle(9.0)
        )
        assert after_it == before


def test_a_single_straggler_has_little_weight() -> None:
    """60 s for the last of 64 rollouts are not 3,840 s for a batch that was measured at 100 s."""
    keep = LendingDecision(lend=False)
    lending, now = LendingState(cycles=1), 0.0
    for remaining, seconds in ((64, 100.0), (1, 60.0)):
        forecast = BatchForecast(remaining_rollouts=remaining, batch_rollouts=64)
        lending = lending.start_cycle(keep, forecast, now).request_batch().batch_full(now + seconds)
    assert lending.generation.value == pytest.approx((0.9 * 100 + 60) / (0.9 + 1 / 64))


def test_batches_of_a_cycle_are_those_asked_for() -> None:
    """A batch that was full at once counts; asking again while nodes are on their way does not."""
    state = _in_second_cycle()
    state = after(state, lambda tx: tx.request(gang("g", 1, batch=2)), now=50.0)
    state = after(state, lambda tx: tx.request(gang("g", 1, batch=3)), now=80.0)
    assert state.lendings[GANG].batches == 2
    state = after(state, lambda tx: tx.release(GANG, HALF), now=100.0)
    assert state.lendings[GANG].dedicated.value == 50.0
    assert state.lendings[GANG].generation.value == 100.0, "waited 50 s for half of a batch"
    for now in (120.0, 130.0, 140.0):  # a switch is under way
        state = after(state, lambda tx: tx.request(gang("g", 1)), now=now)
    assert state.lendings[GANG].batches == 1


def test_part_of_a_batch_counts_as_that_part() -> None:
    """25 of 100 rollouts in 100 s are a batch in 400 s, though the gang asked once."""
    quarter = replace(HALF, done_rollouts=25)
    state = _in_second_cycle()
    state = after(state, lambda tx: tx.request(gang("g", 1, batch=2)), now=50.0)
    state = after(state, lambda tx: tx.release(GANG, quarter), now=100.0)
    assert state.lendings[GANG].dedicated.value == 400.0


def test_a_request_ahead_and_the_one_that_follows_are_one_batch() -> None:
    """It is full at the second, not at the first."""
    state = _in_second_cycle()
    ahead = gang("g", 1, needed_time=30.0)
    for now in (20.0, 31.0):
        state = after(state, lambda tx: tx.request(ahead), now=now)
    state = after(state, lambda tx: tx.request(gang("g", 1)), now=40.0)
    assert state.lendings[GANG].batches == 1
    assert state.lendings[GANG].generation.value == 80.0


def test_a_permanent_release_ends_measurements() -> None:
    """What follows is no cycle."""
    state = after(_in_second_cycle(), lambda tx: tx.request(gang("g", 1)), now=50.0)
    state = after(state, lambda tx: tx.release(GANG), now=60.0)
    state = after(state, lambda tx: tx.request(gang("g", 1)), now=9e6)
    state = _arrived(state)
    state = after(state, lambda tx: tx.release(GANG, HALF), now=9e6 + 50.0)
    assert state.lendings[GANG].dedicated.value is None


def test_kept_nodes_stay_as_they_are_until_their_gang_asks() -> None:
    """The decision is applied and logged; a kept node needs no switch to return."""
    state = _pool("gated")
    tx = StateTransaction(state, PreemptivePolicy(), 150.0)
    tx.release(GANG, HALF)
    tx.release(GANG, HALF)  # answered late, repeated
    assert [(event.kind, event.cause) for event in tx.events] == [
        (
            "kept",
            "gang g: kept: cycle 1 of 3 before modes are compared; "
            "T_ded not measured, T_full not measured",
        )
    ]
    assert tx.state.gangs[GANG].parked
    epoch = state.nodes["both"].assignment.epoch
    state = after(tx.state, lambda tx: tx.request(gang("g", 1)), now=230.0)
    assert state.nodes["both"].assignment.epoch == epoch
    assert not state.gangs[GANG].parked


def test_gate_drives_the_nodes() -> None:
    """A gang that waits long has its nodes lent after the first block."""
    state, tags = _pool("gated"), []
    for step in range(BLOCK + 1):
        now = 100.0 * step
        state = after(state, lambda tx: tx.release(GANG, HALF), now=now)
        tags.append(state.nodes["both"].assignment.tag)
        state = _arrived(after(state, lambda tx: tx.request(gang("g", 1)), now=now + 80.0))
    assert tags == ["train", "train", "train", "rollout"]


def test_kept_nodes_generate_when_no_other_node_does() -> None:
    """The batch that their gang waits for would never be full; negative control: "never"."""
    modes: dict[LendingMode, str] = {"gated": "rollout", "never": ""}
    for mode, tag in modes.items():
        policy = PreemptivePolicy(lending=mode)
        state = after(_kept(), lambda tx: tx.lose(["other"]), policy, now=3.0)
        assert state.nodes["both"].assignment.tag == tag
        assert GANG not in state.gangs


def test_another_gang_may_take_kept_nodes() -> None:
    """Another gang gets them at once, before those that generate; their own waits its turn."""
    state = after(_kept(), lambda tx: tx.register(node("third", *BOTH)))
    state = after(state, lambda tx: tx.request(gang("h", 1)))
    assert state.nodes["both"].assignment.gang_id == "h"
    assert GANG not in state.gangs
    state = after(state, lambda tx: tx.request(gang("g", 2)))
    assert state.gangs[GANG].waits_for
    state = after(state, lambda tx: tx.release((RUN, "h")))
    assert len(state.members(state.gangs[GANG])) == 2


def test_nodes_that_cannot_roll_out_are_kept() -> None:
    """Suspending their trainer would gain nothing."""

    def fill(tx: StateTransaction) -> None:
        tx.register(node("other", "rollout"), node("train", "train"))
        tx.request(gang("g", 1))

    state = after(State(), fill)
    state = after(state, lambda tx: tx.release(GANG, HALF))
    assert state.nodes["train"].assignment.tag == "train"
    state = after(state, lambda tx: tx.release(GANG))
    assert state.nodes["train"].assignment.tag == "", "without an outlook it is given back for good"


@pytest.mark.parametrize(("mode", "tag"), [("always", "rollout"), ("never", "train")])
def test_gate_can_be_switched_off(mode: LendingMode, tag: str) -> None:
    """Then measurements are ignored."""
    policy = PreemptivePolicy(lending=mode)
    state = _pool(mode)
    for step in range(3):
        now = 10.0 * step
        state = after(state, lambda tx: tx.release(GANG, HALF), policy, now=now)
        assert state.nodes["both"].assignment.tag == tag
        state = after(state, lambda tx: tx.request(gang("g", 1)), policy, now=now + 5.0)


def test_toggle_is_the_mean_of_both_switches() -> None:
    """A start is no switch; the mean follows the newest."""

    def arrive(state: State, seconds: float) -> State:
        epoch = state.nodes["both"].assignment.epoch

        def report(tx: StateTransaction) -> None:
            tx.report("both", NodeState.ACTIVATING, epoch, epoch)
            tx.report("both", NodeState.ACTIVE, epoch, epoch, switch_seconds=seconds)

        return after(state, report)

    state = arrive(_pool("gated"), 60.0)
    assert state.nodes["both"].switch_seconds == {}
    for seconds in (4.0, 8.0):
        state = arrive(after(state, lambda tx: tx.release(GANG)), 6.0)
        state = arrive(after(state, lambda tx: tx.request(gang("g", 1))), seconds)
    assert state.nodes["both"].switch_seconds == {"rollout": 6.0, "train": 6.0}


@pytest.mark.parametrize(
    ("switch_seconds", "toggle"),
    [({}, 0.0), ({"train": 4.0}, 8.0), ({"rollout": 6.0, "train": 4.0}, 10.0)],
)
def test_toggle_is_the_way_there_and_back(switch_seconds: dict[str, float], toggle: float) -> None:
    """A direction that was never measured is taken to last as long as the other."""

    class Asked(PreemptivePolicy):
        def decide_lending(self, lending: LendingState, inputs: LendingInputs) -> LendingDecision:
            """Remember what was asked."""
            stakes.append(inputs)
            return super().decide_lending(lending, inputs)

    stakes: list[LendingInputs] = []

    def fill(tx: StateTransaction) -> None:
        tx.register(node("other", "rollout"), node("both", *BOTH, switch_seconds=switch_seconds))
        tx.request(gang("g", 1))
        tx.release(GANG, HALF)

    after(State(), fill, Asked())
    assert [inputs.round_trip_seconds for inputs in stakes] == [toggle]


def _pool(mode: LendingMode) -> State:
    """A rollout node, and one that trains for a gang."""

    def fill(tx: StateTransaction) -> None:
        tx.register(node("other", "rollout"), node("both", *BOTH))
        tx.request(gang("g", 1))

    return after(State(), fill, PreemptivePolicy(lending=mode))


def _arrived(state: State) -> State:
    """All nodes have taken up their assignments."""
    for name in state.nodes:

        def report(tx: StateTransaction, name: str = name) -> None:
            epoch = tx.state.nodes[name].assignment.epoch
            tx.report(name, NodeState.ACTIVE, epoch, epoch)

        state = after(state, report)
    return state


def _in_second_cycle() -> State:
    """The same from the release at 0 s on that begins the first measured cycle."""
    state = after(_arrived(_pool("gated")), lambda tx: tx.release(GANG, HALF), now=-100.0)
    state = after(state, lambda tx: tx.request(gang("g", 1)), now=-50.0)
    return after(state, lambda tx: tx.release(GANG, HALF), now=0.0)


def _kept() -> State:
    """The same after a release that the gate did not let pass."""
    state = after(
        _pool("never"), lambda tx: tx.release(GANG, HALF), PreemptivePolicy(lending="never")
    )
    assert state.gangs[GANG].parked
    return state
