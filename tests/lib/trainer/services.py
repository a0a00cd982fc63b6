"""Small real gRPC services around a trainer: a sample ledger, a weight store, a scheduler."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.trajectory.v1 import run_service_pb2 as run_pb2
from seamflow.trajectory.v1 import run_service_pb2_grpc as run_grpc
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_grpc
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import Reason, failed_precondition, not_found, stale_epoch
from services.chassis.rpc.server import Service, started
from services.lib.weight_files.folder_names import own_probe, sees
from tests.lib.trainer.support import make_samples

_PAGE = 3


class SampleLedger(sample_grpc.SampleServiceServicer):
    """Endless groups of random samples, with the step ledger of the trajectory manager."""

    def __init__(self, groups_per_step: int = 3) -> None:
        self.epoch = 0
        self.committed = 0
        self.leased: dict[int, list[str]] = {}
        self.bases: dict[int, int] = {}
        self.asked: list[int] = []
        self.num_refused = 0
        self.extended = asyncio.Event()
        self.awaited = asyncio.Event()
        self.awaited_step = 0
        self.ready = asyncio.Event()
        self.ready.set()
        self.on_commit: Callable[[int], None] = lambda step: None
        self.on_lease: Callable[[int], None] = lambda step: None
        self._groups_per_step = groups_per_step
        self._drawn = 0
        self._batches: dict[int, list[trajectory_pb2.Sample]] = {}

    async def Reconcile(
        self, request: sample_pb2.ReconcileRequest, context: object
    ) -> sample_pb2.ReconcileResponse:
        """Fence older trainers; commit what the checkpoint covers."""
        self.epoch += 1
        self.committed = max(self.committed, request.step)
        self._forget()
        pending = [step for step in self._batches if step > request.step]
        return sample_pb2.ReconcileResponse(epoch=self.epoch, pending_steps=pending)

    async def GetReadiness(
        self, request: sample_pb2.GetReadinessRequest, context: object
    ) -> sample_pb2.GetReadinessResponse:
        """The steps alone."""
        leased = max(self.committed, *self._batches, 0)
        readiness = sample_pb2.Readiness(committed_step=self.committed, leased_step=leased)
        return sample_pb2.GetReadinessResponse(readiness=readiness)

    async def AwaitStep(
        self, request: sample_pb2.AwaitStepRequest, context: object
    ) -> sample_pb2.AwaitStepResponse:
        """Wait for `ready`."""
        wait_seconds = request.wait.ToTimedelta().total_seconds()
        self.awaited_step = request.step
        if wait_seconds:
            self.awaited.set()
        try:
            async with asyncio.timeout(wait_seconds):
                await self.ready.wait()
        except TimeoutError:
            pass
        readiness = sample_pb2.Readiness(
            num_ready_groups=self._groups_per_step if self.ready.is_set() else 0,
            groups_per_step=self._groups_per_step,
        )
        return sample_pb2.AwaitStepResponse(readiness=readiness)

    async def LeaseSamples(
        self, request: sample_pb2.LeaseSamplesRequest, context: object
    ) -> sample_pb2.LeaseSamplesResponse:
        """New samples for a new step, the same ones for a repeated step, a few in each answer."""
        self._fence(request.epoch)
        self.on_lease(request.step)
        if request.step not in self._batches:
            self._drawn += 1
            self._batches[request.step] = make_samples(self._drawn, self._groups_per_step)
        samples = self._batches[request.step]
        page = samples[request.first_sample : request.first_sample + _PAGE]
        end = request.first_sample + len(page)
        self.leased[request.step] = [sample.sample_id for sample in samples]
        self.bases.setdefault(request.step, request.base_weight_version)
        return sample_pb2.LeaseSamplesResponse(
            samples=page,
            lease_token=f"{request.epoch}/{request.step}",
            next_sample=end if end < len(samples) else 0,
            base_weight_version=self.bases[request.step],
        )

    async def AwaitPublish(
        self, request: sample_pb2.AwaitPublishRequest, context: object
    ) -> sample_pb2.AwaitPublishResponse:
        """Put the first `num_refused` publishes off."""
        self._fence(request.epoch)
        self.asked.append(request.weight_version)
        return sample_pb2.AwaitPublishResponse(publish=len(self.asked) > self.num_refused)

    async def ExtendLease(
        self, request: sample_pb2.ExtendLeaseRequest, context: object
    ) -> sample_pb2.ExtendLeaseResponse:
        """Leases live for a tenth of a second."""
        if int(request.lease_token.split("/")[1]) <= self.committed:
            raise failed_precondition(Reason.LEASE_EXPIRED, "committed")
        self.extended.set()
        remaining = Duration()
        remaining.FromMilliseconds(100)
        return sample_pb2.ExtendLeaseResponse(remaining=remaining)

    async def CommitStep(
        self, request: sample_pb2.CommitStepRequest, context: object
    ) -> sample_pb2.CommitStepResponse:
        """Consume a step for good."""
        self._fence(request.epoch)
        self.on_commit(request.step)
        self.committed = max(self.committed, request.step)
        self._forget()
        return sample_pb2.CommitStepResponse()

    def forget_composition(self) -> None:
        """Forget which samples the uncommitted steps had, as no ledger may."""
        self._batches, self.bases = {}, {}

    def _forget(self) -> None:
        self._batches = {step: b for step, b in self._batches.items() if step > self.committed}

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise stale_epoch("trainer", epoch, self.epoch)


class RunRecord(run_grpc.RunServiceServicer):
    """The run that is trained."""

    def __init__(self) -> None:
        self.config = trajectory_pb2.RunConfig(reward_name="reward")
        self.ended = asyncio.Event()

    async def GetRun(
        self, request: run_pb2.GetRunRequest, context: object
    ) -> run_pb2.GetRunResponse:
        """It runs."""
        run = trajectory_pb2.Run(run_id=request.run_id, config=self.config)
        return run_pb2.GetRunResponse(run=run)

    async def EndRun(
        self, request: run_pb2.EndRunRequest, context: object
    ) -> run_pb2.EndRunResponse:
        """Its trainer has finished."""
        self.ended.set()
        return run_pb2.EndRunResponse()


class WeightStore(weight_grpc.WeightServiceServicer):
    """Versions in a folder; a commit must describe the files as they are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: dict[str, tuple[int, weight_pb2.BeginPublishRequest]] = {}
        self.manifests: list[weight_pb2.Manifest] = []
        self.on_commit: Callable[[int], None] = lambda step: None
        """Called with the step of each version that is committed."""

    async def BeginPublish(
        self, request: weight_pb2.BeginPublishRequest, context: object
    ) -> weight_pb2.BeginPublishResponse:
        """The next version for a new key."""
        version, _ = self._begun.setdefault(request.request_id, (len(self._begun) + 1, request))
        return weight_pb2.BeginPublishResponse(weight_version=version)

    async def ProbeFolder(
        self, request: weight_pb2.ProbeFolderRequest, context: object
    ) -> weight_pb2.ProbeFolderResponse:
        """The folder of a version, which the trainer sees."""
        folder = self.folder(request.weight_version)
        folder.mkdir(parents=True, exist_ok=True)
        seen = sees(folder, request.written)
        return weight_pb2.ProbeFolderResponse(
            folder=str(folder), probe=own_probe(folder), seen=seen
        )

    async def CommitPublish(
        self, request: weight_pb2.CommitPublishRequest, context: object
    ) -> weight_pb2.CommitPublishResponse:
        """Check and remember."""
        folder = self.folder(request.weight_version)
        assert (folder / ".complete").exists()
        for file in request.files:
            content = (folder / file.name).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (
                file.num_bytes,
                file.sha256,
            )
        (begun,) = [b for version, b in self._begun.values() if version == request.weight_version]
        manifest = weight_pb2.Manifest(
            run_id=request.run_id,
            weight_version=request.weight_version,
            step=begun.step,
            parent_weight_version=begun.parent_weight_version,
            files=request.files,
        )
        self.manifests.append(manifest)
        self.on_commit(manifest.step)
        return weight_pb2.CommitPublishResponse(manifest=manifest)

    async def GetManifest(
        self, request: weight_pb2.GetManifestRequest, context: object
    ) -> weight_pb2.GetManifestResponse:
        """The newest."""
        if not self.manifests:
            raise not_found("weight version", "newest")
        return weight_pb2.GetManifestResponse(manifest=self.manifests[-1])

    def folder(self, version: int) -> Path:
        """Where a version is."""
        return self._folder / f"weight_v{version:06d}"


