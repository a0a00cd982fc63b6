# ruff: noqa: N802 -- rpcs are named as the contract names them
"""RunService: creates, ends and deletes runs."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from bisect import bisect_right
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.durations import to_duration, to_timestamp
from seamflow.trajectory.v1 import run_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2_grpc as pb_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import (
    Reason,
    ServiceError,
    already_exists,
    failed_precondition,
    invalid_argument,
)
from services.chassis.rpc import fields
from trajectory_manager.api import validation
from trajectory_manager.model.records import Durability, ReplayStrategy, StalenessPolicy
from trajectory_manager.model.runs import Replay, Run, RunConfig
from trajectory_manager.store.redis.connect import Store

_MAX_GROUP_SIZE = 4096
_MAX_LEASE_SECONDS = 86_400
FIELDS = {"lease_seconds": "lease_duration", "publish_wait_seconds": "max_publish_wait"}
"""Fields of `RunConfig` that the contract names otherwise."""


def parse_config(message: trajectory_pb2.RunConfig, store: Durability) -> RunConfig:
    """The validated rules of a run on a store of this durability.

    Raises:
        ServiceError: INVALID_ARGUMENT; FAILED_PRECONDITION, the store gives less.
    """
    config = _config_of(message)
    _check(config)
    if config.durability > store:
        raise failed_precondition(
            Reason.UNSUPPORTED,
            f"durability {config.durability.name} is more than this store gives ({store.name}): "
            "start the trajectory manager with durability = "
            f'"{config.durability.name.lower()}" on a store that gives it',
        )
    return config


def config_message(config: RunConfig) -> trajectory_pb2.RunConfig:
    replay = config.replay
    return fields.message_of(
        trajectory_pb2.RunConfig,
        config,
        lease_duration=to_duration(config.lease_seconds),
        max_publish_wait=_optional_duration(config.publish_wait_seconds),
        replay=None if replay is None else fields.message_of(trajectory_pb2.ReplayConfig, replay),
        labels=dict(config.labels),
    )


def _optional_duration(seconds: float) -> Duration | None:
    return to_duration(seconds) if seconds else None


def _config_of(message: trajectory_pb2.RunConfig) -> RunConfig:
    policy, durability = message.staleness_policy, message.durability
    wait = validation.seconds("config.max_publish_wait", message.max_publish_wait)
    if policy not in trajectory_pb2.StalenessPolicy.values()[1:]:
        raise invalid_argument("config.staleness_policy", policy, "DROP, WAIT, MASK or WITHHOLD")
    if durability not in trajectory_pb2.Durability.values()[1:]:
        raise invalid_argument("config.durability", durability, "FAST, DURABLE or REPLICATED")
    return fields.record_of(
        RunConfig,
        message,
        staleness_policy=StalenessPolicy(policy),
        lease_seconds=validation.seconds("config.lease_duration", message.lease_duration),
        durability=Durability(durability),
        publish_wait_seconds=wait,
        replay=_replay(message.replay),
        reward_name=validation.optional_name("config.reward_name", message.reward_name),
        labels=validation.labels("config.labels", message.labels),
    )


def _replay(message: trajectory_pb2.ReplayConfig) -> Replay | None:
    if not message.strategy:
        return None
    if int(message.strategy) not in set(ReplayStrategy):
        raise invalid_argument("config.replay.strategy", message.strategy, "RECENCY or REWARD")
    return fields.record_of(Replay, message, strategy=ReplayStrategy(message.strategy))


def _check(config: RunConfig) -> None:
    size = validation.bounded("config.group_size", config.group_size, _MAX_GROUP_SIZE)
    fields.positive("config.group_size", size)
    fields.positive("config.groups_per_step", config.groups_per_step)
    fields.not_negative("config.max_staleness", config.max_staleness)
    validation.text("config.zero_variance_reward", config.zero_variance_reward)
    if not 0 < config.lease_seconds <= _MAX_LEASE_SECONDS:
        cure = f"more than 0 s, at most {_MAX_LEASE_SECONDS} s"
        raise invalid_argument("config.lease_duration", config.lease_seconds, cure)
    _check_bounds(config)
    _check_columns(config.required_columns)
    if config.replay is not None:
        _check_replay(config.replay)


def _check_bounds(config: RunConfig) -> None:
    validation.bounded("config.num_extra_samples", config.num_extra_samples, _MAX_GROUP_SIZE)
    for field in ("max_deliveries", "max_stored_tokens", "retention_steps"):
        fields.not_negative(f"config.{field}", getattr(config, field))
    if config.fifo_window != 0 and config.fifo_window < config.groups_per_step:
        cure = f"0 (off), or at least groups_per_step, which is {config.groups_per_step}"
        raise invalid_argument("config.fifo_window", config.fifo_window, cure)
    waits = config.staleness_policy is StalenessPolicy.WAIT
    if (config.publish_wait_seconds > 0) != waits:
        cure = "more than 0 s with staleness_policy WAIT, and absent without"
        raise invalid_argument("config.max_publish_wait", config.publish_wait_seconds, cure)


def _check_columns(columns: tuple[str, ...]) -> None:
    for column in columns:
        validation.column("config.required_columns", column)
    if len(set(columns)) < len(columns):
        raise invalid_argument("config.required_columns", columns, "each one once")


def _check_replay(replay: Replay) -> None:
    fields.positive("config.replay.groups_per_step", replay.groups_per_step)
    if replay.capacity_groups < replay.groups_per_step:
        cure = f"at least groups_per_step, which is {replay.groups_per_step}"
        raise invalid_argument("config.replay.capacity_groups", replay.capacity_groups, cure)
    if replay.strategy is ReplayStrategy.REWARD:
        validation.name("config.replay.reward_name", replay.reward_name)
        if not (math.isfinite(replay.temperature) and replay.temperature > 0):
            raise invalid_argument("config.replay.temperature", replay.temperature, "more than 0")


class RunServicer(pb_grpc.RunServiceServicer):
    def __init__(self, store: Store) -> None:
        self._store = store

    async def CreateRun(
        self, request: pb.CreateRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CreateRunResponse:
        run_id = validation.run_name(request.run_id)
        config = parse_config(request.config, self._store.durability)
        existing = await self._store.runs.create_run(run_id, config)
        if existing is not None and existing != config:
            raise already_exists("run", f"{run_id}, with other {_differences(existing, config)}")
        return pb.CreateRunResponse(created=existing is None)

    async def GetRun(
        self, request: pb.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetRunResponse:
        run = await self._store.runs.run(validation.run_name(request.run_id))
        return pb.GetRunResponse(run=_message(run))

    async def ListRuns(
        self, request: pb.ListRunsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRunsResponse:
        limit = validation.page_size(request.page_size)
        after = validation.run_name(request.page_token) if request.page_token else ""
        names = sorted(await self._store.runs.run_ids())
        page = names[bisect_right(names, after) :][: limit + 1]
        found = await asyncio.gather(*map(self._read, page[:limit]))
        return pb.ListRunsResponse(
            runs=[_message(run) for run in found if run is not None],
            next_page_token=page[limit - 1] if len(page) > limit else "",
        )

    async def _read(self, run_id: str) -> Run | None:
        """The run; None if it was deleted meanwhile."""
        try:
            return await self._store.runs.run(run_id)
        except ServiceError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            return None

    async def EndRun(
        self, request: pb.EndRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EndRunResponse:
        await self._store.runs.end_run(validation.run_name(request.run_id))
        return pb.EndRunResponse()

    async def DeleteRun(
        self, request: pb.DeleteRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DeleteRunResponse:
        num_rollouts = await self._store.runs.delete_run(validation.run_name(request.run_id))
        return pb.DeleteRunResponse(num_rollouts=num_rollouts)


def _message(run: Run) -> trajectory_pb2.Run:
    has_ended = run.end_time > 0
    running, ended = trajectory_pb2.RUN_STATE_RUNNING, trajectory_pb2.RUN_STATE_ENDED
    return trajectory_pb2.Run(
        run_id=run.run_id,
        config=config_message(run.config),
        state=ended if has_ended else running,
        create_time=to_timestamp(run.create_time),
        end_time=to_timestamp(run.end_time) if has_ended else None,
        committed_step=run.committed_step,
    )


def _differences(existing: RunConfig, given: RunConfig) -> str:
    """The fields in which two configs differ, with both values."""
    pairs = (
        (f.name, getattr(existing, f.name), getattr(given, f.name))
        for f in dataclasses.fields(RunConfig)
    )
    return ", ".join(
        f"{FIELDS.get(name, name)} (is {old}, given {new})"
        for name, old, new in pairs
        if old != new
    )
