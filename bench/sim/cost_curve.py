"""Throughput for money with two kinds of nodes, against their shares: `make bench-cost`.

StreamRL (arXiv 2504.15930) trains on H800s, generates on H20s elsewhere, and reports 1.23 to 1.33
times the throughput for the same money. That is one point: how much it is follows from prices, from
the roofline and from the batch that engines decode. Here the whole curve is drawn, by a formula and
by the simulator, for several batches. Kinds are those of `known_devices.toml`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.report import RESULTS, Report
from bench.sim.costs import Costs, costs_of, load_costs
from bench.sim.modes import MODES, Split
from bench.sim.plots import new_figure, save
from bench.sim.simulator.simulation import Setting, simulate
from bench.sim.workloads import Workload, load_workloads
from services.node_agent.known_devices import Device, devices

_REFERENCE, _OTHER = "h800-80", "h20-96"
"""Kinds: what `costs.toml` describes, and what only generates."""
_PAPER = (1.23, 1.33)
_WORKLOAD = "single_turn_8k"
_NODES = 16
"""Of the reference kind alone; every mix costs about as much."""
_BATCHES = (32, 64, 128)
_OWN_COUNTS = (16, 14, 12, 11, 10, 9, 8, 7, 5)
"""Nodes of the reference kind in the mixes that are simulated."""
_GROUPS = 200
"""Drawn for the means of the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rollouts a second of one node that does nothing else."""

    generate: float
    """Of the reference kind."""
    generate_other: float
    """Of the other kind."""
    train: float
    """Of the reference kind."""
    update: float = 0.0
    """Seconds that new weights keep a node of the reference kind from generating."""
    update_other: float = 0.0
    """One of the other kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Nodes of two kinds, which cost about as much as `_NODES` of the reference kind."""

    own: int
    """Of the reference kind."""
    other: int
    """Of the other kind."""
    price: float
    """An hour."""
    share: float
    """Of the price that goes to the other kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mix at its best split, and its throughput for money over that of one kind alone."""

    mix: Mix
    formula: float
    simulated: float


def main() -> None:
    """Simulate, draw, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6, help="of each simulated run")
    given = parser.parse_args()
    curves = {batch: curve(batch, given.seed, given.steps) for batch in _BATCHES}
    Report(
        bench="cost_curve", figures=figures(curves), seeds=[given.seed], packages=("seamflow",)
    ).publish()
    _draw(RESULTS / "cost_curve.png", curves)


def curve(
    batch: int, seed: int, steps: int, own_counts: Sequence[int] = _OWN_COUNTS
) -> Sequence[Point]:
    """Every mix, at one batch of the engines."""
    workload = _workload(batch)
    own, other = _costs()
    found, rate = [], rates(workload, own, other)
    for mix in track(list(mixes(own_counts)), description=f"batch {batch}"):
        split = best_own(mix, rate, workload, own)
        setting = _setting(mix, split, workload, (own, other), seed=seed, steps=steps)
        simulated = simulate(setting).rollouts_per_second / mix.price
        found.append((mix, throughput(mix, split, rate, workload, own) / mix.price, simulated))
    _, formula, simulated = found[0]
    return [Point(mix=m, formula=f / formula, simulated=s / simulated) for m, f, s in found]


def mixes(own_counts: Sequence[int] = _OWN_COUNTS) -> Iterator[Mix]:
    """For the same money, as far as whole nodes allow; the first has one kind alone."""
    known = devices()
    own_price, other_price = known[_REFERENCE].price, known[_OTHER].price
    for own in own_counts:
        other = round((_NODES - own) * own_price / other_price)
        price = own * own_price + other * other_price
        yield Mix(own=own, other=other, price=price, share=other * other_price / price)


def rates(workload: Workload, own: Costs, other: Costs) -> Rates:
    """By the costs' own arithmetic, with all slots of an engine taken all the time.

    A rollout of prompt p and length L takes p/f + L T(b, b c)/b seconds of a node that generates,
    for f prefilled tokens a second, T the seconds of a decode step of b sequences, and
    c = p + E[L^2]/(2 E[L]) tokens of each of them cached: a sequence that is found running is a
    long one.
    """
    lengths = [
        plan.output_tokens for number in range(_GROUPS) for plan in workload.group(-1, number)
    ]
    mean = sum(lengths) / len(lengths)
    cached = workload.prompt_tokens + sum(each**2 for each in lengths) / (2 * sum(lengths))

    def generate(costs: Costs) -> tuple[float, float]:
        batch = min(workload.slots, int(costs.engine.cached_tokens / cached))
        step = costs.engine.step_seconds(batch, batch * cached) / batch
        prefill = costs.engine.prefill_tokens_per_second
        rate = 1 / (workload.prompt_tokens / prefill + mean * step)
        return rate, costs.engine.update_seconds + batch * cached / prefill

    (of_own, update), (of_other, update_other) = generate(own), generate(other)
    return Rates(
        generate=of_own,
        generate_other=of_other,
        train=own.training.tokens_per_second / (workload.prompt_tokens + mean),
        update=update,
        update_other=update_other,
    )


