# ruff: noqa: N802 -- rpcs are named as the contract names them
"""SampleService: leases steps of samples to the trainer; each sample is trained exactly once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import sample_service_pb2 as pb
from seamflow.trajectory.v1 import sample_service_pb2_grpc as pb_grpc

from services.chassis.errors import invalid_argument
from services.chassis.rpc import fields
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.api.column_servicer import add_columns
from trajectory_manager.api.inspection.trained_samples import list_trained, record_trained
from trajectory_manager.model.records import RolloutState, StalenessPolicy, Topic
from trajectory_manager.model.runs import RunConfig, StepLease
from trajectory_manager.model.tokens import Turn
from trajectory_manager.service import metrics, sample_builder
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.store.redis.connect import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    first: int
    """Samples to skip."""
    max_bytes: int
    """Size of the response after which no sample is added; 0: no limit."""


async def fill(
    response: pb.LeaseSamplesResponse,
    store: Store,
    run_id: str,
    lease: StepLease,
    page: Page,
) -> list[int]:
    """Add the samples of a step to `response`, in the ledger's order, as `page` requests.

    Samples are written in place: a step is too large to be copied.

    Returns:
        The staleness of each fresh sample added, in weight versions.
    """
    config = await store.runs.config(run_id)
    names = (*lease.sample_ids, *lease.replayed_ids)
    if page.first > len(names):
        cure = f"next_sample of the answer before; the step has {len(names)} samples"
        raise invalid_argument("first_sample", page.first, cure)
    staleness, num_bytes = list[int](), 0
    async with aclosing(_built(store, run_id, lease, config, names[page.first :])) as built:
        async for sample, replayed in built:
            message = response.samples.add(replayed=replayed)
            conversion.fill_sample(message, sample)
            num_bytes += conversion.add_routed_experts(message, sample)
            if not replayed:
                staleness.append(lease.base_weight_version - sample.min_weight_version)
            num_bytes += sample.tokens.num_bytes + len(sample.loss_mask)
            if 0 < page.max_bytes <= num_bytes:
                break
    end = page.first + len(response.samples)
    response.next_sample = end if end < len(names) or lease.is_open else 0
    await add_columns(store.columns, run_id, response.samples, config.required_columns)
    return staleness


async def _built(
    store: Store, run_id: str, lease: StepLease, config: RunConfig, names: Sequence[str]
) -> AsyncGenerator[tuple[sample_builder.Sample, bool], None]:
    """The samples of a step named in `names`, and whether each is replayed."""
    selected = set(names)
    fresh = replace(lease, sample_ids=_selected(lease.sample_ids, selected))
    async for sample in sample_builder.build(store.tokens, run_id, config, fresh):
        yield sample, False
    # Replayed samples are old by design: none of their tokens is masked.
    whole = replace(config, staleness_policy=StalenessPolicy.DROP)
    replayed = replace(lease, sample_ids=_selected(lease.replayed_ids, selected))
    async for sample in sample_builder.build(store.tokens, run_id, whole, replayed):
        yield sample, True


def _selected(names: Sequence[str], selected: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in selected)


# Bound on the size of one ListSamples response.
_PAGE_BYTES = 16 << 20
_READ_ROLLOUTS = 32
_MAX_REJECTED = 1024


class SampleServicer(pb_grpc.SampleServiceServicer):
    def __init__(self, store: Store, waiting: LongPoll) -> None:
        self._store = store
        self._waiting = waiting

    async def Reconcile(
        self, request: pb.ReconcileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReconcileResponse:
        return await self._store.ledger.reconcile(
            validation.run_name(request.run_id),
            fields.not_negative("step", request.step),
            validation.name("trainer_id", request.trainer_id),
        )

    async def LeaseSamples(
        self, request: pb.LeaseSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LeaseSamplesResponse:
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)
        page = Page(
            first=fields.not_negative("first_sample", request.first_sample),
            max_bytes=fields.not_negative("max_bytes", request.max_bytes),
        )

        async def attempt() -> StepLease | None:
            lease = await self._lease(run_id, request)
            return lease if lease is not None and _satisfies(request, lease) else None

        lease = await self._waiting.until(run_id, Topic.READY, wait, attempt)
        response = pb.LeaseSamplesResponse()
        if lease is None:
            return response
        staleness = await fill(response, self._store, run_id, lease, page)
        for versions in staleness:
            metrics.STALENESS.observe(versions)
        response.lease_token = lease_token.step_token(lease.step, request.epoch)
        response.max_staleness = max(staleness, default=0)
        response.num_deliveries = lease.num_deliveries
        response.base_weight_version = lease.base_weight_version
        response.streamed = lease.streamed
        return response

    async def _lease(self, run_id: str, request: pb.LeaseSamplesRequest) -> StepLease | None:
        attempted = await self._store.ledger.lease_samples(
            run_id,
            request.epoch,
            fields.positive("step", request.step),
            fields.not_negative("base_weight_version", request.base_weight_version),
            fields.not_negative("num_groups", request.num_groups),
            fields.not_negative("min_groups", request.min_groups),
            request.streaming,
        )
        if attempted.num_too_old:
            metrics.DISCARDED.labels("staleness").inc(attempted.num_too_old)
        return attempted.lease

    async def ExtendLease(
        self, request: pb.ExtendLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExtendLeaseResponse:
        run_id = validation.run_name(request.run_id)
        step, epoch = lease_token.parse_step(request.lease_token)
        seconds = await self._store.ledger.extend_samples(run_id, epoch, step)
        return pb.ExtendLeaseResponse(remaining=to_duration(seconds))

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CommitStepResponse:
        num_samples = await self._store.ledger.commit(
            validation.run_name(request.run_id),
            request.epoch,
            fields.positive("step", request.step),
        )
        return pb.CommitStepResponse(num_samples=num_samples)

    async def RejectGroups(
        self, request: pb.RejectGroupsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RejectGroupsResponse:
        validation.bounded("groups", len(request.groups), _MAX_REJECTED)
        rejected = await self._store.ledger.reject(
            validation.run_name(request.run_id),
            request.epoch,
            fields.positive("step", request.step),
            {
                validation.name(f"groups[{i}].group_id", group.group_id): validation.text(
                    f"groups[{i}].message", group.message
                )
                for i, group in enumerate(request.groups)
            },
        )
        metrics.DISCARDED.labels("rejected").inc(rejected.num_rejected)
        return rejected

    async def RecordTrainedSamples(
        self, request: pb.RecordTrainedSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RecordTrainedSamplesResponse:
        return await record_trained(self._store.inspection, request)

    async def ListTrainedSamples(
        self, request: pb.ListTrainedSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListTrainedSamplesResponse:
        return await list_trained(self._store.inspection, request)

    async def AwaitPublish(
        self, request: pb.AwaitPublishRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AwaitPublishResponse:
        run_id = validation.run_name(request.run_id)
        version = fields.positive("weight_version", request.weight_version)
        wait = validation.seconds("wait", request.wait)
        decision = pb.AwaitPublishResponse()

        async def attempt() -> pb.AwaitPublishResponse | None:
            nonlocal decision
            decision = await decide(self._store, run_id, request.epoch, version)
            return decision if decision.publish else None

        await self._waiting.until(run_id, Topic.READY, wait, attempt)
        return decision

    async def ListSamples(
        self, request: pb.ListSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListSamplesResponse:
        run_id = validation.run_name(request.run_id)
        start, limit = validation.page(request.page_size, request.page_token)
        config = await self._store.runs.config(run_id)
        names = await self._store.runs.listed(run_id, start, limit + 1)
        listed: list[pb.ListedSample] = []
        num_read = num_bytes = 0
        while num_read < min(limit, len(names)) and num_bytes < _PAGE_BYTES:
            batch = names[num_read : min(num_read + _READ_ROLLOUTS, limit)]
            found = await self._listed(run_id, batch)
            num_read += len(batch)
            num_bytes += sum(entry.ByteSize() for entry in found)
            listed += found
        messages = [entry.sample for entry in listed]
        await add_columns(self._store.columns, run_id, messages, config.required_columns)
        return pb.ListSamplesResponse(
            samples=listed,
            next_page_token=str(start + num_read) if len(names) > num_read else "",
        )

    async def _listed(self, run_id: str, rollout_ids: Sequence[str]) -> list[pb.ListedSample]:
        found = await self._store.tokens.read(run_id, rollout_ids)
        steps = await self._store.ledger.committed_steps(run_id, rollout_ids)
        return [
            pb.ListedSample(
                sample=conversion.sample_to(sample),
                purpose=int(sample.rollout.purpose),  # type: ignore[arg-type]
                state=int(sample.rollout.state),  # type: ignore[arg-type]
                committed_step=step,
            )
            for pair, step in zip(found, steps, strict=True)
            if pair is not None and pair[0].state is not RolloutState.RUNNING
            for sample in sample_builder.of_rollout(*pair)
        ]

    async def GetReadiness(
        self, request: pb.GetReadinessRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetReadinessResponse:
        run_id = validation.run_name(request.run_id)
        counts = await self._store.runs.run_counts(run_id)
        return pb.GetReadinessResponse(readiness=counts)

    async def AwaitStep(
        self, request: pb.AwaitStepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AwaitStepResponse:
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)
        min_groups = fields.not_negative("min_ready_groups", request.min_ready_groups)
        await self._await_step(run_id, request)

        async def attempt() -> pb.Readiness | None:
            # Until none is too old: while some were taken out, others may have completed.
            while True:
                counts = await self._store.runs.run_counts(run_id)
                if counts.num_ready_groups - counts.num_kept_back_groups < min_groups:
                    return None
                if not await self._await_step(run_id, request):
                    return counts

        counts = await self._waiting.until(run_id, Topic.READY, wait, attempt)
        if counts is None:
            counts = await self._store.runs.run_counts(run_id)
        return pb.AwaitStepResponse(readiness=counts)

    async def _await_step(self, run_id: str, request: pb.AwaitStepRequest) -> int:
        """Record the wait; the number of groups that were too old."""
        num_too_old = await self._store.ledger.await_step(
            run_id,
            request.epoch,
            fields.positive("step", request.step),
            fields.not_negative("base_weight_version", request.base_weight_version),
        )
        if num_too_old:
            metrics.DISCARDED.labels("staleness").inc(num_too_old)
        return num_too_old


def _satisfies(request: pb.LeaseSamplesRequest, lease: StepLease) -> bool:
    """Whether the step has what was requested: all samples, or with streaming any further ones."""
    return not lease.is_open or (request.streaming and len(lease.sample_ids) > request.first_sample)


_BATCH = 256


async def decide(
    store: Store, run_id: str, epoch: int, weight_version: int
) -> pb.AwaitPublishResponse:
    """Whether the trainer with `epoch` may publish `weight_version` now.

    Under WAIT no work in flight may become too old. The ledger has the versions of finished
    samples; those of running rollouts are read from their tokens. The two reads are not atomic: a
    group missed by both is dropped when it is leased.

    Raises:
        ServiceError: STALE_EPOCH.
    """
    waits = await store.ledger.publish_wait(run_id, epoch, weight_version)
    if waits.seconds <= 0:
        return pb.AwaitPublishResponse(publish=True, num_blocking=waits.num_blocking_groups)
    oldest = weight_version - (await store.runs.config(run_id)).max_staleness
    blocking = waits.num_blocking_groups
    for start in range(0, len(waits.running), _BATCH):
        batch = waits.running[start : start + _BATCH]
        found = await store.tokens.read(run_id, batch, spans_only=True)
        blocking += sum(_older(turns, oldest) for _, turns in filter(None, found))
    return pb.AwaitPublishResponse(publish=blocking == 0, num_blocking=blocking)


def _older(turns: Sequence[Turn], oldest: int) -> bool:
    """Whether a trainable token has a version before `oldest`."""
    return any(
        span.trainable and span.weight_version < oldest
        for turn in turns
        for span in turn.tokens.spans
    )
