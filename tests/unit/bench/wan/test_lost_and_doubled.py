"""What a run across a link lost or doubled, counted from its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.wan.placed_run import FAILED
from bench.wan.train_over_link import lost_and_doubled

SUMMARY = {
    "tokens_received_by_agents": 90,
    "tokens_lost": 0,
    "tokens_with_wrong_version": 0,
    "tokens_duplicated": 0,
    "optimizer_steps": 2,
    "rollouts": 4,
    "process_restarts": 0,
    "max_staleness_seen": 2,
}
STEPS = [{"step": 1, "sample_ids": ["a", "b"]}, {"step": 2, "sample_ids": ["c", "d"]}]
GENERATE = "/seamflow.rollout.v1.RolloutService/Generate"
BAD = ("tokens_lost", "tokens_doubled", "samples_trained_twice", "steps_lost_or_doubled")


def found(
    folder: Path,
    steps: Sequence[Mapping[str, object]] = STEPS,
    codes: Sequence[str] = (),
    failed: int = 0,
    **changes: int,
) -> Mapping[str, float]:
    """The figures of a run with these records; the gateway's calls ended with these codes."""
    (folder / "logs").mkdir()
    calls = [{"msg": "call", "method": GENERATE, "code": code} for code in codes]
    log = "not JSON\n" + "".join(json.dumps(call) + "\n" for call in calls)
    (folder / "logs" / "rollout_gateway.log").write_text(log)
    (folder / FAILED).write_text(str(failed))
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    (folder / "trained_samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    return lost_and_doubled(folder)


def test_a_run_without_loss_has_none(tmp_path: Path) -> None:
    """Calls that the end of the run cancelled have not failed."""
    figures = found(tmp_path, codes=["OK", "CANCELLED"])
    assert [figures[name] for name in (*BAD, "agent_calls_failed")] == [0] * 5
    assert figures["tokens_received"] == 90


def test_what_is_lost_or_doubled_is_counted(tmp_path: Path) -> None:
    """The controls: a sample in two steps, a step that is missing, tokens, calls, rollouts."""
    steps = [*STEPS[:1], {"step": 3, "sample_ids": ["b", "c"]}]
    changes = {"tokens_with_wrong_version": 3, "tokens_duplicated": 4, "optimizer_steps": 3}
    figures = found(tmp_path, steps, ["UNAVAILABLE", "OK"], failed=5, **changes)
    assert [figures[name] for name in BAD] == [3, 4, 1, 1]
    assert figures["agent_calls_failed"] == 6