def throughput(mix: Mix, generating: int, rate: Rates, workload: Workload, own: Costs) -> float:
    """Rollouts per second of a split; `generating`: nodes of the reference kind that generate.

    It is the rate of the slower stage. Generating the R rollouts of a step takes
    (R + sum of g_k u_k) / sum of g_k seconds: k are the nodes that generate, g_k their rates, u_k
    the seconds that new weights cost each. Training takes R / sum of t_k + s: t_k are the rates of
    the nodes that train, s the seconds of an optimizer step. In large steps, at the best mix, the
    gain over one kind is c (1/g + 1/t) / (1/g' + c/t): c is the ratio of prices, g, g' and t are
    the rates of single nodes.
    """
    batch = workload.rollouts_per_step
    own_rate, other_rate = generating * rate.generate, mix.other * rate.generate_other
    missed = own_rate * rate.update + other_rate * rate.update_other
    generation = (batch + missed) / (own_rate + other_rate)
    training = batch / ((mix.own - generating) * rate.train) + own.training.step_seconds
    return batch / max(generation, training)


def best_own(mix: Mix, rate: Rates, workload: Workload, own: Costs) -> int:
    """How many nodes of the reference kind generate in the best split."""
    choices = range(0 if mix.other else 1, mix.own)
    return max(choices, key=lambda number: throughput(mix, number, rate, workload, own))


def figures(curves: Mapping[int, Sequence[Point]]) -> dict[str, float]:
    """Peaks, where the formula holds what the paper reports, and how far the two are apart."""
    found: dict[str, float] = {}
    for batch, points in curves.items():
        peak = max(points, key=lambda point: point.simulated)
        found |= {
            f"gain_most_batch_{batch}": peak.simulated,
            f"gain_most_batch_{batch}_formula": max(point.formula for point in points),
            f"share_of_money_batch_{batch}": peak.mix.share,
        }
    own, other = _costs()
    gains = {batch: _gain(rates(_workload(batch), own, other)) for batch in range(8, 257)}
    for bound in _PAPER:
        reached = [batch for batch, gain in gains.items() if gain >= bound]
        found[f"batch_of_gain_{bound}"] = float(max(reached, default=0))
    apart = [p.simulated / p.formula - 1 for points in curves.values() for p in points]
    return found | {"simulated_vs_formula_worst": max(apart, key=abs)}


def _gain(rate: Rates) -> float:
    """At the best mix, if nodes could be divided."""
    known = devices()
    ratio = known[_REFERENCE].price / known[_OTHER].price
    alone = ratio * (1 / rate.generate + 1 / rate.train)
    return alone / (1 / rate.generate_other + ratio / rate.train)


def _costs() -> tuple[Costs, Costs]:
    """Of the reference kind, and of the other."""
    known: Mapping[str, Device] = devices()
    own = load_costs()
    return own, costs_of(known[_OTHER], known[_REFERENCE], own)


def _workload(batch: int) -> Workload:
    """With this batch in every engine, and steps large enough to keep all of them full."""
    base = load_workloads()[_WORKLOAD]
    nodes = max(mix.own + mix.other for mix in mixes())
    return replace(
        base,
        slots=batch,
        rollouts_per_node=batch * 5 // 4,
        groups_per_step=nodes * batch // base.group_size // 8 * 8,
    )


def _setting(
    mix: Mix, own: int, workload: Workload, costs: tuple[Costs, Costs], *, seed: int, steps: int
) -> Setting:
    return Setting(
        mode=MODES["streamrl-async"],
        workload=workload,
        split=Split(rollout=mix.other + own, train=mix.own - own, both=0),
        costs=costs[0],
        other_costs=costs[1],
        num_other=mix.other,
        seed=seed,
        warm_up=3,
        steps=steps,
    )


def _draw(file: Path, curves: Mapping[int, Sequence[Point]]) -> None:
    figure, (axes,) = new_figure(7, 4.2, 1)
    axes.axhspan(*_PAPER, color="#f2c14e", alpha=0.35, label="StreamRL reports 1.23 to 1.33")
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    for (batch, points), colour in zip(
        curves.items(), ("#4c9be8", "#3fae6a", "#e58b3a"), strict=True
    ):
        _draw_curve(axes, batch, points, colour)
    axes.set(
        xlabel="share of the money that goes to H20s, which only generate",
        ylabel="throughput for money, over H800s alone",
        ylim=(0, None),
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, file)


def _draw_curve(axes: Any, batch: int, points: Sequence[Point], colour: str) -> None:
    shares = [point.mix.share for point in points]
    formula = [point.formula for point in points]
    axes.plot(shares, formula, "-", color=colour, label=f"batch {batch}, formula")
    simulated = [point.simulated for point in points]
    axes.plot(shares, simulated, "o", color=colour, label=f"batch {batch}, simulated")


if __name__ == "__main__":
    main()
