"""Keeps the server at the newest committed weights, across outages of the weights service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.errors import SeamflowError
from seamflow.retry import Backoff
from seamflow.weights.v1 import weight_service_pb2 as pb

from rollout.server.engine_lifecycle import EngineLifecycle
from rollout.server.engines.engine import EngineFailed, WeightsError
from services.chassis import metrics
from services.chassis.log import get_logger
from services.chassis.rpc import tracing

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_FAILURES = metrics.counter(
    "rollout_server", "weight_update_failures_total", "Weight versions that could not be loaded."
)


class WeightWatcher:
    """Loops: one watches versions, two fetch files before their commit and have the engine read
    them, one swaps the newest in, one does so after a hold.
    """

    def __init__(
        self, server: EngineLifecycle, stub: WeightServiceAsyncStub, *, run_id: str, model: str
    ) -> None:
        self._server = server
        self._stub = stub
        self._run_id = run_id
        self._model = model
        self._newest = 0
        self._traceparent: str | None = None  # of the commit of the newest
        self._committed = asyncio.Event()
        self._announced: pb.Manifest | None = None  # files so far of the next version
        self._files_announced = asyncio.Event()
        self._fetched: Sequence[Path] = ()  # of them
        self._files_fetched = asyncio.Event()
        self._log = get_logger()

    async def run(self) -> None:
        """Begin serving, then watch until cancelled."""
        await self.begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._fetch_ahead())
            tasks.create_task(self._prepare_ahead())
            tasks.create_task(self._apply())
            tasks.create_task(self._catch_up())

    async def begin(self) -> None:
        """Have the server load the newest weights and serve; retries until it succeeds."""
        backoff = Backoff()
        while True:
            try:
                return await self._server.begin()
            except (WeightsError, SeamflowError, EngineFailed) as error:
                self._report(error)
            await backoff.wait()

    async def _watch(self) -> None:
        """Watch versions, keeping only the newest; slow loading does not block this loop."""
        self._newest = self._server.engine.weight_version
        backoff = Backoff()
        while True:
            request = pb.WatchVersionsRequest(
                run_id=self._run_id,
                model=self._model,
                after_weight_version=self._newest,
                with_announced=True,
            )
            try:
                async for response in self._stub.WatchVersions(request):
                    self._hear(response)
                    backoff.reset()
            except grpc.aio.AioRpcError as error:
                self._log.warning("weights_service_lost", code=error.code().name)
            await backoff.wait()

    def _hear(self, response: pb.WatchVersionsResponse) -> None:
        if response.HasField("announced"):
            self._announced = response.announced
            self._files_announced.set()
            return
        manifest = response.manifest
        if manifest.weight_version > self._newest:
            self._newest = manifest.weight_version
            self._traceparent = manifest.traceparent or None
        self._committed.set()

    async def _fetch_ahead(self) -> None:
        """Fetch announced files; what fails here is fetched after the commit."""
        while True:
            await self._files_announced.wait()
            await self._server.hold.ended()
            self._files_announced.clear()
            if (announced := self._announced) is None:
                continue
            try:
                self._fetched = await self._server.fetch_ahead(announced)
                self._files_fetched.set()
            except (WeightsError, SeamflowError) as error:
                self._log.warning("weights_not_fetched_ahead", error=str(error))

    async def _prepare_ahead(self) -> None:
        """Have the engine read what was fetched ahead; what fails here is read after the commit."""
        while True:
            await self._files_fetched.wait()
            self._files_fetched.clear()
            try:
                await self._server.prepare_ahead(self._fetched)
            except WeightsError as error:
                self._log.warning("weights_not_prepared_ahead", error=str(error))

    async def _apply(self) -> None:
        backoff = Backoff()
        while True:
            await self._committed.wait()
            self._committed.clear()
            await self._server.hold.ended()
            try:
                with tracing.span(
                    "update weights", parent=self._traceparent, weight_version=self._newest
                ):
                    await self._server.follow(self._newest)
                backoff.reset()
            except (WeightsError, SeamflowError, EngineFailed) as error:
                self._report(error)
                await backoff.wait()
                self._committed.set()

    async def _catch_up(self) -> None:
        """Swap the newest version in when a hold has ended."""
        while True:
            await self._server.hold.next_end()
            self._committed.set()

    def _report(self, error: Exception) -> None:
        if isinstance(error, EngineFailed) and "restart" not in self._server.engine.info.features:
            raise error
        _FAILURES.inc()
        self._log.warning("weights_not_loaded", weight_version=self._newest, error=str(error))
