"""RecordGroups: whole groups that were generated elsewhere, such as an exported run.

Admit (all or none) -> store each rollout -> settle it, as if an agent had just finished it. Each
step is idempotent by task_id, so a caller that lost the response retries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import invalid_argument
from services.chassis.rpc.request_budget import RequestBudget
from services.lib.bounds import MIN_TEMPERATURE
from trajectory_manager.api import conversion, validation
from trajectory_manager.model import sampling
from trajectory_manager.model.records import Outcome, Purpose, Rollout, SlotName, Task
from trajectory_manager.model.runs import RunConfig
from trajectory_manager.model.tokens import Turn
from trajectory_manager.service import rollouts
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.errors import cold_training
from trajectory_manager.store.redis.connect import Store

_MAX_GROUPS = 1024
_ENDS = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)


class RecordGroupsHandler:
    def __init__(
        self, store: Store, rollouts: Rollouts, inflight: RequestBudget, max_turn_tokens: int
    ) -> None:
        """`inflight` bounds the bytes in flight, `max_turn_tokens` the tokens one turn adds."""
        self._store = store
        self._rollouts = rollouts
        self._inflight = inflight
        self._max_turn_tokens = max_turn_tokens

    async def record(self, request: pb.RecordGroupsRequest) -> pb.RecordGroupsResponse:
        """Record the groups of `request`; return how many were new and how many more are admitted.

        Raises:
            ServiceError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED with a retry time, ALREADY_EXISTS.
        """
        run_id = validation.run_name(request.run_id)
        config = await self._store.runs.config(run_id)
        validation.bounded("groups", len(request.groups), _MAX_GROUPS)
        tasks = [_task(f"groups[{i}]", group) for i, group in enumerate(request.groups)]
        recorded = [
            rollout
            for index, (task, group) in enumerate(zip(tasks, request.groups, strict=True))
            for rollout in self._rollouts_of(run_id, config, task, index, group)
        ]
        with self._inflight.reserve(
            sum(turn.tokens.num_bytes for _, turns in recorded for turn in turns)
        ):
            admitted = await self._store.runs.admit_recorded(run_id, tasks)
            await self._rollouts.record(run_id, recorded)
        return pb.RecordGroupsResponse(
            num_recorded=admitted.num_accepted, num_free=admitted.num_free
        )

    def _rollouts_of(
        self, run_id: str, config: RunConfig, task: Task, index: int, group: pb.RecordedGroup
    ) -> Iterator[tuple[Rollout, tuple[Turn, ...]]]:
        for slot, message in enumerate(group.rollouts):
            field = f"groups[{index}].rollouts[{slot}]"
            turns = tuple(self._turns(field, message))
            rollout = _rollout(run_id, SlotName(task.task_id, slot, 1), field, message)
            _check_outcome(rollout.outcome, config, f"{field}.rewards", turns)
            yield rollout, turns

    def _turns(self, field: str, message: pb.RecordedRollout) -> Iterator[Turn]:
        lengths: dict[str, int] = {}
        for i, turn in enumerate(message.turns):
            record = _turn(f"{field}.turns[{i}]", turn)
            before, prefix = record.prefix_turn_id, record.prefix_length
            if record.turn_id in lengths:
                cure = "each name once in a rollout"
                raise invalid_argument(f"{field}.turns[{i}].turn_id", record.turn_id, cure)
            if not 0 <= prefix <= lengths.get(before, 0):
                cure = f"at most the tokens of turn {before!r} before it, {lengths.get(before, 0)}"
                raise invalid_argument(f"{field}.turns[{i}].prefix_length", prefix, cure)
            lengths[record.turn_id] = prefix + record.tokens.num_tokens
            if record.tokens.num_tokens > self._max_turn_tokens:
                cure = f"at most {self._max_turn_tokens} tokens (max_turn_tokens)"
                given = record.tokens.num_tokens
                raise invalid_argument(f"{field}.turns[{i}].tokens", given, cure)
            yield record


def _task(field: str, group: pb.RecordedGroup) -> Task:
    if not group.rollouts:
        raise invalid_argument(f"{field}.rollouts", [], "at least one rollout")
    return Task(
        task_id=validation.name(f"{field}.task_id", group.task_id),
        payload_json=validation.json_object(f"{field}.payload_json", group.payload_json),
        num_samples=len(group.rollouts),
        purpose=Purpose.TRAIN,
    )


def _check_outcome(outcome: Outcome, config: RunConfig, field: str, turns: Sequence[Turn]) -> None:
    names = {turn.turn_id for turn in turns}
    error = rollouts.missing_reward(outcome, config.reward_name, field)
    if error := error or rollouts.unknown_turn(outcome, names, field):
        raise error


def _rollout(run_id: str, name: SlotName, field: str, message: pb.RecordedRollout) -> Rollout:
    outcome = conversion.rewards_from(f"{field}.rewards", message.rewards)
    return Rollout(
        run_id=run_id,
        rollout_id=str(name),
        purpose=Purpose.TRAIN,
        group_id=name.task_id,
        traceparent=validation.text("traceparent", message.traceparent),
        state=outcome.state,
        outcome=outcome,
    )


def _turn(field: str, message: trajectory_pb2.Turn) -> Turn:
    if message.finish_reason not in _ENDS:
        raise invalid_argument(f"{field}.finish_reason", message.finish_reason, "STOP or LENGTH")
    tokens = conversion.tokens_from(f"{field}.tokens", message.tokens)
    params = sampling.stored(f"{field}.sampling", message.sampling)
    if (temperature := sampling.temperature(params)) < MIN_TEMPERATURE:
        raise cold_training(f"{field}.sampling.temperature", temperature)
    return Turn(
        turn_id=validation.name(f"{field}.turn_id", message.turn_id),
        attempt_id="-",
        prompt_digest=hashlib.sha256(tokens.ids).hexdigest(),
        prefix_turn_id=validation.optional_name(f"{field}.prefix_turn_id", message.prefix_turn_id),
        prefix_length=message.prefix_length,
        sampling=params,
        finish_reason=message.finish_reason,
        tokens=tokens,
    )
