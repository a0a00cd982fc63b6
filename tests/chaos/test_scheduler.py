"""The checker of `make chaos-scheduler`, on histories made up to hold what it must find."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
from rich.progress import Progress
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.policy.allocation_policy import PreemptivePolicy
from services.chassis.errors import ServiceError
from tests.chaos.scheduler.__main__ import broken, figures_of
from tests.chaos.scheduler.audit import Entry
from tests.chaos.scheduler.checker import (
    GRACE_SECONDS,
    Verdict,
    check,
    holds,
    interrupted,
    reassigned,
)
from tests.chaos.scheduler.controls.partial_gangs import GreedyPolicy
from tests.chaos.scheduler.faults import kill_scheduler
from tests.chaos.scheduler.gangs import num_partial
from tests.chaos.scheduler.ledger import Event, Ledger, read_events
from tests.chaos.scheduler.mixes.mixes import Ask, Place, partial_gangs, play
from tests.chaos.scheduler.mixes.worlds import VirtualWorld
from tests.chaos.scheduler.outcome import Outcome
from tests.chaos.scheduler.plot import draw_timelines
from tests.chaos.scheduler.worker import Activity
from tests.chaos.store.rig import Setting
from tests.lib.gate import Gate

G = "gang-0-0"


def assigned(sequence: int, node: str, epoch: int, gang: str = G) -> Entry:
    """The scheduler gave `node` work of `gang`."""
    return Entry(sequence=sequence, kind="assigned", node=node, epoch=epoch, tag="train", gang=gang)


def lost(sequence: int, node: str, epoch: int) -> Entry:
    """The scheduler lost `node` under `epoch`."""
    return Entry(sequence=sequence, kind="lost", node=node, epoch=epoch)


def hold(time: float, node: str, epoch: int | None, tag: str = "train") -> Event:
    """A worker took its device."""
    return Event(kind="hold", time=time, node=node, tag=tag, epoch=epoch)


def let_go(time: float, node: str, epoch: int | None, tag: str = "train") -> Event:
    """A worker gave its device back."""
    return Event(kind="let_go", time=time, node=node, tag=tag, epoch=epoch)


def effect(time: float, node: str, epoch: int) -> Event:
    """An effect was accepted."""
    return Event(kind="effect", time=time, node=node, epoch=epoch, gang=G)


def take(time: float, members: Mapping[str, int]) -> Event:
    """The gang's work was taken over."""
    return Event(kind="take", time=time, gang=G, members=members)


def of_node(kind: str, time: float, node: str = "a") -> Event:
    """Something was done to a node."""
    return Event(kind=kind, time=time, node=node)


AUDIT = (assigned(1, "a", 1), lost(2, "a", 1), assigned(3, "b", 2))
# a's work goes on at b from 6.0 on.
MOVED = (
    hold(0.0, "a", 1),
    take(0.1, {"a": 1}),
    effect(0.2, "a", 1),
    hold(5.0, "b", 2),
    take(5.5, {"b": 2}),
    effect(6.0, "b", 2),
)


def test_work_that_moves_in_order_has_one_owner() -> None:
    """Stopped before it goes on elsewhere: nothing to find."""
    events = [*MOVED[:3], let_go(4.0, "a", 1), *MOVED[3:]]
    verdict = check(events, AUDIT)
    assert verdict.violations == 0
    assert (verdict.effects, verdict.work_moved) == (2, 1)


@pytest.mark.parametrize("stopped", [[let_go(7.0, "a", 1)], []])
def test_a_lease_that_is_outlived_is_found(stopped: list[Event]) -> None:
    """The node still does, or does for ever, what another one has begun."""
    assert check([*MOVED, *stopped], AUDIT).outlived_leases == 1


@pytest.mark.parametrize(
    ("stopped", "found"), [(9.0 + GRACE_SECONDS / 2, 0), (9.5 + GRACE_SECONDS, 1)]
)
def test_a_frozen_agent_can_stop_nothing_before_it_wakes(stopped: float, found: int) -> None:
    """But it must soon after."""
    frozen = [MOVED[0], of_node("freeze", 0.05), *MOVED[1:], of_node("wake", 9.0)]
    assert check([*frozen, let_go(stopped, "a", 1)], AUDIT).outlived_leases == found


