"""Publish weights: write a Hugging Face folder, bring it to the weights service, commit it.

BEGUN (version allocated) -> WRITTEN -> UPLOADED -> COMMITTED

The folder is the service's own where both see it (`shared_folder`); else a local one, which is
uploaded. Each phase has a deadline, and none waits for rollout servers:

    PublishTimeout               the phase, its deadline and the cure
    ├── PublishPostponed         not visible: publish later, under another version
    └── CommitUnknown            visible or not: read the newest version before continuing
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import torch
from seamflow.errors import NotFoundError, PreconditionError
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from services.chassis.errors import Reason
from services.chassis.log import get_logger
from services.chassis.rpc.retries import retry_forever
from services.lib.weight_files.folder_names import folder_name, versions_in
from trainer.config import Setting
from trainer.publish.folder_probe import shared_folder
from trainer.publish.uploader import Uploader
from trainer.publish.weight_folder import weight_digests, write_folder

__all__ = ["CommitUnknown", "PublishPostponed", "PublishTimeout", "Publisher"]

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
        phase_seconds: float = 600.0,
        adapter: Mapping[str, Setting] | None = None,
        find_folder: bool = True,
        compress: bool = False,
    ) -> None:
        """Args as the settings of `trainer.publish`, and:

        upload_folder: holds a version while it is uploaded, for this process alone.
        adapter: settings of a LoRA adapter; None: whole weights are published.
        """
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(weight_grpc.WeightServiceStub, channel)
        self._run_id = run_id
        self._model_folder = model_folder
        self._phase_seconds = phase_seconds
        self._adapter = adapter
        self._upload_folder, self._find_folder = upload_folder, find_folder
        self._uploader = Uploader(channel, compress=compress)
        self._writing: asyncio.Future[list[weight_pb2.WeightFile]] | None = None

    async def newest(self) -> weight_pb2.Manifest | None:
        """The newest committed version; None if nothing was published yet."""
        request = weight_pb2.GetManifestRequest(run_id=self._run_id)
        try:
            response = await retry_forever("GetManifest", lambda: self._stub.GetManifest(request))
        except NotFoundError:
            return None
        return response.manifest if response.HasField("manifest") else None

    async def holds(
        self, manifest: weight_pb2.Manifest, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether a version has exactly these tensors, by the checksums of its files."""
        adapter = self._adapter is not None
        ours = await asyncio.to_thread(weight_digests, tensors, adapter=adapter)
        theirs = {f.name: f.sha256 for f in manifest.files if f.name.endswith(".safetensors")}
        return ours == theirs

    async def publish(
        self, tensors: Mapping[str, torch.Tensor], *, step: int, parent: int, epoch: int
    ) -> int:
        """Publish the weights of optimizer step `step`, trained from version `parent`.

        Returns the new version. Idempotent per step and epoch: after a crash, under the next epoch,
        the same step may give other weights. Raises `PublishTimeout`.
        """
        begun = await self.begin(step=step, parent=parent, epoch=epoch)
        await self.finish(begun, tensors, epoch=epoch)
        return int(begun.weight_version)

    async def begin(self, *, step: int, parent: int, epoch: int) -> weight_pb2.BeginPublishResponse:
        """First phase: allocate the number of the version. Raises `PublishPostponed`."""
        begin = weight_pb2.BeginPublishRequest(
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
        self,
        begun: weight_pb2.BeginPublishResponse,
        tensors: Mapping[str, torch.Tensor],
        *,
        epoch: int,
    ) -> None:
        """The other phases: write, upload and commit. Raises `PublishTimeout`."""
        version = begun.weight_version
        shared = await self._shared_folder(version)
        files = await self._write(shared, version, tensors)
        head = weight_pb2.UploadShardsRequest(
            run_id=self._run_id, weight_version=version, epoch=epoch
        )
        commit = weight_pb2.CommitPublishRequest(
            run_id=self._run_id, weight_version=version, epoch=epoch, files=files
        )
        if shared is not None:
            await self._commit(commit)
        else:
            await self._upload(head, files)
            await self._commit_uploaded(commit, head)
            await asyncio.to_thread(self._forget_local, version)

    async def _commit_uploaded(
        self, commit: weight_pb2.CommitPublishRequest, head: weight_pb2.UploadShardsRequest
    ) -> None:
        """Commit; upload again what the service lost in a crash, or found damaged."""
        for _ in range(_UPLOADS - 1):
            try:
                await self._commit(commit)
            except PreconditionError as error:
                if error.reason not in _UPLOAD_AGAIN:
                    raise
                get_logger().warning("upload_repeated", error=str(error))
                await self._upload(head, commit.files)
            else:
                return
        await self._commit(commit)

    def _forget_local(self, version: int) -> None:
        """Delete what this and earlier versions left; a newer trainer's version is newer."""
        for old in versions_in(self._upload_folder):
            if old <= version:
                shutil.rmtree(self._local(old), ignore_errors=True)

    def _local(self, version: int) -> Path:
        return self._upload_folder / folder_name(version)

    async def _shared_folder(self, version: int) -> Path | None:
        if not self._find_folder:
            return None
        async with self._phase("ProbeFolder", "check that the weights service answers"):
            return await shared_folder(self._stub, self._run_id, version)

    async def _write(
        self, shared: Path | None, version: int, tensors: Mapping[str, torch.Tensor]
    ) -> list[weight_pb2.WeightFile]:
        """Write durably into the shared folder, or else into a local one."""
        folder, durable = shared or self._local(version), shared is not None
        async with self._phase(f"writing {folder}", "check the disk of that folder"):
            # A thread cannot be cancelled: one that missed its deadline ends before the next.
            if self._writing is not None:
                await asyncio.wait({self._writing})
            await asyncio.to_thread(self._forget_local, version)
            writing = asyncio.to_thread(
                write_folder, folder, self._model_folder, tensors, self._adapter, durable
            )
            self._writing = asyncio.ensure_future(writing)
            await asyncio.wait({self._writing})
        written, self._writing = self._writing, None
        if written.exception() is not None:  # half a version would keep a full disk full
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return written.result()

    async def _upload(
        self, head: weight_pb2.UploadShardsRequest, files: Sequence[weight_pb2.WeightFile]
    ) -> None:
        """Continues where an earlier attempt, of this process or another one, ended."""
        cure = "check the network to the weights service and its disk; the next attempt continues"
        async with self._phase("UploadShards", cure):
            await self._uploader.upload(head, self._local(head.weight_version), files)

    async def _commit(self, request: weight_pb2.CommitPublishRequest) -> None:
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
