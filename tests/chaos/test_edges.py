"""The limits of `make chaos-edges`, on made up figures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.chaos.edges import frozen
from tests.chaos.edges.__main__ import broken, scenarios, with_controls
from tests.chaos.edges.abuser import ABUSES
from tests.chaos.edges.faulty_engine import FAULTS
from tests.lib.launcher.launched import Launched

GOOD = {
    "broken.nan.groups_lost_share": 0.02,
    "broken.empty.groups_lost_share": 0.0,
    "abuse.long_conversation.p99_ratio": 3.0,
    "abuse.long_conversation.growth_mib": 300.0,
    "abuse.long_conversation.calls": 900.0,
    "runs_poisoned": 0.0,
}
DAMAGE = {
    "control.nan.groups_lost_share": 0.9,
    "control.false_context.groups_lost_share": 0.9,
    "control.empty.groups_lost_share": 0.9,
    "control.message_of_10_mb.p99_ratio": 1.0,
    "control.message_of_10_mb.growth_mib": 4000.0,
    "control.message_of_10_mb.calls": 3.0,
    "control.template_that_loops.p99_ratio": 1.0,
    "control.template_that_loops.growth_mib": 1.0,
    "control.template_that_loops.calls": 0.0,
}


def test_good_figures_with_damage_in_the_controls_pass() -> None:
    """Five of ours, and one that a module counts."""
    figures = with_controls(
        {**GOOD, **DAMAGE, "negative_controls": 1, "negative_controls_failed": 1}
    )
    assert figures["negative_controls"] == figures["negative_controls_failed"] == 6
    assert broken(figures) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broken.nan.groups_lost_share", 0.03),
        ("abuse.long_conversation.p99_ratio", 3.1),
        ("abuse.long_conversation.growth_mib", 2000.0),
        ("runs_poisoned", 1.0),
        ("floods.slow_headers.p99_ratio", 3.1),
        ("floods.foreign_leases", 1.0),
        ("frozen.unnamed", 1.0),
        ("frozen.misnamed", 1.0),
    ],
)
def test_each_limit_can_be_broken(name: str, value: float) -> None:
    """And is named."""
    assert broken(with_controls({**GOOD, **DAMAGE, name: value})) == [name]


@pytest.mark.parametrize(
    "name", ["control.nan.groups_lost_share", "control.message_of_10_mb.growth_mib"]
)
def test_a_control_without_damage_is_a_failure(name: str) -> None:
    """It would prove nothing."""
    assert broken(with_controls({**GOOD, **DAMAGE, name: 0.0})) == ["negative_controls_failed"]


def test_every_fault_and_every_abuse_is_a_scenario() -> None:
    """Also in a quick run."""
    for divisor in (1, 10):
        names = set(scenarios(divisor))
        assert {f"broken.{name}" for name in FAULTS} | {f"abuse.{name}" for name in ABUSES} < names
        assert {"poison", "damage", "floods", "frozen"} < names


@pytest.mark.timeout(300)
def test_the_terminal_names_what_stands_still_and_nothing_else(tmp_path: Path) -> None:
    """One frozen process and a full store; control: a stranger that is frozen is not named."""
    told, strange = frozen.Told(), frozen.Told()
    with Launched.start(tmp_path) as launched:
        assert launched.until(lambda: launched.step > 1, 240) is not None
        frozen.freeze(launched, "evaluator", launched.processes["evaluator"], told, "middle")
        frozen.fill_store(launched, told)
        with subprocess.Popen(("sleep", "600")) as stranger:
            frozen.freeze(launched, "stranger", stranger.pid, strange, "control")
            stranger.kill()
    assert told.seconds.keys() == {"middle.evaluator", "store.full"}
    assert None not in told.seconds.values()
    assert strange.seconds == {"control.stranger": None}
    assert told.wrong == strange.wrong == []
