"""Tells the weights service of files before the commit; without it they are checked then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.errors import StaleEpochError, decode
from seamflow.weights.v1 import weight_service_pb2 as pb

from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_SECONDS = 10.0
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
            await self._stub.AnnounceFiles(self._request, timeout=_SECONDS)
            del self._request.files[:number]
        except grpc.aio.AioRpcError as error:
            # A service of the release before does not know it.
            self._is_known = error.code() != grpc.StatusCode.UNIMPLEMENTED
            refused = decode(error)
            if isinstance(refused, StaleEpochError):
                raise refused from error
            get_logger().debug("files_not_announced", error=str(refused))
