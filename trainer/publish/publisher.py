"""Publish weights: let the ranks write a Hugging Face folder, bring it to the service, commit it.

BEGUN (version allocated) -> files WRITTEN and, one by one, with the service -> COMMITTED

The folder is the service's own where both see it (`shared_folder`); else a local one, whose files
are uploaded. Each phase has a deadline, and none waits for rollout servers:

    PublishTimeout               the phase, its deadline and the cure
    ├── PublishPostponed         not visible: publish later, under another version
    └── CommitUnknown            visible or not: read the newest version before continuing
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.errors import NotFoundError, PreconditionError, StaleEpochError, decode
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from services.chassis.errors import Reason
from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from services.lib.weight_files.folder_names import folder_name, sees, write_probe
from trainer.config import Setting
from trainer.publish.attempt_messages import WrittenFile
from trainer.publish.bucket_writer import PHASE_SECONDS
from trainer.publish.snapshot_weights import Attempt, SnapshotWeights
from trainer.publish.uploader import Uploader
from trainer.publish.weight_folder import forget_versions, seal, write_settings

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_UPLOADS = 3
"""Times a version is uploaded at most: again what the service lost or refused at the commit."""
_UPLOAD_AGAIN = (Reason.CHECKSUM_MISMATCH, Reason.INCOMPLETE_PUBLISH)


class PublishTimeout(Exception):  # noqa: N818 -- names the event
    """A phase of a publish missed its deadline."""

    def __init__(self, phase: str, seconds: float, cure: str) -> None:
        super().__init__(phase, seconds, cure)
        self.phase, self.seconds, self.cure = phase, seconds, cure

    def __str__(self) -> str:
        return f"publish: {self.phase} was not done after {self.seconds:g} s; {self.cure}"


class PublishPostponed(PublishTimeout):
    """This attempt is not visible and never will be."""


class CommitUnknown(PublishTimeout):
    """Whether the commit succeeded is known only to the weights service."""


class Publisher:
    """The WeightService of one run, and the folder its first model came from."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run_id: str,
        model_folder: Path,
        upload_folder: Path,
        *,
        phase_seconds: float = PHASE_SECONDS,
        adapter: Mapping[str, Setting] | None = None,
        find_folder: bool = True,
        compress: bool = False,
        uploads: int = 1,
    ) -> None:
        """Args as the settings of `trainer.publish`, and:

        upload_folder: holds a version while it is uploaded, for this process alone.
        phase_seconds: deadline of each phase: begin, write and upload, commit. A missed begin
            defers the publish to the next step, a missed write or upload is continued until newer
            weights are due, a missed commit ends the process, which asks for the outcome when it
            starts again.
        adapter: settings of a LoRA adapter; None: whole weights are published.
        uploads: files that are uploaded concurrently.
        """
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(weight_grpc.WeightServiceStub, channel)
        self._run_id = run_id
        self._model_folder = model_folder
        self._phase_seconds = phase_seconds
        self._adapter = adapter
        self._upload_folder, self._find_folder = upload_folder, find_folder
        self._uploader, self._uploads = Uploader(channel, compress=compress), uploads

    async def newest(self) -> pb.Manifest | None:
        """The newest committed version; None if nothing was published yet."""
        request = pb.GetManifestRequest(run_id=self._run_id)
        try:
            response = await retry_forever("GetManifest", lambda: self._stub.GetManifest(request))
        except NotFoundError:
            return None
        return response.manifest if response.HasField("manifest") else None

    async def holds(self, manifest: pb.Manifest, weights: SnapshotWeights) -> bool:
        """Whether a version has exactly these weights, by the checksums of its files.

        Raises `PublishPostponed` or `BucketsLostError`: it is not known.
        """
        theirs = {f.name: f.sha256 for f in manifest.files if f.name.endswith(".safetensors")}
        async with (
            self._phase("comparing weights", "the next attempt takes new ones"),
            weights.attempt() as attempt,
        ):
            return {each.name: each.sha256 async for each in attempt.files()} == theirs

    async def publish(self, weights: SnapshotWeights, *, step: int, parent: int, epoch: int) -> int:
        """Publish the weights of optimizer step `step`, trained from version `parent`.

        Returns the new version. Idempotent per step and epoch: after a crash, under the next epoch,
        the same step may give other weights. Raises as `finish`.
        """
        begun = await self.begin(step=step, parent=parent, epoch=epoch)
        await self.finish(begun, weights, epoch=epoch)
        return int(begun.weight_version)

    async def begin(self, *, step: int, parent: int, epoch: int) -> pb.BeginPublishResponse:
        """First phase: allocate the number of the version. Raises `PublishPostponed`."""
        begin = pb.BeginPublishRequest(
            run_id=self._run_id,
            step=step,
            parent_weight_version=parent,
            epoch=epoch,
            request_id=f"step-{step}-epoch-{epoch}",
        )
        cure = "check that the weights service and its Redis answer"
        async with self._phase("BeginPublish", cure):
            return await retry_forever("BeginPublish", lambda: self._stub.BeginPublish(begin))

    async def finish(
        self, begun: pb.BeginPublishResponse, weights: SnapshotWeights, *, epoch: int
    ) -> None:
        """The other phases: write, upload and commit.

        Raises:
            PublishTimeout: a phase missed its deadline.
            BucketsLostError: the ranks could not bring the weights together: as postponed.
            OSError: a rank could not write.
        """
        version = begun.weight_version
        shared = await self._shared_folder(version)
        request = pb.CommitPublishRequest(run_id=self._run_id, weight_version=version, epoch=epoch)
        local = self._local(version)
        folder = local if shared is None else shared.path
        try:
            await asyncio.to_thread(forget_versions, self._upload_folder, version)
            attempt = weights.attempt(
                version=version,
                epoch=epoch,
                spool=local,
                folder=None if shared is None else shared.path,
                probe=None if shared is None else shared.probe,
            )
            async with attempt as writing:
                await self._bring(request, weights, writing, folder, shared)
                await self._commit_brought(request, writing, shared)
                writing.committed()
        except OSError:  # half a version would keep a full disk full
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        await asyncio.to_thread(forget_versions, self._upload_folder, version)

    async def _bring(
        self,
        request: pb.CommitPublishRequest,
        weights: SnapshotWeights,
        writing: Attempt,
        folder: Path,
        shared: SharedFolder | None,
    ) -> None:
        """Bring all files to the service, and describe them in the request of the commit."""
        phase, cure = f"writing {folder}", "check the disk of that folder"
        if shared is None:
            phase += " and UploadShards"
            cure += ", the network to the weights service and its disk; the next attempt continues"
        async with self._phase(phase, cure):
            settings = await asyncio.to_thread(
                write_settings, folder, self._model_folder, weights.plan, self._adapter
            )
            request.files.extend(settings)
            if shared is None:
                await self._upload(request, settings)
            await self._bring_weights(request, writing)
            request.files.sort(key=lambda file: file.name)
            if shared is not None:
                await asyncio.to_thread(seal, folder, request.files)

    async def _bring_weights(self, request: pb.CommitPublishRequest, writing: Attempt) -> None:
        """Upload files as they are written, a few concurrently, and announce each."""
        slots, announcement = asyncio.Semaphore(self._uploads), Announcement(self._stub, request)

        async def bring(written: WrittenFile) -> None:
            async with slots:
                await self._upload_here(request, written)
            request.files.append(written.described)
            await announcement.add(written.described)

        try:
            async with asyncio.TaskGroup() as tasks:
                async for written in writing.files():
                    tasks.create_task(bring(written))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _upload_here(self, request: pb.CommitPublishRequest, written: WrittenFile) -> None:
        """Upload a file that this rank has; the others have done it with theirs."""
        if written.is_here:
            await self._upload(request, [written.described])

    async def _commit_brought(
        self,
        request: pb.CommitPublishRequest,
        writing: Attempt,
        shared: SharedFolder | None,
    ) -> None:
        """Commit; upload again what the service lost in a crash, or found damaged."""
        for _ in range(_UPLOADS - 1):
            try:
                await self._commit(request)
            except PreconditionError as error:
                if shared is not None or error.reason not in _UPLOAD_AGAIN:
                    raise
                get_logger().warning("upload_repeated", error=str(error))
                await self._bring_again(request, writing)
            else:
                return
        await self._commit(request)

    async def _bring_again(self, request: pb.CommitPublishRequest, writing: Attempt) -> None:
        async with self._phase("UploadShards", "check the network to the weights service"):
            await writing.again()
            others = {written.name: written async for written in writing.files()}
            ours = [f for f in request.files if _is_here(others.get(f.name))]
            await self._upload(request, ours)

    def _local(self, version: int) -> Path:
        return self._upload_folder / folder_name(version)

    async def _shared_folder(self, version: int) -> SharedFolder | None:
        if not self._find_folder:
            return None
        async with self._phase("ProbeFolder", "check that the weights service answers"):
            return await shared_folder(self._stub, self._run_id, version)

    async def _upload(
        self,
        request: pb.CommitPublishRequest,
        files: Sequence[pb.WeightFile],
    ) -> None:
        """Continues where an earlier attempt, of this process or another one, ended."""
        head = pb.UploadShardsRequest(
            run_id=self._run_id, weight_version=request.weight_version, epoch=request.epoch
        )
        await self._uploader.upload(head, self._local(request.weight_version), files)

    async def _commit(self, request: pb.CommitPublishRequest) -> None:
        cure = "restart the trainer: it reads what was committed and continues from there"
        async with self._phase("CommitPublish", cure, CommitUnknown):
            await retry_forever("CommitPublish", lambda: self._stub.CommitPublish(request))

    @asynccontextmanager
    async def _phase(
        self, phase: str, cure: str, error: type[PublishTimeout] = PublishPostponed
    ) -> AsyncIterator[None]:
        """Raise `error` if what is done in this context takes longer than a phase may."""
        try:
            async with asyncio.timeout(self._phase_seconds) as deadline:
                yield
        except TimeoutError as late:
            if not deadline.expired():
                raise
            raise error(phase, self._phase_seconds, cure) from late


