"""Publish weights in two phases: write a Hugging Face folder durably, then commit its checksums.

BEGUN (version and folder allocated) -> DURABLE (files, manifest.json, .complete) -> COMMITTED

Each step has a deadline, and none waits for rollout servers:

    PublishTimeout               the phase, its deadline and the cure
    ├── PublishPutOff            nothing is visible: publish later, under another version
    └── CommitUnknown            it may be visible or not: ask what is newest before going on
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import grpc.aio
import torch
from seamflow.errors import NotFoundError
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from services.chassis.log import get_logger
from trainer.background import Beside
from trainer.clients import persistently
from trainer.config import Setting
from trainer.publish.weight_folder import write_folder

__all__ = ["CommitUnknown", "PublishPutOff", "PublishTimeout", "Publisher", "Publishing"]


class PublishTimeout(Exception):  # noqa: N818 -- names the event
    """A phase of a publish took longer than it may."""

    def __init__(self, phase: str, seconds: float, cure: str) -> None:
        super().__init__(phase, seconds, cure)
        self.phase, self.seconds, self.cure = phase, seconds, cure

    def __str__(self) -> str:
        return f"publish: {self.phase} was not done after {self.seconds:g} s; {self.cure}"


class PublishPutOff(PublishTimeout):
    """Nothing became visible, and nothing will of this attempt."""


class CommitUnknown(PublishTimeout):
    """The commit may have been made or not; only the weights service knows."""


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
        """`phase_seconds` is the deadline of each phase; `adapter` tells of the adapter, if one."""
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
            response = await persistently("GetManifest", lambda: self._stub.GetManifest(request))
        except NotFoundError:
            return None
        return response.manifest if response.HasField("manifest") else None

    async def publish(
        self, tensors: Mapping[str, torch.Tensor], *, step: int, parent: int, epoch: int
    ) -> int:
        """Publish the weights that optimizer step `step` made from version `parent`; their version.

        Another epoch is another publish: after a crash the same step may give other weights.
        Raises `PublishTimeout`.
        """
        begun = await self.begin(step=step, parent=parent, epoch=epoch)
        await self.finish(begun, tensors, epoch=epoch)
        return int(begun.weight_version)

    async def begin(self, *, step: int, parent: int, epoch: int) -> weight_pb2.BeginPublishResponse:
        """The first phase: number and folder of the version. Raises `PublishPutOff`."""
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
        """The other two: write, commit, this once `after` is over. Raises `PublishTimeout`."""
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
                return await persistently("BeginPublish", lambda: self._stub.BeginPublish(request))
        except TimeoutError as error:
            cure = "see whether the weights service and its Redis answer"
            raise PublishPutOff("BeginPublish", self._phase_seconds, cure) from error

    async def _write(
        self, folder: Path, tensors: Mapping[str, torch.Tensor]
    ) -> list[weight_pb2.WeightFile]:
        try:
            async with asyncio.timeout(self._phase_seconds):
                # A thread cannot be stopped: one that was given up on ends before another begins.
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                writing = asyncio.to_thread(
                    write_folder, folder, self._model_folder, tensors, self._adapter
                )
                self._writing = asyncio.ensure_future(writing)
                await asyncio.wait({self._writing})
        except TimeoutError as error:
            cure = "see what slows the disk of the weights service's folder"
            raise PublishPutOff(f"writing {folder}", self._phase_seconds, cure) from error
        written, self._writing = self._writing, None
        return written.result()

    async def _commit(self, request: weight_pb2.CommitPublishRequest) -> None:
        try:
            async with asyncio.timeout(self._phase_seconds):
                await persistently("CommitPublish", lambda: self._stub.CommitPublish(request))
        except TimeoutError as error:
            cure = "start again: the trainer asks what was committed, and goes on from there"
            raise CommitUnknown("CommitPublish", self._phase_seconds, cure) from error


class Publishing:
    """Publishes while training goes on, one version after the other.

    StreamRL's full overlap (arXiv 2504.15930): a step waits for the number of its version alone.
    What is put off is tried again, until newer weights take its place.
    """

    def __init__(self, publisher: Publisher) -> None:
        """Nothing is under way."""
        self._publisher = publisher
        self.work = Beside()
        self._superseded = False
        self.weight_version = 0
        """Newest committed version, as far as is known."""
        self.begun_version = 0
        """That, or the one under way: what is sampled from now on is compared with it."""

    async def newest(self) -> weight_pb2.Manifest | None:
        """As of the publisher."""
        manifest = await self._publisher.newest()
        self.weight_version = 0 if manifest is None else manifest.weight_version
        self.begun_version = self.weight_version
        return manifest

    async def make_way(self) -> None:
        """Wait until what is under way is done, or put off once more: newer weights are coming.

        Raises `PublishTimeout`, or what else it ended with.
        """
        self._superseded = True
        try:
            await self.end()
        finally:
            self._superseded = False

    async def begin(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        epoch: int,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Begin to publish, to be committed once `after` is over; nothing is under way.

        Raises `PublishPutOff`: it has no number.
        """
        begun = await self._publisher.begin(step=step, parent=self.weight_version, epoch=epoch)
        self.begun_version = int(begun.weight_version)
        self.work.begin(self._finish(begun, tensors, epoch, after))

    async def end(self) -> None:
        """Wait until nothing is under way. Raises as `make_way`."""
        await self.work.end()

    async def _finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        tensors: Mapping[str, torch.Tensor],
        epoch: int,
        after: Callable[[], Awaitable[None]] | None,
    ) -> None:
        began = time.monotonic()
        while not await self._finished(begun, tensors, epoch, after):
            if self._superseded:
                self.begun_version = self.weight_version
                return
        self.weight_version = begun.weight_version
        seconds = round(time.monotonic() - began, 4)
        get_logger().info("published", weight_version=begun.weight_version, seconds=seconds)

    async def _finished(
        self,
        begun: weight_pb2.BeginPublishResponse,
        tensors: Mapping[str, torch.Tensor],
        epoch: int,
        after: Callable[[], Awaitable[None]] | None,
    ) -> bool:
        try:
            await self._publisher.finish(begun, tensors, epoch=epoch, after=after)
        except PublishPutOff as error:
            version = begun.weight_version
            get_logger().warning("publish_put_off", weight_version=version, error=str(error))
            return False
        return True
