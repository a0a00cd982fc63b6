"""What waits for an evaluation, and how the evaluations of a run went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seamflow.evaluator.v1 import evaluator_service_pb2 as pb
from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.snapshot import Snapshot

_STATES: Mapping[int, str] = {
    pb.EVALUATOR_STATE_BEFORE_TRAINING: "before training",
    pb.EVALUATOR_STATE_BESIDE_TRAINING: "beside training",
    pb.EVALUATOR_STATE_AFTER_TRAINING: "after training",
    pb.EVALUATOR_STATE_FINISHED: "finished",
}


def waits_for_evaluation(snapshot: Snapshot) -> bool:
    """Whether tasks are held back until the first weights are evaluated."""
    return _is(snapshot, pb.EVALUATOR_STATE_BEFORE_TRAINING)


def first_evaluation(snapshot: Snapshot) -> Iterator[Finding]:
    """Training has not begun, as the first weights are evaluated."""
    if waits_for_evaluation(snapshot):
        yield Finding(
            rule="first_evaluation",
            sentence=f"Training waits for the evaluation of the first weights: {_done(snapshot)}.",
            cure="Agents run its rollouts; if their number does not grow, see the log of the "
            "agents and that of the evaluator.",
            since=snapshot.started,
            normal=True,
        )


def last_evaluation(snapshot: Snapshot) -> Iterator[Finding]:
    """Training is over, and its last weights are evaluated."""
    if _is(snapshot, pb.EVALUATOR_STATE_AFTER_TRAINING):
        yield Finding(
            rule="last_evaluation",
            sentence=f"Training is over; its last weights are evaluated: {_done(snapshot)}.",
            cure="Agents run its rollouts; the run ends after it.",
            normal=True,
        )


def evaluation_lines(snapshot: Snapshot) -> Iterator[str]:
    """State, the newest result and the best one, for people."""
    said = snapshot.evaluations
    if said is None:
        return
    running = f", {_done(snapshot)}" if said.num_rollouts else ""
    yield f"{_STATES.get(said.state, 'unknown')}{running}; {len(said.evaluations)} evaluations"
    results = [line for line in said.evaluations if line.HasField("mean")]
    if results:
        best = f"; best {_result(said.best)}" if said.HasField("best") else ""
        yield f"newest {_result(results[-1])}{best}"
    if said.best.checkpoint:
        yield f"best checkpoint {said.best.checkpoint}"
    if said.stopped_early:
        yield f"training ended early: {said.stopped_early}"


def _result(line: Any) -> str:
    return f"{line.metric} {line.mean:.3f} at step {line.step}"


def _is(snapshot: Snapshot, state: int) -> bool:
    return snapshot.evaluations is not None and snapshot.evaluations.state == state


def _done(snapshot: Snapshot) -> str:
    said = snapshot.evaluations
    assert said is not None
    if not said.num_rollouts:
        return "no rollout has begun"
    return f"{said.num_done} of {said.num_rollouts} rollouts are done"