def test_a_dead_node_holds_nothing() -> None:
    """Its worker cannot say that it let go."""
    events = [*MOVED[:3], of_node("death", 1.0), *MOVED[3:]]
    assert check(events, AUDIT).violations == 0
    assert next((h.node, h.end) for h in holds(events)) == ("a", 1.0)
    assert reassigned(events) == [5.0]


def test_work_of_a_gang_that_ended_is_not_waited_for() -> None:
    """Only what goes on is reassigned."""
    ended = [*MOVED[:3], of_node("death", 1.0), Event(kind="close", time=2.0, gang=G), *MOVED[3:]]
    assert reassigned(ended) == []


def test_an_effect_of_a_former_member_is_found() -> None:
    """A store that does not fence takes what a frozen agent's worker goes on doing."""
    assert check([*MOVED, effect(6.5, "a", 1)], AUDIT).stale_effects == 1


def test_two_workers_on_one_device_are_found() -> None:
    """Rollout has to end before training begins."""
    rollout = hold(0.0, "a", None, "rollout")
    shared = [rollout, hold(1.0, "a", 1), let_go(2.0, "a", None, "rollout")]
    in_order = [rollout, let_go(1.0, "a", None, "rollout"), hold(2.0, "a", 1)]
    assert check(shared, AUDIT).shared_devices == 1
    assert check(in_order, AUDIT).shared_devices == 0


@pytest.mark.parametrize("late", [hold(2.0, "a", 1), let_go(2.0, "a", 1), effect(2.0, "a", 1)])
def test_an_older_epoch_after_a_newer_one_is_found(late: Event) -> None:
    """Whatever happens under it, on the same node."""
    assert check([hold(1.0, "a", 3), late], ()).older_epochs == 1
    assert check([hold(1.0, "b", 3), late], ()).older_epochs == 0


@pytest.mark.parametrize(
    ("audit", "found"),
    [
        ([assigned(1, "a", 1), assigned(2, "b", 2)], 0),
        ([assigned(1, "a", 1), assigned(2, "b", 1)], 1),
        ([assigned(1, "a", 1), assigned(1, "b", 2)], 1),
    ],
)
def test_an_epoch_given_twice_is_found(audit: list[Entry], found: int) -> None:
    """Two schedulers at once cannot count together."""
    assert check([], audit).reused_epochs == found


def test_a_node_granted_to_two_gangs_is_found() -> None:
    """Under the same epoch; under another one it has moved on."""
    grants = [
        Event(kind="grant", time=0.0, gang=gang, members={"a": epoch}, asked=1)
        for gang, epoch in ((G, 1), ("gang-1-0", 1), ("gang-1-0", 2))
    ]
    assert check(grants, ()).reused_epochs == 1


def test_a_grant_of_fewer_nodes_is_found() -> None:
    """All or none."""
    grants = [
        Event(kind="grant", time=0.0, gang=G, members={"a": 1}, asked=asked) for asked in (1, 2)
    ]
    assert check(grants, ()).partial_gangs == 1


@pytest.mark.parametrize(
    ("ranks", "found"), [([0, 1], 0), ([0], 1), ([1], 1), ([0, 0], 1), ([], 0)]
)
def test_a_gang_with_some_of_its_nodes_is_found(ranks: list[int], found: int) -> None:
    """In what the scheduler lists, and in what a mix was given."""
    nodes = [
        pb.Node(assignment=pb.Assignment(gang_id=G, node_index=rank, num_gang_nodes=2))
        for rank in ranks
    ]
    assert num_partial(nodes) == found
    places = [Place(gang=("run", G), rank=rank, size=2) for rank in ranks]
    ask = Ask(run_id="run", gang_id=G, tag="train", num_nodes=2, delay_seconds=0.0, turn=1)
    assert partial_gangs(places, [ask]) == found


