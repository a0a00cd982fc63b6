"""SearchRollouts: rollouts of a run by what is known of them without their turns."""

from __future__ import annotations

import math

from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import invalid_argument
from services.chassis.rpc import fields
from trajectory_manager.api import conversion, validation
from trajectory_manager.model.records import RolloutSummary, SlotName
from trajectory_manager.service.rollout_index import Found, RolloutSearch
from trajectory_manager.store.redis.connect import Store

_MAX_NAMES = 1000


class SearchRolloutsHandler:
    def __init__(self, store: Store, *, keeps_rows: bool) -> None:
        self._inspection = store.inspection
        self._searching = RolloutSearch(store, keeps_rows=keeps_rows)

    async def search(self, request: pb.SearchRolloutsRequest) -> pb.SearchRolloutsResponse:
        """A page of the rollouts that are wanted.

        Raises:
            ServiceError: INVALID_ARGUMENT; NOT_FOUND (run).
        """
        found = await self._found(validation.run_name(request.run_id), request)
        return pb.SearchRolloutsResponse(
            rollouts=map(_message, found.summaries),
            next_page_token=str(found.next_start) if found.next_start else "",
            num_searched=found.num_searched,
            num_started=found.num_started,
            num_unindexed=found.num_unindexed,
        )

    async def _found(self, run_id: str, request: pb.SearchRolloutsRequest) -> Found:
        _check(request)
        start, limit = validation.page(request.page_size, request.page_token)
        names = await self._named(run_id, request)
        if names is None:
            return await self._searching.newest(run_id, request, start, limit)
        found = await self._searching.among(run_id, request, names, start, limit)
        page = await self._inspection.newest(run_id, 0, 1)
        found.num_started, found.num_unindexed = page.num_started, page.num_unindexed
        return found

    async def _named(self, run_id: str, request: pb.SearchRolloutsRequest) -> list[str] | None:
        """The rollouts that are in every list of names that is asked for; None: there is none."""
        lists = list[list[str]]()
        if request.rollout_ids:
            validation.bounded("rollout_ids", len(request.rollout_ids), _MAX_NAMES)
            lists.append([validation.name("rollout_ids", name) for name in request.rollout_ids])
        if request.group_id:
            group_id = validation.name("group_id", request.group_id)
            lists.append(await self._inspection.of_group(run_id, group_id))
        if fields.not_negative("step", request.step):
            lists.append(await self._inspection.of_step(run_id, request.step))
        if not lists:
            return None
        first, *others = lists
        return [name for name in first if all(name in other for other in map(set, others))]


def _check(request: pb.SearchRolloutsRequest) -> None:
    for field in ("min_reward", "max_reward"):
        if request.HasField(field) and math.isnan(value := getattr(request, field)):
            raise invalid_argument(field, value, "a number")
    for name in ("min_tokens", "max_tokens", "min_turns", "max_turns"):
        fields.not_negative(name, getattr(request, name))


def _message(found: RolloutSummary) -> trajectory_pb2.RolloutSummary:
    slot = SlotName.parse(found.rollout_id) if found.in_group else None
    has_versions = found.max_weight_version >= 0
    return fields.message_of(
        trajectory_pb2.RolloutSummary,
        found,
        group_id=slot.task_id if slot else "",
        min_weight_version=found.min_weight_version if has_versions else None,
        max_weight_version=found.max_weight_version if has_versions else None,
        create_time=conversion.timestamp(found.create_time),
        finish_time=conversion.timestamp(found.finish_time) if found.finish_time else None,
    )
