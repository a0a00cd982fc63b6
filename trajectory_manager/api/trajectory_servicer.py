# ruff: noqa: N802 -- rpcs are named as the contract names them
"""TrajectoryService: the record of rollouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio
from seamflow.durations import to_timestamp
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_service_pb2_grpc as pb_grpc

from services.chassis.errors import invalid_argument
from services.chassis.rpc import fields
from services.chassis.rpc.request_budget import RequestBudget
from trajectory_manager.api import conversion, validation
from trajectory_manager.api.append_tokens import AppendTokensHandler
from trajectory_manager.api.begin_turns import BeginTurnsHandler
from trajectory_manager.api.record_groups import RecordGroupsHandler
from trajectory_manager.model.prefix_tree import Piece, PrefixTree
from trajectory_manager.model.records import RolloutState, RolloutSummary, SlotName
from trajectory_manager.model.tokens import Cut, Turn, cut_spans, joined
from trajectory_manager.service.rollout_index import Found, RolloutSearch
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.service.sweeper import Retention
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.connect import Store
from trajectory_manager.store.redis.token_store import TokenStore

_MAX_NAMES = 1000
_DEFAULT_WATCH_SECONDS = 0.5
_MIN_WATCH_SECONDS = 0.02
_MAX_DELETED = 1000


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
            rollouts=map(_summary_message, found.summaries),
            next_page_token=str(found.next_start) if found.next_start else "",
            num_searched=found.num_searched,
            num_started=found.num_started,
            num_unindexed=found.num_unindexed,
        )

    async def _found(self, run_id: str, request: pb.SearchRolloutsRequest) -> Found:
        _check_search(request)
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


def _check_search(request: pb.SearchRolloutsRequest) -> None:
    for field in ("min_reward", "max_reward"):
        if request.HasField(field) and math.isnan(value := getattr(request, field)):
            raise invalid_argument(field, value, "a number")
    for name in ("min_tokens", "max_tokens", "min_turns", "max_turns"):
        fields.not_negative(name, getattr(request, name))


def _summary_message(found: RolloutSummary) -> trajectory_pb2.RolloutSummary:
    slot = SlotName.parse(found.rollout_id) if found.in_group else None
    has_versions = found.max_weight_version >= 0
    return fields.message_of(
        trajectory_pb2.RolloutSummary,
        found,
        group_id=slot.task_id if slot else "",
        min_weight_version=found.min_weight_version if has_versions else None,
        max_weight_version=found.max_weight_version if has_versions else None,
        create_time=to_timestamp(found.create_time),
        finish_time=to_timestamp(found.finish_time) if found.finish_time else None,
    )


class TrajectoryServicer(pb_grpc.TrajectoryServiceServicer):
    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        inflight: RequestBudget,
        max_turn_tokens: int,
        *,
        keeps_rows: bool = True,
    ) -> None:
        """Of a store.

        Args:
            store: with the record.
            rollouts: that write it.
            inflight: bounds the bytes in flight.
            max_turn_tokens: bounds the tokens that one turn adds.
            keeps_rows: whether there is an index of finished rollouts.
        """
        self._store = store
        self._rollouts = rollouts
        self._begin_turns = BeginTurnsHandler(rollouts)
        self._append_tokens = AppendTokensHandler(rollouts, inflight, max_turn_tokens)
        self._record_groups = RecordGroupsHandler(store, rollouts, inflight, max_turn_tokens)
        self._search = SearchRolloutsHandler(store, keeps_rows=keeps_rows)
        self._retention = Retention(store)

    async def BeginTurns(
        self, request: pb.BeginTurnsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.BeginTurnsResponse:
        return await self._begin_turns.begin(request)

    async def AppendTokens(
        self, request: pb.AppendTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AppendTokensResponse:
        return await self._append_tokens.append(request)

    async def RecordGroups(
        self, request: pb.RecordGroupsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RecordGroupsResponse:
        return await self._record_groups.record(request)

    async def DeleteTrajectories(
        self, request: pb.DeleteTrajectoriesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DeleteTrajectoriesResponse:
        run_id = validation.run_name(request.run_id)
        validation.bounded("rollout_ids", len(request.rollout_ids), _MAX_DELETED)
        names = [validation.name("rollout_ids", name) for name in request.rollout_ids]
        return await self._retention.delete(run_id, names)

    async def GetTrajectory(
        self, request: pb.GetTrajectoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetTrajectoryResponse:
        run_id, rollout_id = _rollout_name(request)
        if request.credential_digest:
            await self._check_credential(run_id, rollout_id, request.credential_digest)
        trajectory = await self._required(run_id, rollout_id, with_tokens=not request.headers_only)
        task = None
        if request.with_task and trajectory.group_id:
            task = await self._store.runs.task(run_id, trajectory.group_id)
        known = None if task is None else conversion.task_to(task)
        return pb.GetTrajectoryResponse(trajectory=trajectory, task=known)

    async def SearchRollouts(
        self, request: pb.SearchRolloutsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SearchRolloutsResponse:
        return await self._search.search(request)

    async def ReadTokens(
        self, request: pb.ReadTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReadTokensResponse:
        return await read_tokens(self._store.tokens, request)

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListTrajectoriesResponse:
        run_id = validation.run_name(request.run_id)
        start, limit = validation.page(request.page_size, request.page_token)
        names = await self._store.runs.listed(run_id, start, limit + 1)
        read = await asyncio.gather(
            *(self._read(run_id, name, not request.headers_only) for name in names[:limit])
        )
        return pb.ListTrajectoriesResponse(
            trajectories=[trajectory for trajectory in read if trajectory is not None],
            next_page_token=str(start + limit) if len(names) > limit else "",
        )

    async def WatchTrajectory(
        self, request: pb.WatchTrajectoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchTrajectoryResponse]:
        run_id, rollout_id = _rollout_name(request)
        interval = validation.seconds("interval", request.interval) or _DEFAULT_WATCH_SECONDS
        last = None
        while True:
            trajectory = await self._required(run_id, rollout_id, with_tokens=True)
            if trajectory != last:
                yield pb.WatchTrajectoryResponse(trajectory=trajectory)
            if trajectory.state != int(RolloutState.RUNNING):
                return
            last = trajectory
            await asyncio.sleep(max(_MIN_WATCH_SECONDS, interval))

    async def _check_credential(self, run_id: str, rollout_id: str, digest: str) -> None:
        rollout = await self._store.tokens.rollout(run_id, rollout_id)
        if rollout is None:
            raise store_error("UNKNOWN_ROLLOUT", rollout_id)
        if rollout.credential_digest != validation.digest("credential_digest", digest):
            raise store_error("BAD_CREDENTIAL", rollout_id)

    async def _required(
        self, run_id: str, rollout_id: str, *, with_tokens: bool
    ) -> trajectory_pb2.Trajectory:
        spans_only = not with_tokens
        (found,) = await self._store.tokens.read(run_id, [rollout_id], spans_only=spans_only)
        if found is None:
            raise store_error("UNKNOWN_ROLLOUT", rollout_id)
        return conversion.trajectory_to(*found, with_spans=True)

    async def _read(
        self, run_id: str, rollout_id: str, with_tokens: bool
    ) -> trajectory_pb2.Trajectory | None:
        (found,) = await self._store.tokens.read(run_id, [rollout_id], spans_only=not with_tokens)
        return conversion.trajectory_to(*found) if found is not None else None


def _rollout_name(request: pb.GetTrajectoryRequest | pb.WatchTrajectoryRequest) -> tuple[str, str]:
    return validation.run_name(request.run_id), validation.name("rollout_id", request.rollout_id)


_DEFAULT_TOKENS, _MAX_TOKENS = 4096, 65_536


async def read_tokens(store: TokenStore, request: pb.ReadTokensRequest) -> pb.ReadTokensResponse:
    """The tokens asked for, as far as the turn has them.

    Raises:
        ServiceError: INVALID_ARGUMENT; NOT_FOUND, of the rollout or of the turn.
    """
    run_id, rollout_id, turn_id = validation.turn_name(
        request.run_id, request.rollout_id, request.turn_id
    )
    start = fields.not_negative("start", request.start)
    number = min(
        fields.not_negative("num_tokens", request.num_tokens) or _DEFAULT_TOKENS, _MAX_TOKENS
    )
    turns = await _turns(store, run_id, rollout_id)
    if turn_id not in turns:
        raise store_error("UNKNOWN_TURN", turn_id)
    tree = PrefixTree(list(turns.values()))
    total = tree.whole_length(turn_id)
    cuts = list(_cuts(tree.pieces(turn_id), start, min(start + number, total)))
    found = await store.windows(run_id, rollout_id, cuts) if cuts else []
    parts = (
        tokens._replace(spans=tuple(cut_spans(turns[cut.turn_id].tokens.spans, *cut[1:])))
        for cut, tokens in zip(cuts, found, strict=True)
    )
    response = pb.ReadTokensResponse(total=total)
    joined(parts).fill(response.tokens)
    return response


async def _turns(store: TokenStore, run_id: str, rollout_id: str) -> dict[str, Turn]:
    (found,) = await store.read(run_id, [rollout_id], spans_only=True)
    if found is None:
        raise store_error("UNKNOWN_ROLLOUT", rollout_id)
    return {turn.turn_id: turn for turn in found[1]}


def _cuts(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Cut]:
    """The own tokens of turns that are [start, stop) of a sequence."""
    first = 0
    for piece in pieces:
        cut = Cut(piece.turn_id, max(start - first, 0), min(stop - first, piece.stop))
        if cut.start < cut.stop:
            yield cut
        first += piece.stop
