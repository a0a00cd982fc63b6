"""The gate of lending: what is done at each release, and what is learned from it."""

from __future__ import annotations

import pytest

from scheduler.draft import Draft
from scheduler.lending import Lending, Outlook, Stake, Verdict, judge
from scheduler.policy import LendingMode, PreemptivePolicy
from scheduler.records import NodeState, State
from tests.scheduler.support import BOTH, RUN, after, gang, node

HALF = Outlook(remaining_rollouts=50, batch_rollouts=100)
GANG = (RUN, "g")


def stake(**fields: object) -> Stake:
    """Four dedicated nodes, four that could be lent."""
    values = {"outlook": HALF, "num_dedicated": 4, "num_lent": 4, "toggle_seconds": 14.0}
    return Stake(**(values | fields))  # type: ignore[arg-type]


def released(
    lending: Lending, dedicated: float, full: float, num_steps: int
) -> tuple[Lending, list[Verdict]]:
    """After steps in which a batch takes so many seconds without and with the lent nodes."""
    verdicts = []
    for step in range(num_steps):
        verdict = judge(lending, stake())
        seconds = HALF.share * (full if verdict.lend else dedicated)
        lending = lending.begun(verdict, HALF, 1000.0 * step).ended(1000.0 * step + seconds)
        verdicts.append(verdict)
    return lending, verdicts


def test_each_way_is_measured_once_then_the_cheaper_one_stays() -> None:
    """Lent, kept, then by the formula; the cause shows each quantity."""
    _, verdicts = released(Lending(), dedicated=200.0, full=110.0, num_steps=4)
    assert [verdict.lend for verdict in verdicts] == [True, False, True, True]
    assert [verdict.cause for verdict in verdicts] == [
        "lent: nothing was measured yet",
        "kept: to measure a batch without: 0.5 * (220 - 110) s > 14 s",
        "lent: 0.5 * (200 - 110) s > 14 s",
        "lent: 0.5 * (200 - 110) s > 14 s",
    ]
    _, verdicts = released(Lending(), dedicated=200.0, full=180.0, num_steps=4)
    assert [verdict.lend for verdict in verdicts] == [True, False, False, False]
    assert verdicts[-1].cause == "kept: 0.5 * (200 - 180) s <= 14 s"


def test_what_cannot_pay_even_at_best_is_not_tried() -> None:
    """With perfect scaling from the side that was measured lending would save too little."""
    tried = Lending().begun(Verdict(lend=False, cause=""), HALF, 0.0).ended(10.0)
    assert judge(tried, stake()).cause == "kept: 0.5 * (20 - 10) s <= 14 s"
    assert judge(tried, stake(toggle_seconds=4.0)).cause == "lent: 0.5 * (20 - 10) s > 4 s"


@pytest.mark.parametrize(
    ("changes", "lend"),
    [
        ({"num_dedicated": 0}, True),
        ({"outlook": Outlook(remaining_rollouts=0, batch_rollouts=9)}, False),
    ],
)
def test_what_needs_no_measuring(changes: dict[str, object], lend: bool) -> None:
    """The only nodes are always lent; for nothing none are."""
    assert judge(Lending(), stake(**changes)).lend is lend


def test_a_loss_is_not_forgotten_for_a_small_gain() -> None:
    """After a measured loss the gain must exceed the cost by a clear margin."""
    lost, _ = released(Lending(), dedicated=200.0, full=180.0, num_steps=3)
    assert judge(lost, stake(toggle_seconds=9.0)).cause == (
        "kept: not by a clear margin: 0.5 * (200 - 180) s > 9 s"
    )
    assert judge(lost, stake(toggle_seconds=6.0)).lend


def test_the_other_way_is_tried_again_ever_more_rarely() -> None:
    """A small difference after 4 steps, then 8, 16 ...; a clear one after 32."""
    for full, patience in ((190.0, 4), (100.0, 32)):
        _, verdicts = released(Lending(), dedicated=200.0, full=full, num_steps=4 * patience + 6)
        usual = verdicts[2].lend
        tries = [step for step, verdict in enumerate(verdicts[2:]) if verdict.lend is not usual]
        assert tries[0] in (patience, patience + 1)
        assert tries[1] - tries[0] == 2 * patience + 1


def test_a_drift_of_lengths_is_noticed() -> None:
    """Lending that ceased to pay ends at the next look, and begins again when it pays again."""
    lending, _ = released(Lending(), dedicated=200.0, full=100.0, num_steps=3)
    lending, verdicts = released(lending, dedicated=60.0, full=58.0, num_steps=60)
    assert not verdicts[-1].lend
    lending, verdicts = released(lending, dedicated=400.0, full=200.0, num_steps=60)
    assert verdicts[-1].lend


def test_a_straggler_alone_says_little_of_a_batch() -> None:
    """60 s for the last of 64 rollouts are not 3,840 s for a batch that was measured at 100 s."""
    batch = Outlook(remaining_rollouts=64, batch_rollouts=64)
    lone = Outlook(remaining_rollouts=1, batch_rollouts=64)
    keep = Verdict(lend=False, cause="")
    lending = Lending().begun(keep, batch, 0.0).ended(100.0)
    lending = lending.begun(keep, lone, 0.0).ended(60.0)
    assert lending.dedicated.mean == pytest.approx((0.8 * 100 + 60) / (0.8 + 1 / 64))


