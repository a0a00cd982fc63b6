"""The real services on emulated GPUs: a whole small run, and what its parts must get right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim.comparison import Row
from bench.sim.costs import load_costs
from bench.sim.emulation import emulated_comparison
from bench.sim.emulation.emulated_comparison import Pair, kept
from bench.sim.emulation.engine import EmulatedEngine
from bench.sim.emulation.prompts import ANSWER, Emulation, prompt, recorded, work
from bench.sim.emulation.rig import emulate
from bench.sim.simulator.cluster import NodeSeconds
from bench.sim.simulator.simulation import Setting, simulate
from rollout.server.engines.engine import Chunk, EngineRequest, FinishReason, PauseMode
from tests.lib.bench_sim.support import setting

EMULATION = Emulation(speed=1000.0, thinning=16)


@given(
    rollout=st.integers(0, 128**4 - 1),
    output=st.integers(1, 30_000),
    new=st.integers(1, 5_000),
    sampled=st.integers(0, 500),
)
def test_an_engine_reads_what_an_agent_says(
    rollout: int, output: int, new: int, sampled: int
) -> None:
    """The rollout, the length of the answer, and how much of it is there already."""
    sampled = min(sampled, recorded(output, 16) - 1)
    asked = work([*prompt(new, rollout, output, 16), *[ANSWER] * sampled], 16)
    assert (asked.rollout, asked.sampled) == (rollout, 16 * sampled)
    assert 0 <= asked.tokens - output < 16
    assert (asked.fresh == 0) is (sampled > 0), "what was sampled from was prefilled before"


async def test_an_engine_goes_on_from_a_prefix_after_an_interruption() -> None:
    """Together both parts are the whole answer."""
    engine = EmulatedEngine(load_costs(), EMULATION, max_running=4)

    async def generated(token_ids: list[int]) -> list[Chunk]:
        request = EngineRequest(request_id="turn", token_ids=tuple(token_ids))
        return [chunk async for chunk in engine.generate(request)]

    await engine.start()
    try:
        asked = prompt(100, 7, 64_000, 16)
        first_part = asyncio.create_task(generated(asked))
        await asyncio.sleep(0.05)  # emulated: most of a minute
        await engine.pause(PauseMode.ABORT)
        first = await first_part
        assert first[-1].finish is FinishReason.INTERRUPTED
        await engine.resume()
        have = [token for chunk in first for token in chunk.token_ids]
        rest = await generated([*asked, *have])
        assert rest[-1].finish is FinishReason.STOP
        assert 0 < len(have) < 4000
        assert len(have) + sum(len(chunk.token_ids) for chunk in rest) == 4000
    finally:
        await engine.close()


def test_a_run_is_invalid_where_the_control_plane_took_more_than_half_a_core() -> None:
    """And the deviation is that of the simulator."""
    run = setting()
    row = Row(setting=run, result=simulate(run))
    slower = replace(row.result, seconds=2 * row.result.seconds)
    known = Pair(
        simulated=row,
        emulated=Row(setting=run, result=slower),
        control_plane_cores=0.5,
        speed=2.0,
    )
    assert known.is_valid
    assert not replace(known, control_plane_cores=0.51).is_valid
    assert known.deviation == pytest.approx(1.0)


def test_a_valid_run_is_kept_and_an_invalid_one_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the whole setting: another seed is another run."""
    cores = iter([0.6, 0.5, 0.4])

    def played(asked: Setting) -> Pair:
        row = Row(setting=asked, result=simulate(asked))
        return Pair(simulated=row, emulated=row, control_plane_cores=next(cores), speed=1.0)

    monkeypatch.setattr(emulated_comparison, "pair", played)
    run = setting()
    assert not kept(tmp_path, run).is_valid
    assert kept(tmp_path, run) == kept(tmp_path, run)
    assert kept(tmp_path, run).control_plane_cores == 0.5
    assert kept(tmp_path, replace(run, seed=run.seed + 1)).control_plane_cores == 0.4


@pytest.mark.long(short="tests/system/bench/sim/test_emulation.py")
@pytest.mark.parametrize("mode", ["multiplexed", "one-step-async"])
async def test_the_real_control_plane_trains_on_emulated_nodes(mode: str) -> None:
    """Every node-second is accounted for once, and nothing is older than the bound."""
    run = replace(setting(mode), warm_up=1, steps=1)
    result = (await emulate(run, Emulation(speed=8.0, thinning=16))).result
    spent = result.node_seconds
    assert result.rollouts == run.workload.rollouts_per_step
    assert spent.total == pytest.approx(run.split.nodes * result.seconds)
    assert all(getattr(spent, name) >= -0.01 * spent.total for name in NodeSeconds.__slots__)
    assert spent.training > 0
    assert spent.generation > 0
    assert max(result.staleness) <= run.most_behind
    assert set(result.stretches) == set(simulate(run).stretches)
