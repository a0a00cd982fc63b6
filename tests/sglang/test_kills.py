"""Engines are killed in mid-turn, again and again; turns end elsewhere, training goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from bench.report import Report
from services.launcher.audit import audit, read_token_log
from services.launcher.summary import TrajectoryFigures
from tests.sglang.engines import ChecksumWatch
from tests.sglang.leases import half_segments
from tests.sglang.logprobs import recompute, sampled_spans
from tests.sglang.quickstart import Quickstart, stored_trajectories
from tests.sglang.strikes import Strike, Strikes

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]

NODES = ("node-a", "node-b")
KILLS = 20
SEED = 0
# Nothing becomes too old to be trained, so no rollout has a reason to fail.
RULES = (
    *("--agent", "tests.sglang.long_turns:LongTurns", "--concurrency", "16"),
    *("--group-size", "4", "--groups-per-step", "4", "--max-staleness", "1000"),
)


async def test_a_killed_engine_costs_no_token_and_no_turn(
    quickstart: Callable[..., Quickstart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn ends, only whole turns are trained, and an engine comes back with new weights."""
    monkeypatch.setenv("SEAMFLOW_TRAINER_NUM_STEPS", "100000")  # it ends with the last kill
    run = quickstart("kills", *RULES)
    run = replace(run, config=replace(run.config, heldout_tasks=None))
    strikes, watch = Strikes(run, NODES, KILLS, Random(SEED)), ChecksumWatch(run)
    watching = [asyncio.create_task(watch.watch(node)) for node in NODES]
    await run.train_beside(strikes.strike_all)
    for task in watching:
        task.cancel()
    stored = await stored_trajectories(run)
    received = read_token_log(run.token_log)
    checked = audit(received, stored)
    num_leased, halves = half_segments(run.leased, received, stored)
    recomputed = recompute(sampled_spans(stored), run.weights)
    open_turns = unfinished(turns_before(run, strikes.done[-1].log_size), stored)
    stale = [line for strike in strikes.done for line in stale_chunks(run, strike)]
    counts = TrajectoryFigures()
    for trajectory in stored:
        counts.add(trajectory)
    seconds = sorted(strike.seconds for strike in strikes.done)
    figures = {
        "engine_kills": len(strikes.done),
        "of_these_scheduler_only": sum(s.victim == "scheduler" for s in strikes.done),
        "turns_moved": sum(map(was_moved, stored)),
        "turns_unfinished": len(open_turns),
        "rollouts_failed": counts.infrastructure_failures,
        "samples_leased": num_leased,
        "half_segments_leased": len(halves),
        "tokens_received": checked.num_received,
        "tokens_lost": checked.num_lost,
        "tokens_duplicated": checked.num_duplicated,
        "stale_chunks_after_restart": len(stale),
        "tensors_unlike_published": len(watch.wrong),
        "logprob_max_difference": recomputed.max_difference,
        "restart_seconds_p50": seconds[len(seconds) // 2],
    }
    Report(
        bench="sglang_kills", figures=figures, raw={"restart_s": seconds}, seeds=[SEED]
    ).publish()
    assert figures["turns_moved"] >= KILLS / 2, "hardly any kill fell into the middle of a turn"
    assert not open_turns
    assert counts.infrastructure_failures == 0
    assert not halves
    assert not stale
    assert not watch.wrong
    assert checked.num_lost == checked.num_duplicated == checked.num_wrong_version == 0
    assert recomputed.max_difference <= 1e-4, recomputed.worst


def was_moved(trajectory: trajectory_pb2.Trajectory) -> int:
    """Turns that two servers sampled."""
    return sum(
        len({span.server_id for span in turn.tokens.spans if span.server_id}) > 1
        for turn in trajectory.turns
    )


def turns_before(run: Quickstart, log_size: int) -> set[tuple[str, str]]:
    """Turns of which agents had received tokens by then."""
    lines = run.token_log.read_bytes()[:log_size].splitlines()
    return {(line["rollout_id"], line["turn_id"]) for line in map(json.loads, lines)}


def unfinished(
    turns: set[tuple[str, str]], stored: Iterable[trajectory_pb2.Trajectory]
) -> set[tuple[str, str]]:
    """Those that did not end by a stop token or at their limit."""
    ended = {
        (trajectory.rollout_id, turn.turn_id)
        for trajectory in stored
        for turn in trajectory.turns
        if turn.finish_reason in (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)
    }
    return turns - ended


def stale_chunks(run: Quickstart, strike: Strike) -> list[str]:
    """What a restarted engine sampled under weights older than those published before its end."""
    lines = run.token_log.read_bytes()[strike.log_size :].splitlines()
    return [
        f"{strike.node}: {version} instead of {strike.newest_version}"
        for line in map(json.loads, lines)
        for _, _, version, server in line["spans"]
        if server == strike.node and version < strike.newest_version
    ]
