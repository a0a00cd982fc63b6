"""The whole run in virtual time: what must hold in every mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from bench.sim.costs import EngineCosts, load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.cluster import EmulatedNode, NodeSeconds
from bench.sim.simulator.decoding import Work
from bench.sim.simulator.ledger import Ledger
from bench.sim.simulator.simulation import Setting, simulate
from bench.sim.workloads import Workload, load_workloads
from tests.lib.bench_sim.support import AGENTIC, LENT, SINGLE, setting

WORKLOADS = (SINGLE, AGENTIC)
HOLDING_UP = replace(AGENTIC, groups_per_step=8, max_staleness=1)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
@pytest.mark.parametrize("mode", MODES)
def test_what_holds_in_every_mode(mode: str, workload: Workload) -> None:
    """Deterministic, no second unaccounted for, and nothing trained that is too old."""
    run = setting(mode, workload)
    result = simulate(run)
    assert simulate(run) == result
    bins = result.node_seconds
    assert bins.total == pytest.approx(run.split.nodes * result.seconds, abs=1e-6)
    assert all(getattr(bins, name) >= 0 for name in NodeSeconds.__slots__)
    assert max(result.staleness) <= run.most_behind
    assert len(result.staleness) == run.steps * workload.groups_per_step
    assert result.rollouts == run.steps * workload.rollouts_per_step
    assert sorted(result.step_ends) == list(result.step_ends)


def test_every_token_is_sampled_once_however_often_nodes_are_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each server goes on where the last one stopped."""
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    sample = EmulatedNode.sample

    async def recorded(node: EmulatedNode, work: Work) -> bool:
        begin = work.sampled
        whole = await sample(node, work)
        parts[work.rollout, work.context].append((begin, work.sampled, work.tokens))
        assert whole == (work.sampled == work.tokens)
        return whole

    monkeypatch.setattr(EmulatedNode, "sample", recorded)
    for workload in WORKLOADS:
        simulate(replace(setting(workload=workload), split=LENT, lending="always"))
        assert any(len(turn) > 1 for turn in parts.values())
        for turn in parts.values():
            begins, ends = [part[0] for part in turn], [part[1] for part in turn]
            assert begins == [0, *ends[:-1]]
            assert ends[-1] <= turn[0][2]
        parts.clear()


def test_training_nodes_are_lent_and_come_back() -> None:
    """Each of them trains and generates in turns, with a switch in between."""
    run = setting(workload=SINGLE.scaled(4.0))
    result = simulate(replace(run, split=LENT, lending="always"))
    for node, stretches in result.stretches.items():
        doing = [name for name, _ in groupby(name for _, name in stretches if name != "idle")]
        if node.startswith("rollout"):
            assert doing == ["generation"]
            continue
        assert doing.count("generation") > 1
        assert doing.count("training") > 1
        assert all("switching" in pair for pair in pairwise(doing))


def test_training_nodes_that_are_never_lent_only_train() -> None:
    """Negative control: the same nodes, another policy."""
    result = simulate(replace(setting(), split=LENT, lending="never"))
    for node, stretches in result.stretches.items():
        began = min(at for at, name in stretches if name in ("generation", "training"))
        doing = {name for at, name in stretches if at >= began and at > 0}
        assert node.startswith("rollout") or "generation" not in doing


def test_without_put_off_publishes_work_grows_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the staleness bound."""
    run = replace(setting(workload=HOLDING_UP), steps=12, lending="always")
    bounded = simulate(run)
    assert max(bounded.staleness) <= 1
    monkeypatch.setattr(Ledger, "may_publish", lambda *_: True)
    assert max(simulate(run).staleness) > 1


def generation_seconds(lengths: Sequence[int], prompt_tokens: int, costs: EngineCosts) -> float:
    """Seconds until a node has sampled sequences of `lengths` that all begin at the same time.

    All have a slot. Between two ends the number of sequences c is constant, so with the lengths in
    ascending order l_1 <= ... <= l_n, l_0 = 0, it is

        n p / f + sum over i of (l_i - l_(i-1)) (T(c_i) + k c_i (p + (l_i + l_(i-1)) / 2)),

    c_i = n - i + 1, with p prompt tokens each, f prefilled tokens per second, T(c) seconds of a
    decode step, and k seconds for each cached token read.
    """
    seconds = len(lengths) * prompt_tokens / costs.prefill_tokens_per_second
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        running = len(lengths) - ended
        cached = running * (prompt_tokens + (length + before) / 2)
        seconds += (length - before) * costs.step_seconds(running, cached)
        before = length
    return seconds


@pytest.mark.parametrize("name", ["single_turn_8k", "single_turn_20k"])
def test_colocated_generation_takes_what_the_formula_says(name: str) -> None:
    """Honest baseline: within 2 % of a closed form that knows nothing of the simulator."""
    workload, costs = replace(load_workloads()[name], groups_per_step=16), load_costs()
    result = simulate(
        Setting(
            mode=MODES["colocated-sync"],
            workload=workload,
            split=Split(rollout=0, train=0, both=2),
            costs=costs,
            warm_up=1,
            steps=1,
            keep_turns=True,
        )
    )
    first = [turn for turn in result.turns if turn.begun == 0]
    lengths: dict[str, list[int]] = defaultdict(list)
    for turn in first:
        lengths[turn.node_id].append(turn.output_tokens)
    assert len(first) == workload.rollouts_per_step
    expected = max(
        generation_seconds(of_node, workload.prompt_tokens, costs.engine)
        for of_node in lengths.values()
    )
    assert max(turn.ended for turn in first) == pytest.approx(expected, rel=0.02)


def test_several_gateways_share_a_large_cluster() -> None:
    """Each has a part of the nodes of every kind, and they do as well as one."""
    small = replace(setting(), split=Split(rollout=4, train=0, both=4))
    large = replace(
        small,
        split=Split(rollout=32, train=0, both=32),
        workload=replace(SINGLE, groups_per_step=8 * SINGLE.groups_per_step),
    )
    one, several = (simulate(run).rollouts_per_second / run.split.nodes for run in (small, large))
    assert several == pytest.approx(one, rel=0.15)
