"""Publish weights in two phases: write a Hugging Face folder durably, then commit its checksums.

BEGUN (version and folder allocated) -> DURABLE (files, manifest.json, .complete) -> COMMITTED

Each phase has a deadline, and none waits for rollout servers:

    PublishTimeout               the phase, its deadline and the cure
    ├── PublishPostponed         not visible: publish later, under another version
    └── CommitUnknown            visible or not: read the newest version before continuing
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import grpc.aio
import torch
from seamflow.errors import NotFoundError
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from trainer.clients import retry_forever
from trainer.config import Setting
from trainer.publish.weight_folder import write_folder

__all__ = ["CommitUnknown", "PublishPostponed", "PublishTimeout", "Publisher"]


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
        *,
        phase_seconds: float = 600.0,
        adapter: Mapping[str, Setting] | None = None,
    ) -> None:
        """`phase_seconds` is the deadline of each phase; `adapter`: settings of a LoRA adapter."""
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(weight_grpc.WeightServiceStub, channel)
        self._run_id = run_id
        self._model_folder = model_folder
        self._phase_seconds = phase_seconds
        self._adapter = adapter
        self._writing: asyncio.Future[list[weight_pb2.WeightFile]] | None = None

    async def newest(self) -> weight_pb2.Manifest | None:
        """The newest committed version; None if nothing was published yet."""
        request = weight_pb2.GetManifestRequest(run_id=self._run_id)
        try:
            response = await retry_forever("GetManifest", lambda: self._stub.GetManifest(request))
        except NotFoundError:
            return None
        return response.manifest if response.HasField("manifest") else None

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
        """First phase: allocate number and folder of the version. Raises `PublishPostponed`."""
        begin = weight_pb2.BeginPublishRequest(
            run_id=self._run_id,
            step=step,
            parent_weight_version=parent,
            epoch=epoch,
            idempotency_key=f"step-{step}-epoch-{epoch}",
        )
        return await self._begin(begin)

    async def finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        tensors: Mapping[str, torch.Tensor],
        *,
        epoch: int,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Second and third phase: write, and commit after `after`. Raises `PublishTimeout`."""
        files = await self._write(Path(begun.folder), tensors)
        if after is not None:
            await after()
        commit = weight_pb2.CommitPublishRequest(
            run_id=self._run_id, weight_version=begun.weight_version, epoch=epoch, files=files
        )
        await self._commit(commit)

    async def _begin(
        self, request: weight_pb2.BeginPublishRequest
    ) -> weight_pb2.BeginPublishResponse:
        try:
            async with asyncio.timeout(self._phase_seconds):
                return await retry_forever("BeginPublish", lambda: self._stub.BeginPublish(request))
        except TimeoutError as error:
            cure = "check that the weights service and its Redis answer"
            raise PublishPostponed("BeginPublish", self._phase_seconds, cure) from error

    async def _write(
        self, folder: Path, tensors: Mapping[str, torch.Tensor]
    ) -> list[weight_pb2.WeightFile]:
        try:
            async with asyncio.timeout(self._phase_seconds):
                # A thread cannot be cancelled: one that missed its deadline ends before the next.
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                writing = asyncio.to_thread(
                    write_folder, folder, self._model_folder, tensors, self._adapter
                )
                self._writing = asyncio.ensure_future(writing)
                await asyncio.wait({self._writing})
        except TimeoutError as error:
            cure = "check the disk of the weights service's folder"
            raise PublishPostponed(f"writing {folder}", self._phase_seconds, cure) from error
        written, self._writing = self._writing, None
        return written.result()

    async def _commit(self, request: weight_pb2.CommitPublishRequest) -> None:
        try:
            async with asyncio.timeout(self._phase_seconds):
                await retry_forever("CommitPublish", lambda: self._stub.CommitPublish(request))
        except TimeoutError as error:
            cure = "restart the trainer: it reads what was committed and continues from there"
            raise CommitUnknown("CommitPublish", self._phase_seconds, cure) from error