class Lender(scheduler_grpc.SchedulerServiceServicer):
    """Grants the gang's nodes by resuming the trainer, takes them back by suspending it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.granted = False
        self.calls: list[str] = []
        self.switch: Callable[[bool, int], Awaitable[None]] | None = None
        """Awaited with (resume?, epoch): what a node agent would do."""

    async def RequestNodes(
        self, request: scheduler_pb2.RequestNodesRequest, context: object
    ) -> scheduler_pb2.RequestNodesResponse:
        """Resume the trainer under a new epoch, unless it has the nodes."""
        if not self.granted:
            self.calls.append("request")
            await self._move(True)
        return scheduler_pb2.RequestNodesResponse(granted=True)

    async def ReleaseNodes(
        self, request: scheduler_pb2.ReleaseNodesRequest, context: object
    ) -> scheduler_pb2.ReleaseNodesResponse:
        """Suspend the trainer under a new epoch, if it has the nodes."""
        if self.granted:
            self.calls.append("release")
            await self._move(False)
        return scheduler_pb2.ReleaseNodesResponse()

    async def _move(self, granted: bool) -> None:
        self.epoch += 1
        self.granted = granted
        assert self.switch is not None
        await self.switch(granted, self.epoch)


class Neighbours:
    """The three services on one port."""

    def __init__(self, folder: Path) -> None:
        self.ledger = SampleLedger()
        self.weights = WeightStore(folder)
        self.lender = Lender()
        self.run = RunRecord()
        self.address = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the block runs."""
        pairs: list[tuple[Callable[[Any, Any], None], object]] = [
            (sample_grpc.add_SampleServiceServicer_to_server, self.ledger),
            (run_grpc.add_RunServiceServicer_to_server, self.run),
            (weight_grpc.add_WeightServiceServicer_to_server, self.weights),
            (scheduler_grpc.add_SchedulerServiceServicer_to_server, self.lender),
        ]
        config = ServerConfig(admin_port=-1, drain_seconds=0.0)
        async with started(Service(servicers=pairs), config) as port:
            self.address = f"127.0.0.1:{port}"
            yield