def test_kept_nodes_stay_as_they_are_until_their_gang_asks() -> None:
    """What the gate decides is carried out and told; a kept node needs no switch to come back."""
    state = after(_pool("gated"), lambda draft: draft.release(GANG, HALF), now=50.0)
    assert state.nodes["both"].assignment.tag == "rollout", "lent the first time"
    state = after(state, lambda draft: draft.request(gang("g", 1)), now=100.0)
    draft = Draft(state, PreemptivePolicy(), 150.0)
    draft.release(GANG, HALF)
    draft.release(GANG, HALF)  # answered late, repeated
    assert [(event.kind, event.cause) for event in draft.events] == [
        ("kept", "gang g: kept: to measure a batch without: 0.5 * (200 - 100) s > 0 s")
    ]
    epoch = state.nodes["both"].assignment.epoch
    state = after(draft.state, lambda draft: draft.request(gang("g", 1)), now=230.0)
    assert state.nodes["both"].assignment.epoch == epoch
    assert not state.gangs[GANG].parked
    lending = state.lendings[GANG]
    assert (lending.full.mean, lending.dedicated.mean) == (100.0, 160.0)


def test_kept_nodes_step_in_when_nobody_else_generates() -> None:
    """The batch that their gang waits for would never be full; negative control: "never"."""
    for mode, tag in (("gated", "rollout"), ("never", "")):
        policy = PreemptivePolicy(lending=mode)
        state = after(_kept(), lambda draft: draft.lose(["other"]), policy, now=3.0)
        assert state.nodes["both"].assignment.tag == tag
        assert GANG not in state.gangs


def test_kept_nodes_are_anybodys_who_asks() -> None:
    """Another gang gets them at once, before those that generate; their own waits its turn."""
    state = after(_kept(), lambda draft: draft.register(node("third", *BOTH)))
    state = after(state, lambda draft: draft.request(gang("h", 1)))
    assert state.nodes["both"].assignment.gang_id == "h"
    assert GANG not in state.gangs
    state = after(state, lambda draft: draft.request(gang("g", 2)))
    assert state.gangs[GANG].waits_for
    state = after(state, lambda draft: draft.release((RUN, "h")))
    assert len(state.members(state.gangs[GANG])) == 2


def test_nodes_that_cannot_roll_out_are_kept() -> None:
    """Nobody gains by suspending their trainer."""

    def fill(draft: Draft) -> None:
        draft.register(node("other", "rollout"), node("train", "train"))
        draft.request(gang("g", 1))

    state = after(State(), fill)
    state = after(state, lambda draft: draft.release(GANG, HALF))
    assert state.nodes["train"].assignment.tag == "train"
    state = after(state, lambda draft: draft.release(GANG))
    assert state.nodes["train"].assignment.tag == "", "without an outlook it is given back for good"


@pytest.mark.parametrize(("mode", "tag"), [("always", "rollout"), ("never", "train")])
def test_gate_can_be_switched_off(mode: LendingMode, tag: str) -> None:
    """Then what was measured has no say: never the second time, always both times."""
    policy = PreemptivePolicy(lending=mode)
    state = _pool(mode)
    for step in range(3):
        now = 10.0 * step
        state = after(state, lambda draft: draft.release(GANG, HALF), policy, now=now)
        assert state.nodes["both"].assignment.tag == tag
        state = after(state, lambda draft: draft.request(gang("g", 1)), policy, now=now + 5.0)


def test_a_request_ahead_ends_the_batch_only_when_it_is_full() -> None:
    """Asked for ahead, needed now: the batch was full at the second request, not at the first."""
    ahead = gang("g", 1, needed_time=30.0)
    state = after(_pool("gated"), lambda draft: draft.release(GANG, HALF), now=0.0)
    state = after(state, lambda draft: draft.request(ahead), now=30.0)
    assert state.nodes["both"].assignment.tag == "train"
    told = after(state, lambda draft: draft.request(gang("g", 1)), now=40.0)
    assert told.lendings[GANG].full.mean == 80.0
    untold = after(state, lambda draft: draft.release(GANG, HALF), now=90.0)
    assert untold.lendings[GANG].full.mean == 60.0, "it never asked again: full at needed_time"
    early = after(state, lambda draft: draft.release(GANG), now=35.0)
    early = after(early, lambda draft: draft.request(gang("g", 1)), now=90.0)
    assert early.lendings[GANG].full.mean is None, "given back meanwhile: nothing was measured"


def test_toggle_is_the_mean_of_both_switches() -> None:
    """A start is no switch; the mean follows the newest."""

    def arrive(state: State, seconds: float) -> State:
        epoch = state.nodes["both"].assignment.epoch

        def report(draft: Draft) -> None:
            draft.report("both", NodeState.ACTIVATING, epoch, epoch)
            draft.report("both", NodeState.ACTIVE, epoch, epoch, switch_seconds=seconds)

        return after(state, report)

    state = arrive(_pool("gated"), 60.0)
    assert state.nodes["both"].switch_seconds == {}
    for seconds in (4.0, 8.0):
        state = arrive(after(state, lambda draft: draft.release(GANG)), 6.0)
        state = arrive(after(state, lambda draft: draft.request(gang("g", 1))), seconds)
    assert state.nodes["both"].switch_seconds == {"rollout": 6.0, "train": 6.0}


def _pool(mode: LendingMode) -> State:
    """A rollout node, and one that trains for a gang."""

    def fill(draft: Draft) -> None:
        draft.register(node("other", "rollout"), node("both", *BOTH))
        draft.request(gang("g", 1))

    return after(State(), fill, PreemptivePolicy(lending=mode))


def _kept() -> State:
    """The same after a release that the gate did not let pass."""
    state = after(
        _pool("never"), lambda draft: draft.release(GANG, HALF), PreemptivePolicy(lending="never")
    )
    assert state.gangs[GANG].parked
    return state
