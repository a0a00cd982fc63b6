"""When servers are ejected, probed and taken back."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway import limits
from rollout.gateway.dispatch.checked_stream import TurnFailures
from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
from rollout.gateway.dispatch.server_state import Server

IN_USE, EJECTED, PROBED = pb.EJECTION_NONE, pb.EJECTION_EJECTED, pb.EJECTION_PROBED


class Servers:
    """Three servers, and a clock."""

    def __init__(self, number: int = 3) -> None:
        nothing: Any = None
        self.now = 0.0
        self.all = [Server(f"s{i}", nothing, nothing) for i in range(number)]
        self.outliers = OutlierEjection(lambda: self.all, lambda: self.now)

    def states(self) -> list[pb.Ejection.ValueType]:
        """Of each."""
        return [self.outliers.state(server) for server in self.all]

    def fail(self, index: int, times: int = 3) -> None:
        """Failed turns of one."""
        for _ in range(times):
            self.outliers.failed(self.all[index], "it is broken")

    def answer(self, index: int, times: int = 1, *, is_empty: bool = False) -> None:
        """Turns that one has ended."""
        for _ in range(times):
            self.outliers.answered(self.all[index], is_empty=is_empty)


def test_a_server_is_ejected_probed_and_taken_back() -> None:
    """Three failed turns, five seconds, three good ones."""
    servers = Servers()
    servers.fail(0, 2)
    assert servers.states() == [IN_USE] * 3
    servers.fail(0, 1)
    assert servers.states() == [EJECTED, IN_USE, IN_USE]
    servers.now = 5.0
    assert servers.states() == [PROBED, IN_USE, IN_USE]
    servers.answer(0, 2)
    assert servers.states()[0] is PROBED
    servers.answer(0)
    assert servers.states()[0] is IN_USE


def test_each_failed_probe_doubles_the_time() -> None:
    """Up to the longest."""
    servers = Servers()
    servers.fail(0)
    for seconds in (5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0):
        assert servers.outliers.seconds_left(servers.all[0]) == seconds
        servers.now += seconds
        assert servers.states()[0] is PROBED
        servers.fail(0, 1)


def test_a_server_that_fails_again_soon_stays_away_longer() -> None:
    """Its time starts again once it has been in use for as long as the longest ejection."""
    servers = Servers()
    servers.fail(0)
    servers.now = 5.0
    servers.answer(0, 3)
    servers.fail(0)
    assert servers.outliers.seconds_left(servers.all[0]) == 10.0
    servers.now += 10.0
    servers.answer(0, 3)
    servers.now += 121.0
    servers.fail(0)
    assert servers.outliers.seconds_left(servers.all[0]) == 5.0


@pytest.mark.parametrize(("good_ones", "expected"), [(1, EJECTED), (2, IN_USE)])
def test_more_than_one_bad_turn_in_three_ejects(
    good_ones: int, expected: pb.Ejection.ValueType
) -> None:
    """A good turn makes up for half a failed one."""
    servers = Servers()
    for _ in range(20):
        servers.fail(0, 1)
        servers.answer(0, good_ones)
    assert (servers.states()[0] is EJECTED) == (expected is EJECTED)


@pytest.mark.parametrize(("number", "ejected"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_only_half_of_the_servers_are_ejected(number: int, ejected: int) -> None:
    """Where most fail, ejecting them does not help."""
    servers = Servers(number)
    for index in range(number):
        servers.fail(index, 10)
    assert servers.states().count(EJECTED) == ejected


def test_without_a_limit_of_failures_nothing_is_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(limits, "EJECTION_FAILURES", 0)
    servers = Servers()
    servers.fail(0, 100)
    servers.answer(1, 10)
    servers.answer(0, 100, is_empty=True)
    assert servers.states() == [IN_USE] * 3


def test_empty_answers_in_a_row_that_others_do_not_give_eject() -> None:
    """Four of them; then a single one, while it is probed."""
    servers = Servers()
    servers.answer(1)
    servers.answer(0, 3, is_empty=True)
    assert servers.states()[0] is IN_USE
    servers.answer(0, 1, is_empty=True)
    assert servers.states() == [EJECTED, IN_USE, IN_USE]
    servers.now = 5.0
    servers.answer(0, 1, is_empty=True)
    assert servers.states() == [EJECTED, IN_USE, IN_USE]


def test_a_policy_that_ends_at_once_ejects_nothing() -> None:
    """All servers give empty answers."""
    servers = Servers()
    for _ in range(20):
        for index in range(3):
            servers.answer(index, is_empty=True)
    assert servers.states() == [IN_USE] * 3


def test_empty_answers_of_a_server_without_others_are_doubted() -> None:
    """Until the others have given no other either, or it has."""
    servers = Servers()
    for server in servers.all:
        server.info = server_pb.GetServerInfoResponse()
    first, second, _ = servers.all
    assert servers.outliers.doubts_empty(first)
    servers.answer(1, is_empty=True)
    servers.answer(2, is_empty=True)
    assert not servers.outliers.doubts_empty(first)
    servers.answer(1)
    assert servers.outliers.doubts_empty(first)
    assert not servers.outliers.doubts_empty(second)
    servers.answer(0)
    assert not servers.outliers.doubts_empty(first)


def test_a_turn_that_all_refuse_counts_against_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an agent cannot have servers ejected by prompts that nobody takes."""
    monkeypatch.setattr(limits, "EJECTION_FAILURES", 1)
    servers = Servers()
    failures = TurnFailures(servers.outliers)
    assert not failures.add_verdict(servers.all[0], "too long")
    assert failures.avoided == {"s0"}
    assert failures.add_verdict(servers.all[1], "too long")
    assert servers.states() == [IN_USE] * 3


def test_a_turn_that_another_answers_counts_against_who_refused_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its first tokens."""
    monkeypatch.setattr(limits, "EJECTION_FAILURES", 1)
    servers = Servers()
    failures = TurnFailures(servers.outliers)
    assert not failures.add_verdict(servers.all[0], "too long")
    failures.answered()
    assert servers.states() == [EJECTED, IN_USE, IN_USE]
    assert servers.all[0].standing.cause == "too long"


def test_the_only_server_is_believed_after_three_times() -> None:
    """It gets the turn again only if no other serves."""
    servers = Servers(1)
    failures = TurnFailures(servers.outliers)
    said = [failures.add_verdict(servers.all[0], "too long") for _ in range(3)]
    assert said == [False, False, True]


def test_a_server_that_leaves_is_ejected_no_more() -> None:
    """The metric, of which an alert is made, counts servers that are there."""
    servers = Servers()
    servers.fail(0)
    assert _number() == 1
    servers.all.pop(0)
    servers.outliers.count()
    assert _number() == 0


def _number() -> float | None:
    return REGISTRY.get_sample_value("seamflow_rollout_gateway_ejected_servers")