def test_a_restart_that_touches_work_is_found() -> None:
    """A node that is lost, registers again, or takes its device without being told to."""
    joined = Entry(sequence=1, kind="registered", node="a", epoch=0)
    quiet = [joined, assigned(2, "a", 1)]
    once = [hold(0.0, "a", 1)]
    twice = [*once, let_go(1.0, "a", 1), hold(2.0, "a", 1)]
    assert interrupted(once, quiet) == 0
    assert interrupted(twice, quiet) == 1
    assert interrupted(once, [*quiet, joined]) == 1
    assert interrupted(once, [*quiet, lost(3, "a", 1)]) == 1


def test_a_figure_says_which_promise_is_broken() -> None:
    """Any way of having two owners counts, and so does a control that nobody saw."""
    whole = Outcome(figures={"negative_controls": 2, "negative_controls_failed": 2})
    assert broken(figures_of(whole)) == []
    bad = whole + Outcome(
        verdict=Verdict(stale_effects=1) + Verdict(deadlocks=1),
        figures={"negative_controls_failed": 1, "reassigned_max_s": 10.1},
    )
    assert broken(figures_of(bad)) == [
        "reassigned_max_s",
        "double_owners",
        "deadlocks",
        "negative_controls_failed",
    ]


@pytest.mark.parametrize("fenced", [True, False])
def test_the_ledger_takes_effects_of_the_newest_members_only(tmp_path: Path, fenced: bool) -> None:
    """Without its fence it takes everybody's, and the checker sees it."""
    ledger = Ledger(tmp_path, fenced=fenced)
    ledger.take(G, {"a": 1})
    assert ledger.effect("a", 1)
    ledger.take(G, {"b": 2})
    assert ledger.effect("a", 1) is not fenced
    assert ledger.effect("b", 2)
    ledger.end(G)
    assert ledger.effect("b", 2) is not fenced
    ledger.close()
    assert check(read_events(ledger.path), AUDIT).stale_effects == (not fenced)


@pytest.mark.parametrize("checked", [True, False])
def test_a_worker_refuses_older_epochs(tmp_path: Path, checked: bool) -> None:
    """Without its check it obeys, and the checker sees it."""
    ledger = Ledger(tmp_path)
    activity = Activity(ledger, "a", "train", checked=checked)
    activity.hold(2)
    if checked:
        with pytest.raises(ServiceError, match="epoch 1 of train of a is stale"):
            activity.let_go(1)
    else:
        activity.let_go(1)
    ledger.close()
    assert check(read_events(ledger.path), ()).older_epochs == (not checked)


async def test_a_gate_holds_back_what_it_cuts_off() -> None:
    """What was sent meanwhile arrives when it opens again."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Gate(server.sockets[0].getsockname()[1]).serving() as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        gate.cut()
        writer.write(b"two")
        answer = asyncio.create_task(reader.readexactly(3))
        assert not (await asyncio.wait({answer}, timeout=0.05))[0]
        gate.heal()
        assert await answer == b"two"
        writer.close()


@pytest.mark.parametrize(("policy", "whole"), [(PreemptivePolicy(), True), (GreedyPolicy(), False)])
async def test_random_mixes_of_gangs(policy: PreemptivePolicy, whole: bool) -> None:
    """All or none keeps every gang whole and serves all; one by one does neither."""
    verdicts = [await play(VirtualWorld(policy), Random(seed)) for seed in range(40)]
    total = sum(verdicts, start=Verdict())
    assert total.gangs_served > 100
    assert (total.partial_gangs == 0, total.deadlocks == 0) == (whole, whole)


async def test_a_killed_scheduler_leaves_work_alone(tmp_path: Path) -> None:
    """The smallest whole scenario: real processes, one kill, and its picture."""
    with Progress(disable=True) as progress:
        setting = Setting(folder=tmp_path, seed=0, progress=progress)
        outcome = await kill_scheduler(setting, kills=1, num_nodes=2)
    assert outcome.verdict.violations == 0
    assert outcome.verdict.effects > 0
    histories: dict[str, Sequence[Event]] = {"kills": outcome.events}
    draw_timelines(tmp_path / "picture.png", histories)
    assert (tmp_path / "picture.png").stat().st_size > 0
