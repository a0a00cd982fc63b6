"""Engines are killed in mid-turn, again and again; turns end elsewhere, training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from seamflow.trajectory.v1 import trajectory_pb2

from bench.report import Report
from services.launcher.report.summary import Audit, TrajectoryFigures, audit, read_token_log
from tests.lib.sglang.engines import ChecksumWatch
from tests.lib.sglang.leases import half_segments
from tests.lib.sglang.logprobs import Recomputed, recompute, sampled_spans
from tests.lib.sglang.quickstart import Quickstart, stored_trajectories
from tests.lib.sglang.strikes import Strike, Strikes
from tests.lib.sglang.turns import stale_chunks, turns_before, unfinished, was_moved

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(5400)]

NODES = ("node-a", "node-b")
KILLS = 20
SEED = 0
# Nothing becomes too old to be trained, so no rollout has a reason to fail.
RULES = (
    *("--agent", "tests.system.sglang.long_turns:LongTurns", "--concurrency", "16"),
    *("--group-size", "4", "--groups-per-step", "4", "--max-staleness", "1000"),
)


async def test_a_killed_engine_costs_no_token_and_no_turn(
    quickstart: Callable[..., Quickstart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn ends, only whole turns are trained, and an engine comes back with new weights."""
    monkeypatch.setenv("SEAMFLOW_TRAINER_NUM_STEPS", "100000")  # it ends with the last kill
    run = quickstart("kills", *RULES)
    run = replace(run, config=run.config.replace(heldout_tasks=None))
    strikes, watch = Strikes(run, NODES, KILLS, Random(SEED)), ChecksumWatch(run)
    async with watch.watching(NODES):
        await run.train_beside(strikes.strike_all)
    found = examine(run, strikes.done, await stored_trajectories(run))
    assert found.turns_moved >= KILLS / 2, "hardly any kill fell into the middle of a turn"
    assert not found.open_turns
    assert found.rollouts_failed == 0
    assert found.num_leased > 0
    assert not found.halves
    assert not found.stale
    assert not watch.wrong
    for strike in strikes.done[:-1]:  # the last one to come back may not be asked before the end
        assert max(watch.checked[strike.node], default=0) >= strike.newest_version > 0
    tokens = found.tokens
    assert tokens.num_lost == tokens.num_duplicated == tokens.num_wrong_version == 0
    assert found.recomputed.max_difference <= 1e-4, found.recomputed.worst
    seconds = sorted(strike.seconds for strike in strikes.done)
    figures = {
        **figures_of(strikes.done, found),
        "tensors_unlike_published": len(watch.wrong),
        "restart_seconds_p50": seconds[len(seconds) // 2],
    }
    report = Report(bench="sglang_kills", figures=figures, raw={"restart_s": seconds}, seeds=[SEED])
    report.publish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the kills did to turns, samples and tokens."""

    turns_moved: int
    """Turns that two servers sampled."""
    open_turns: set[tuple[str, str]]
    """Turns begun before the last kill that never ended."""
    rollouts_failed: int
    """For another reason than their agent."""
    num_leased: int
    """Samples the trainer has had."""
    halves: list[str]
    """Leased samples that are not made of whole turns."""
    stale: list[str]
    """Chunks of restarted engines under weights that were too old."""
    tokens: Audit
    """The agents' log beside the store."""
    recomputed: Recomputed
    """Log-probs of all spans."""


def examine(
    run: Quickstart, strikes: Sequence[Strike], stored: Sequence[trajectory_pb2.Trajectory]
) -> Found:
    """Hold the agents' log, the trainer's leases and the store against each other."""
    received = read_token_log(run.token_log)
    num_leased, halves = half_segments(run.leased, received, stored)
    counts = TrajectoryFigures()
    for trajectory in stored:
        counts.add(trajectory)
    return Found(
        turns_moved=sum(map(was_moved, stored)),
        open_turns=unfinished(turns_before(run.token_log, strikes[-1].log_struck), stored),
        rollouts_failed=counts.infrastructure_failures,
        num_leased=num_leased,
        halves=halves,
        stale=[line for strike in strikes for line in stale_chunks(run.token_log, strike)],
        tokens=audit(received, stored),
        recomputed=recompute(sampled_spans(stored), run.weights),
    )


def figures_of(strikes: Sequence[Strike], found: Found) -> Mapping[str, float]:
    """The same as numbers."""
    return {
        "engine_kills": len(strikes),
        "of_these_scheduler_only": sum(strike.victim == "scheduler" for strike in strikes),
        "turns_moved": found.turns_moved,
        "turns_unfinished": len(found.open_turns),
        "rollouts_failed": found.rollouts_failed,
        "samples_leased": found.num_leased,
        "half_segments_leased": len(found.halves),
        "tokens_received": found.tokens.num_received,
        "tokens_lost": found.tokens.num_lost,
        "tokens_duplicated": found.tokens.num_duplicated,
        "stale_chunks_after_restart": len(found.stale),
        "logprob_max_difference": found.recomputed.max_difference,
    }
