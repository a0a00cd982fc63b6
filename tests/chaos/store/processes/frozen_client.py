"""Holds something, is frozen, and goes on as if it still held it.

A line on stdin is a command: {"holds": "turn" | "task" | "trainer", "run_id": .., "first_id": ..}.
The first answer says what is held. The second comes once the store said no: {"refused": why,
"accepted": the monotonic times at which each accepted write was sent}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import PreconditionError
from seamflow.trajectory.v1 import sample_service_pb2, task_service_pb2, trajectory_service_pb2

from bench.harness.store_calls import packed, send
from services.lib.token_bytes import pack_ids
from tests.chaos.calls import CREDENTIAL, Caller, call_retrying, tokens_of

CHUNK = 4
_MOST_WRITES = 400
_PAUSE_SECONDS = 0.01

Call = tuple[Callable[..., Any], Any]
Held = tuple[dict[str, Any], Iterator[Call], list[Call]]
"""What is held, writes without end, and what a stale holder tries when those are refused."""


def hold_turn(caller: Caller, first_id: int) -> Held:
    """A gateway in the middle of a turn."""
    rollout_id = f"rollout-{first_id}"
    start_rollout(caller, rollout_id)
    epoch = begin(caller, rollout_id, "victim").epoch
    writes = appends(caller, rollout_id, epoch, first_id)
    return {"rollout_id": rollout_id}, writes, [ended(caller, rollout_id, epoch)]


def hold_task(caller: Caller, first_id: int) -> Held:
    """An agent and its gateway under a task lease."""
    lease = caller.lease()
    assert lease is not None, f"no task of {caller.run_id} to lease"
    rollout_id, token = lease.rollout_id, lease.lease_token
    start_rollout(caller, rollout_id, token)
    epoch = begin(caller, rollout_id, "victim").epoch
    request = task_service_pb2.ExtendTasksRequest(run_id=caller.run_id, lease_tokens=[token])

    def extend(request: Any, timeout: float) -> None:
        answer = caller.tasks.ExtendTasks(request, timeout=timeout)
        if answer.lost_lease_tokens:
            raise PreconditionError("the lease is lost", "LEASE_EXPIRED")

    after: list[Call] = [
        (extend, request),
        ended(caller, rollout_id, epoch),
        finished(caller, rollout_id),
    ]
    return {"rollout_id": rollout_id}, appends(caller, rollout_id, epoch, first_id), after


def hold_trainer(caller: Caller, first_id: int) -> Held:
    """A trainer with a step leased."""
    run_id, samples = caller.run_id, caller.samples
    reconcile = sample_service_pb2.ReconcileRequest(run_id=run_id, trainer_id=f"victim-{first_id}")
    epoch = call_retrying(samples.Reconcile, reconcile).epoch
    lease = sample_service_pb2.LeaseSamplesRequest(run_id=run_id, epoch=epoch, step=1)
    leased = call_retrying(samples.LeaseSamples, lease)
    extend = sample_service_pb2.ExtendLeaseRequest(run_id=run_id, lease_token=leased.lease_token)
    commit = sample_service_pb2.CommitStepRequest(run_id=run_id, epoch=epoch, step=1)
    following = sample_service_pb2.LeaseSamplesRequest(run_id=run_id, epoch=epoch, step=2)
    after: list[Call] = [
        (samples.CommitStep, commit),
        (samples.LeaseSamples, following),
    ]
    held = {"sample_ids": [sample.sample_id for sample in leased.samples]}
    return held, itertools.repeat((samples.ExtendLease, extend)), after


HOLDS = {"turn": hold_turn, "task": hold_task, "trainer": hold_trainer}


def start_rollout(caller: Caller, rollout_id: str, lease_token: str = "") -> None:
    """Open a rollout, EVAL unless leased."""
    request = trajectory_service_pb2.NewRollout(
        run_id=caller.run_id,
        rollout_id=rollout_id,
        lease_token=lease_token,
        purpose=tokens_pb2.PURPOSE_TRAIN if lease_token else tokens_pb2.PURPOSE_EVAL,
        credential_digest=CREDENTIAL,
    )
    call_retrying(partial(send, caller.trajectories), request)


def begin(caller: Caller, rollout_id: str, attempt_id: str) -> trajectory_service_pb2.BegunTurn:
    """Open the rollout's one turn, or take it over."""
    request = trajectory_service_pb2.NewTurn(
        run_id=caller.run_id,
        rollout_id=rollout_id,
        turn_id="turn",
        attempt_id=attempt_id,
        token_ids=pack_ids([1]),
        credential_digest=CREDENTIAL,
    )
    answer: trajectory_service_pb2.BegunTurn = call_retrying(
        partial(send, caller.trajectories), request
    )
    return answer


def appends(
    caller: Caller, rollout_id: str, epoch: int, first_id: int, offset: int = 0
) -> Iterator[Call]:
    """Chunk after chunk of one turn, from `offset` on."""
    for start in itertools.count(0, CHUNK):
        ids = range(first_id + start, first_id + start + CHUNK)
        yield (
            partial(send, caller.trajectories),
            trajectory_service_pb2.TokenAppend(
                run_id=caller.run_id,
                rollout_id=rollout_id,
                turn_id="turn",
                epoch=epoch,
                offset=offset + start,
                tokens=packed(tokens_of(ids, tokens_pb2.ORIGIN_POLICY)),
            ),
        )


def ended(caller: Caller, rollout_id: str, epoch: int) -> Call:
    """The end of the turn."""
    request = trajectory_service_pb2.TokenAppend(
        run_id=caller.run_id,
        rollout_id=rollout_id,
        turn_id="turn",
        epoch=epoch,
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
    )
    return partial(send, caller.trajectories), request


def finished(caller: Caller, rollout_id: str) -> Call:
    """The end of the rollout, with a reward."""
    request = trajectory_service_pb2.RolloutFinish(
        run_id=caller.run_id,
        rollout_id=rollout_id,
        credential_digest=CREDENTIAL,
        rewards=tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)]),
    )
    return partial(send, caller.trajectories), request


def write(caller: Caller, writes: Iterator[Call], after: list[Call]) -> dict[str, Any]:
    """Write until refused, then try what else a stale holder might do."""
    accepted, reason = [], ""
    for call, request in itertools.islice(writes, _MOST_WRITES):
        sent = time.monotonic()
        reason = caller.refusal(call, request)
        if reason:
            break
        accepted.append(sent)
        time.sleep(_PAUSE_SECONDS)
    for call, request in after:
        sent = time.monotonic()
        if not caller.refusal(call, request):
            accepted.append(sent)
    return {"refused": reason, "accepted": accepted}


def main() -> None:
    """Hold one thing after the other, as told on stdin, until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="address of the trajectory manager")
    given = parser.parse_args()
    for line in sys.stdin:
        command = json.loads(line)
        with Caller.at(given.target, command["run_id"]) as caller:
            held, writes, after = HOLDS[command["holds"]](caller, command["first_id"])
            call_retrying(*next(writes))
            print(json.dumps(held), flush=True)
            print(json.dumps(write(caller, writes, after)), flush=True)


if __name__ == "__main__":
    main()
