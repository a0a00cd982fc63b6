"""Sends the files of a version to a weights service that does not see this machine's disk.

The service alone knows how far an upload is: after each failure, and in a new process, it is asked
and the upload continues there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from threading import Lock, Thread

import grpc.aio
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    PreconditionError,
    SeamflowError,
    UnavailableError,
    decode,
)
from seamflow.retry import Backoff
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from services.chassis.errors import Reason
from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from services.lib.weight_files.shard_chunks import (
    CHUNK_BYTES,
    encode_upload,
    keep_freed_memory,
    smallest,
)

_METHOD = "/seamflow.weights.v1.WeightService/UploadShards"
_TOGETHER = 4
"""Parts that are read and checksummed together while the ones before them are sent."""
_TRIES = 3
"""Refusals in a row, without a byte more at the service, that end an upload."""
_AWAY = (UnavailableError, ExhaustedError, DeadlineError)

Part = tuple[pb.WeightFile, int]
"""A file, and the position of a part of it."""


class Uploader:
    """Uploads files of a folder, part by part, each with its checksum."""

    def __init__(self, channel: grpc.aio.Channel, *, compress: bool = False) -> None:
        """`channel` to the weights service; `compress`: parts that Zstandard makes smaller."""
        self._channel = channel
        self._stub = async_stub(WeightServiceStub, channel)
        self._compress = compress
        keep_freed_memory()

    async def upload(
        self, head: pb.UploadShardsRequest, folder: Path, files: Sequence[pb.WeightFile]
    ) -> None:
        """Send what the service lacks of `files`; `head` names run, version and epoch.

        Retries without a limit while the service is unavailable or pushes back. Raises
        `SeamflowError` for other errors, and for a part that it refused three times.
        """
        held: dict[str, int] = {}
        refusals, alone, backoff = 0, False, Backoff()
        while True:
            before, held = held, await self._held(head, files)
            if not (parts := _missing(files, held)):
                return
            refusals = refusals if held == before else 0
            try:
                await self._send(head, folder, parts[:1] if alone else parts)
                alone = False
            except SeamflowError as error:
                # gRPC hides why a stream ended that was refused while it was written to (INTERNAL);
                # a stream of one part tells.
                alone = True
                refusals += not isinstance(error, _AWAY)
                if not _may_continue(error) or refusals == _TRIES:
                    raise
                get_logger().warning("upload_interrupted", error=str(error))
                await backoff.wait(error.retry_after)

    async def _held(
        self, head: pb.UploadShardsRequest, files: Sequence[pb.WeightFile]
    ) -> dict[str, int]:
        """Bytes the service has of each file that it has anything of."""
        request = pb.GetUploadRequest(
            run_id=head.run_id, model=head.model, weight_version=head.weight_version, files=files
        )
        response = await retry_forever("GetUpload", lambda: self._stub.GetUpload(request))
        return {file.name: file.num_bytes for file in response.files}

    async def _send(
        self, head: pb.UploadShardsRequest, folder: Path, parts: Sequence[Part]
    ) -> None:
        """Send `parts` in one stream, reading ahead. Raises `SeamflowError` or `OSError`."""
        call = self._channel.stream_unary(
            _METHOD,
            request_serializer=bytes,
            response_deserializer=pb.UploadShardsResponse.FromString,
        )(None)
        try:
            ahead = self._read(head, folder, parts[:_TOGETHER])
            for begin in range(_TOGETHER, len(parts) + _TOGETHER, _TOGETHER):
                messages = await ahead
                ahead = self._read(head, folder, parts[begin : begin + _TOGETHER])
                for message in messages:
                    await call.write(message)
            await call.done_writing()
            await call
        except grpc.aio.AioRpcError as error:
            raise decode(error) from error
        except asyncio.InvalidStateError:
            await _raise_outcome(call)
        finally:
            call.cancel()

    def _read(
        self, head: pb.UploadShardsRequest, folder: Path, parts: Sequence[Part]
    ) -> asyncio.Future[list[bytes]]:
        def messages() -> list[bytes]:
            return [self._message(head, folder, *part) for part in parts]

        return asyncio.ensure_future(asyncio.to_thread(messages))

    def _message(
        self, head: pb.UploadShardsRequest, folder: Path, file: pb.WeightFile, offset: int
    ) -> bytes:
        with (folder / file.name).open("rb") as opened:
            opened.seek(offset)
            data = opened.read(CHUNK_BYTES)
        request = pb.UploadShardsRequest(file=file, offset=offset)
        request.MergeFrom(head)
        request.encoding, sent = smallest(data, compressed=self._compress)
        if request.encoding:
            request.num_bytes = len(data)
        return encode_upload(request, sent)


class ThreadUploader:
    """Uploads for threads that have no event loop; there is one in a thread of its own."""

    def __init__(
        self, connect: Callable[[], grpc.aio.Channel], run_id: str, *, compress: bool = False
    ) -> None:
        """Args:

        connect: opens a channel to the weights service, in that thread.
        run_id: of the training job.
        compress: as that of `Uploader`.
        """
        self._connect, self._run_id, self._compress = connect, run_id, compress
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = Lock()
        self._uploader: Uploader | None = None

    def upload(
        self,
        head: pb.UploadShardsRequest,
        folder: Path,
        file: pb.WeightFile,
        is_over: Callable[[], bool],
    ) -> None:
        """Send what the service lacks of a file; see `Uploader.upload`. Threads may do so at once.

        Raises:
            SeamflowError: it was refused, or `is_over` is true: the attempt has ended.
        """
        head.run_id = self._run_id
        sending = asyncio.run_coroutine_threadsafe(self._send(head, folder, file), self._started())
        while not sending.done():
            wait({sending}, timeout=1.0)
            if is_over() and sending.cancel():
                raise UnavailableError(f"{file.name} was not uploaded in time")
        sending.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, daemon=True, name="upload").start()
            return self._loop

    async def _send(self, head: pb.UploadShardsRequest, folder: Path, file: pb.WeightFile) -> None:
        if self._uploader is None:
            self._uploader = Uploader(self._connect(), compress=self._compress)
        await self._uploader.upload(head, folder, [file])


def _missing(files: Sequence[pb.WeightFile], held: Mapping[str, int]) -> list[Part]:
    """The parts that the service lacks; an empty file is one part, until it is there."""
    return [
        (file, offset)
        for file in files
        for offset in range(
            held.get(file.name, 0),
            file.num_bytes if file.name in held else max(file.num_bytes, 1),
            CHUNK_BYTES,
        )
    ]


def _may_continue(error: SeamflowError) -> bool:
    """Whether the service may take the same parts at another attempt."""
    reasons = (Reason.CHECKSUM_MISMATCH, Reason.OFFSET_GAP)
    refused = isinstance(error, PreconditionError) and error.reason in reasons
    return refused or isinstance(error, (*_AWAY, InternalError))


async def _raise_outcome(call: Awaitable[pb.UploadShardsResponse]) -> None:
    """Raise the error that ended the call while parts were still to be sent."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise decode(error) from error
