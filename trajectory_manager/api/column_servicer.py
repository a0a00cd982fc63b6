# ruff: noqa: N802 -- rpcs are named as the contract names them
"""ColumnService: leases samples to the consumers that compute columns, and stores the values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1 import column_service_pb2_grpc as pb_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import invalid_argument
from services.chassis.rpc import fields
from services.lib.token_bytes import unpack_logprobs
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.model.records import Topic
from trajectory_manager.model.runs import RunConfig, StepLease
from trajectory_manager.model.tokens import BYTES_PER_TOKEN
from trajectory_manager.service import sample_builder
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.store.redis.column_store import (
    CellFailure,
    ColumnLease,
    ColumnStore,
)
from trajectory_manager.store.redis.connect import Store

_MAX_SAMPLES = 512
_FAILURES = (
    tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
)


class ColumnServicer(pb_grpc.ColumnServiceServicer):
    def __init__(self, store: Store, waiting: LongPoll) -> None:
        self._store = store
        self._waiting = waiting

    async def LeaseColumn(
        self, request: pb.LeaseColumnRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LeaseColumnResponse:
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)
        nonce = lease_token.nonce(validation.name("request_id", request.request_id))
        config = await self._store.runs.config(run_id)
        column, needs = _column("column", request.column, config), tuple(request.needs)
        for need in needs:
            if _column("needs", need, config) == column:
                raise invalid_argument("needs", need, "a column other than the one to write")
        number = validation.bounded("max_samples", request.max_samples, _MAX_SAMPLES)
        number = fields.positive("max_samples", number)

        async def attempt() -> ColumnLease | None:
            return await self._store.columns.lease(run_id, column, needs, number, nonce)

        lease = await self._waiting.until(run_id, Topic.COLUMNS, wait, attempt)
        if lease is None:
            return pb.LeaseColumnResponse()
        messages = await self._messages(run_id, config, lease.sample_ids)
        await add_columns(self._store.columns, run_id, messages, needs)
        return pb.LeaseColumnResponse(
            samples=messages,
            lease_token=lease_token.column_token(lease.epoch),
            lease_duration=to_duration(lease.seconds),
        )

    async def _messages(
        self, run_id: str, config: RunConfig, sample_ids: tuple[str, ...]
    ) -> list[trajectory_pb2.Sample]:
        built = await self._built(run_id, config, sample_ids)
        return [conversion.sample_to(sample) for sample in built]

    async def _built(
        self, run_id: str, config: RunConfig, sample_ids: tuple[str, ...]
    ) -> list[sample_builder.Sample]:
        # Base version 0 masks no token: staleness counts when a step takes the sample.
        unmasked = StepLease(step=0, base_weight_version=0, sample_ids=sample_ids)
        built = sample_builder.build(self._store.tokens, run_id, config, unmasked)
        return [sample async for sample in built]

    async def WriteColumn(
        self, request: pb.WriteColumnRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WriteColumnResponse:
        run_id = validation.run_name(request.run_id)
        config = await self._store.runs.config(run_id)
        column = _column("column", request.column, config)
        epoch = lease_token.parse_column(request.lease_token)
        values, failures = _values(request.values), _failures(request)
        found = await self._store.columns.leased(run_id, column, epoch, list(values))
        new = found.unwritten
        values = {name: value for name, value in values.items() if name not in found.unneeded}
        await self._check_lengths(run_id, config, {name: values[name] for name in new})
        # Values first: a written cell has its value even after a crash in between.
        await self._put(run_id, column, epoch, values, new)
        written = await self._store.columns.complete(run_id, column, epoch, new)
        if written.num_written < len(new):
            # A concurrent retry or a newer lease wrote some: check which values are stored.
            await self._store.columns.put(run_id, column, epoch, values, new=False)
        if request.returned_sample_ids:
            await self._store.columns.give_back(run_id, column, epoch, request.returned_sample_ids)
        if failures:
            failed = self._store.columns.fail(run_id, column, epoch, failures)
            written.num_replaced = await failed
        return written

    async def _put(
        self,
        run_id: str,
        column: str,
        epoch: int,
        values: Mapping[str, bytes],
        new: Collection[str],
    ) -> None:
        for is_new in (False, True):
            part = {name: value for name, value in values.items() if (name in new) == is_new}
            await self._store.columns.put(run_id, column, epoch, part, new=is_new)

    async def _check_lengths(
        self, run_id: str, config: RunConfig, values: Mapping[str, bytes]
    ) -> None:
        per_token = tuple(name for name in values if len(values[name]) != BYTES_PER_TOKEN)
        if not per_token:
            return
        for sample in await self._built(run_id, config, per_token):
            given = len(values[sample.sample_id]) // BYTES_PER_TOKEN
            if given != sample.tokens.num_tokens:
                cure = f"1 value, or one for each of the {sample.tokens.num_tokens} tokens"
                raise invalid_argument(f"values[{sample.sample_id}]", f"{given} values", cure)

    async def GetColumnBacklog(
        self, request: pb.GetColumnBacklogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetColumnBacklogResponse:
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)
        column = _column("column", request.column, await self._store.runs.config(run_id))
        columns = self._store.columns

        async def attempt() -> pb.GetColumnBacklogResponse | None:
            found = await columns.backlog(run_id, column)
            is_last = found.num_samples > 0 and not found.num_running_rollouts
            return found if is_last or found.num_samples >= max(request.min_samples, 1) else None

        backlog = await self._waiting.until(run_id, Topic.COLUMNS, wait, attempt)
        return backlog or await columns.backlog(run_id, column)

    async def ListSampleStatus(
        self, request: pb.ListSampleStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListSampleStatusResponse:
        run_id = validation.run_name(request.run_id)
        limit = validation.page_size(request.page_size)
        after = validation.optional_name("page_token", request.page_token)
        rows = await self._store.columns.status(run_id, after, limit)
        full = len({row.group_id for row in rows}) == limit
        return pb.ListSampleStatusResponse(
            samples=rows,
            next_page_token=rows[-1].group_id if full else "",
        )


async def add_columns(
    columns: ColumnStore,
    run_id: str,
    messages: Sequence[trajectory_pb2.Sample],
    names: Sequence[str],
) -> None:
    """Add the stored columns among `names` to samples."""
    if not names:
        return
    values = await columns.read(run_id, [message.sample_id for message in messages])
    for message in messages:
        stored = values[message.sample_id]
        for name in names:
            if name in stored:
                message.columns.add(name=name, values=stored[name])


def _column(field: str, name: str, config: RunConfig) -> str:
    if name not in config.required_columns:
        known = ", ".join(config.required_columns) or "none"
        raise invalid_argument(field, name, f"one of the run's required_columns ({known})")
    return name


def _failures(request: pb.WriteColumnRequest) -> dict[str, CellFailure]:
    failures = {}
    for index, failure in enumerate(request.failures):
        field, kind = f"failures[{index}]", failure.failure_class
        message = validation.text(f"{field}.message", failure.message)
        if kind not in _FAILURES:
            raise invalid_argument(f"{field}.failure_class", kind, "ENVIRONMENT or INFRASTRUCTURE")
        counts = kind == tokens_pb2.FAILURE_CLASS_ENVIRONMENT
        failures[failure.sample_id] = CellFailure(f"column {request.column}: {message}", counts)
    return failures


def _values(messages: Sequence[pb.ColumnValues]) -> dict[str, bytes]:
    values: dict[str, bytes] = {}
    for message in messages:
        field = f"values[{message.sample_id}]"
        if message.sample_id in values:
            raise invalid_argument(field, "given twice", "each sample once")
        if not message.values or len(message.values) % BYTES_PER_TOKEN:
            cure = "float32 values of 4 bytes each"
            raise invalid_argument(field, f"{len(message.values)} bytes", cure)
        # The sum of finite float32 is a finite float64; NaN and infinity propagate.
        if not math.isfinite(sum(unpack_logprobs(message.values))):
            raise invalid_argument(field, "NaN or infinite", "finite numbers")
        values[message.sample_id] = message.values
    return values
