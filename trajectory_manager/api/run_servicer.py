# ruff: noqa: N802 -- rpcs are named as the contract names them
"""RunService: creates, ends and deletes runs."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import fields
from typing import Any

import grpc.aio
from seamflow.trajectory.v1 import run_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2_grpc as pb_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import Reason, ServiceError, already_exists
from trajectory_manager.api import conversion, run_config, validation
from trajectory_manager.model.runs import Run, RunConfig
from trajectory_manager.store.redis.connect import Store


class RunServicer(pb_grpc.RunServiceServicer):
    """Serves runs over gRPC."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def CreateRun(
        self, request: pb.CreateRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CreateRunResponse:
        """Create a run, or check that the existing one has the same rules."""
        run_id = validation.run_name(request.run_id)
        config = run_config.parse(request.config, self._store.durability)
        existing = await self._store.runs.create_run(run_id, config)
        if existing is not None and existing != config:
            raise already_exists("run", f"{run_id}, with other {_differences(existing, config)}")
        return pb.CreateRunResponse(created=existing is None)

    async def GetRun(
        self, request: pb.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetRunResponse:
        """Read a run."""
        run = await self._store.runs.run(validation.run_name(request.run_id))
        return pb.GetRunResponse(run=_message(run))

    async def ListRuns(
        self, request: pb.ListRunsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRunsResponse:
        """A page of the runs, by name."""
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
        """End a run."""
        await self._store.runs.end_run(validation.run_name(request.run_id))
        return pb.EndRunResponse()

    async def DeleteRun(
        self, request: pb.DeleteRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DeleteRunResponse:
        """Delete an ended run and everything of it."""
        num_rollouts = await self._store.runs.delete_run(validation.run_name(request.run_id))
        return pb.DeleteRunResponse(num_rollouts=num_rollouts)


def _message(run: Run) -> trajectory_pb2.Run:
    has_ended = run.end_time > 0
    running, ended = trajectory_pb2.RUN_STATE_RUNNING, trajectory_pb2.RUN_STATE_ENDED
    return trajectory_pb2.Run(
        run_id=run.run_id,
        config=run_config.to_message(run.config),
        state=ended if has_ended else running,
        create_time=conversion.timestamp(run.create_time),
        end_time=conversion.timestamp(run.end_time) if has_ended else None,
        committed_step=run.committed_step,
    )


def _differences(existing: RunConfig, given: RunConfig) -> str:
    """The fields in which two configs differ, with both values."""
    pairs = ((f.name, getattr(existing, f.name), getattr(given, f.name)) for f in fields(RunConfig))
    return ", ".join(
        f"{run_config.FIELDS.get(name, name)} (is {old}, given {new})"
        for name, old, new in pairs
        if old != new
    )
