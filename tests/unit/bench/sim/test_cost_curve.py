"""Two kinds of nodes: costs by the roofline, and the simulator beside the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim import cost_curve
from bench.sim.cost_curve import Mix, Rates, best_own, curve, mixes, throughput
from bench.sim.costs import costs_of, load_costs
from bench.sim.workloads import load_workloads
from services.lib.decode_latency import DecodeLatency
from services.node_agent.known_devices import devices

OWN, KINDS = load_costs(), devices()
H800, H20 = KINDS["h800-80"], KINDS["h20-96"]
WORKLOAD = load_workloads()["single_turn_8k"]
APART = 0.1
"""The most that simulator and formula may be."""


def test_a_kind_costs_what_it_costs() -> None:
    """The reference as given; another one by bandwidth in small batches, by FLOP/s in large."""
    assert costs_of(H800, H800, OWN) == OWN
    other = costs_of(H20, H800, OWN)
    assert other.engine.decode_seconds.seconds(8) == pytest.approx(0.0085 * 3.35 / 4.0)
    assert other.engine.decode_seconds.seconds(256) == pytest.approx(256 / (39000 * 148 / 989))
    assert other.training.tokens_per_second == pytest.approx(4700 * 148 / 989)
    assert other.engine.cached_tokens > OWN.engine.cached_tokens
    assert other.switching == OWN.switching


def test_the_best_split_balances_generation_and_training() -> None:
    """No other one trains more, and its gain is the formula's for nodes that divide evenly."""
    free = replace(OWN, training=replace(OWN.training, step_seconds=0.0))
    rate, ratio = Rates(generate=2.0, generate_other=1.0, train=1.0), 2.0
    alone = Mix(own=12, other=0, price=24.0, share=0.0)
    both = Mix(own=8, other=8, price=24.0, share=1 / 3)
    found = [
        throughput(mix, best_own(mix, rate, WORKLOAD, free), rate, WORKLOAD, free)
        for mix in (alone, both)
    ]
    gain = ratio * (1 / 2.0 + 1) / (1 / 1.0 + ratio / 1.0)
    assert found == [pytest.approx(8.0), pytest.approx(8.0)]
    assert found[1] / found[0] == pytest.approx(gain)


def test_every_mix_costs_about_as_much() -> None:
    """As far as whole nodes allow."""
    prices = [mix.price for mix in mixes()]
    assert max(prices) / min(prices) < 1.02
    assert next(mixes()).share == 0.0


def test_the_simulator_is_near_the_formula() -> None:
    """On both sides of the best mix."""
    points = curve(8, 0, 3, (16, 13, 10))
    assert points[1].simulated > 1.3
    assert all(abs(p.simulated / p.formula - 1) < APART for p in points)


def test_what_the_formula_does_not_know_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nodes of the other kind are simulated at half their speed."""
    plain = cost_curve._setting
    engine = replace(OWN.engine, decode_seconds=DecodeLatency.of({1: 2 * 0.0071}))
    monkeypatch.setattr(
        cost_curve,
        "_setting",
        lambda *a, **k: replace(plain(*a, **k), other_costs=replace(OWN, engine=engine)),
    )
    assert curve(8, 0, 2, (16, 13))[1].simulated < 1.3