def _is_here(written: WrittenFile | None) -> bool:
    """Whether this rank has a file: one that no rank reports is none of weights."""
    return written is None or written.is_here


_ANNOUNCE_SECONDS = 10.0
"""Deadline; the service checks a file meanwhile."""


class Announcement:
    """Files that the service is told of; one that it could not be told of goes with the next."""

    def __init__(self, stub: WeightServiceAsyncStub, commit: pb.CommitPublishRequest) -> None:
        """`commit`: names run, version and epoch."""
        self._stub, self._is_known = stub, True
        self._telling = asyncio.Lock()
        self._request = pb.AnnounceFilesRequest(
            run_id=commit.run_id, weight_version=commit.weight_version, epoch=commit.epoch
        )

    async def add(self, file: pb.WeightFile) -> None:
        """Announce a file, and those that could not be before. Raises `StaleEpochError`."""
        self._request.files.append(file)
        async with self._telling:
            if self._is_known and self._request.files:
                await self._tell()

    async def _tell(self) -> None:
        number = len(self._request.files)
        try:
            await self._stub.AnnounceFiles(self._request, timeout=_ANNOUNCE_SECONDS)
            del self._request.files[:number]
        except grpc.aio.AioRpcError as error:
            # A service of the release before does not know it.
            self._is_known = error.code() != grpc.StatusCode.UNIMPLEMENTED
            refused = decode(error)
            if isinstance(refused, StaleEpochError):
                raise refused from error
            get_logger().debug("files_not_announced", error=str(refused))


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The weights service's folder of a version, which this machine sees."""

    path: Path
    probe: pb.FolderProbe
    """In it, by which another machine finds out."""


async def shared_folder(
    stub: WeightServiceAsyncStub, run_id: str, weight_version: int
) -> SharedFolder | None:
    """The version's folder, if both sides read what the other one wrote there; else None."""
    request = pb.ProbeFolderRequest(run_id=run_id, weight_version=weight_version)
    offer = await retry_forever("ProbeFolder", lambda: stub.ProbeFolder(request))
    folder = Path(offer.folder)
    if not offer.folder or not await asyncio.to_thread(sees, folder, offer.probe):
        return None
    try:
        written = await asyncio.to_thread(write_probe, folder)
    except OSError:
        return None  # it can be read only
    request.written.CopyFrom(written)
    try:
        answer = await retry_forever("ProbeFolder", lambda: stub.ProbeFolder(request))
    finally:
        (folder / written.name).unlink(missing_ok=True)
    return SharedFolder(folder, offer.probe) if answer.seen else None
