# ruff: noqa: N802 -- rpcs are named as the contract names them
"""SampleService: complete groups out to the trainer, at least once, with effect exactly once."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.trajectory.v1 import sample_service_pb2 as pb
from seamflow.trajectory.v1 import sample_service_pb2_grpc as pb_grpc

from trajectory_manager import conversion, lease_token, samples, validation
from trajectory_manager.metrics import Metrics
from trajectory_manager.records import Readiness, StepLease, Topic
from trajectory_manager.store import Store
from trajectory_manager.waiting import Waiting


class SampleServicer(pb_grpc.SampleServiceServicer):
    """Serves the step ledger over gRPC."""

    def __init__(self, store: Store, waiting: Waiting, metrics: Metrics) -> None:
        self._store = store
        self._waiting = waiting
        self._metrics = metrics

    async def Reconcile(
        self, request: pb.ReconcileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReconcileResponse:
        """See the contract."""
        reconciled = await self._store.runs.reconcile(
            validation.run_name(request.run_id),
            validation.not_negative("step", request.step),
            validation.name("trainer_id", request.trainer_id),
        )
        return pb.ReconcileResponse(epoch=reconciled.epoch, pending_steps=reconciled.pending_steps)

    async def LeaseSamples(
        self, request: pb.LeaseSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LeaseSamplesResponse:
        """See the contract."""
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)

        async def attempt() -> StepLease | None:
            return await self._lease(run_id, request)

        lease = await self._waiting.until(run_id, Topic.READY, wait, attempt)
        if lease is None:
            return pb.LeaseSamplesResponse()
        config = await self._store.runs.config(run_id)
        built = await samples.build(self._store.tokens, run_id, config, lease)
        staleness = [lease.base_weight_version - sample.min_weight_version for sample in built]
        for versions in staleness:
            self._metrics.staleness(versions)
        return pb.LeaseSamplesResponse(
            samples=[conversion.sample_to(sample) for sample in built],
            lease_token=lease_token.step_token(lease.step, request.epoch),
            max_staleness=max(staleness, default=0),
        )

    async def _lease(self, run_id: str, request: pb.LeaseSamplesRequest) -> StepLease | None:
        attempted = await self._store.runs.lease_samples(
            run_id,
            request.epoch,
            validation.positive("step", request.step),
            validation.not_negative("base_weight_version", request.base_weight_version),
            validation.not_negative("num_groups", request.num_groups),
        )
        if attempted.num_too_old:
            self._metrics.discarded("staleness", attempted.num_too_old)
        return attempted.lease

    async def ExtendLease(
        self, request: pb.ExtendLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExtendLeaseResponse:
        """See the contract."""
        run_id = validation.run_name(request.run_id)
        step, epoch = lease_token.parse_step(request.lease_token)
        seconds = await self._store.runs.extend_samples(run_id, epoch, step)
        remaining = Duration()
        remaining.FromMilliseconds(int(seconds * 1000))
        return pb.ExtendLeaseResponse(remaining=remaining)

    async def CommitStep(
        self, request: pb.CommitStepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CommitStepResponse:
        """See the contract."""
        num_samples = await self._store.runs.commit(
            validation.run_name(request.run_id),
            request.epoch,
            validation.positive("step", request.step),
        )
        return pb.CommitStepResponse(num_samples=num_samples)

    async def ReleaseSamples(
        self, request: pb.ReleaseSamplesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseSamplesResponse:
        """See the contract."""
        run_id = validation.run_name(request.run_id)
        step, epoch = lease_token.parse_step(request.lease_token)
        await self._store.runs.release(run_id, epoch, step)
        return pb.ReleaseSamplesResponse()

    async def GetReadiness(
        self, request: pb.GetReadinessRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetReadinessResponse:
        """See the contract."""
        run_id = validation.run_name(request.run_id)
        wait = validation.seconds("wait", request.wait)
        wanted = validation.not_negative("min_ready_groups", request.min_ready_groups)

        async def attempt() -> Readiness | None:
            counts = await self._store.runs.readiness(run_id)
            return counts if counts.num_ready_groups >= wanted else None

        counts = await self._waiting.until(run_id, Topic.READY, wait, attempt)
        if counts is None:
            counts = await self._store.runs.readiness(run_id)
        return pb.GetReadinessResponse(
            **{name: getattr(counts, name) for name in Readiness.__dataclass_fields__}
        )
