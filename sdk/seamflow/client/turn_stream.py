"""One turn as it is sampled: a stream of chunks that outlives broken connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

import grpc.aio

from seamflow.client.turn import Turn
from seamflow.errors import SeamflowError, decode
from seamflow.retry import Backoff, may_resume
from seamflow.rollout.v1 import rollout_service_pb2 as pb

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub


Metadata = tuple[tuple[str, str], ...]


class TurnStream:
    """The chunks of a turn, in order and once each: `async for chunk in stream`.

    Broken connections are resumed at the first missing token. `SeamflowError` is raised for a
    failure that a retry does not cure. Leaving the loop early stops the engine's work.
    """

    def __init__(
        self,
        stub: RolloutServiceAsyncStub,
        request: pb.GenerateRequest,
        metadata: Metadata,
        observe: Callable[[pb.TokenChunk], None] | None = None,
    ) -> None:
        """`observe` is called with each chunk as it arrives, before anything else."""
        self.turn = Turn(turn_id=request.turn_id)
        """What has arrived so far; complete once the stream has ended."""
        self._stub = stub
        self._request = request
        self._metadata = metadata
        self._observe = observe

    def __aiter__(self) -> AsyncIterator[pb.TokenChunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[pb.TokenChunk]:
        backoff = Backoff()
        while self.turn.finish_reason is None:
            self._request.resume_from_offset = len(self.turn.token_ids)
            call = self._stub.Generate(self._request, metadata=self._metadata)
            try:
                async for response in call:
                    backoff.reset()
                    if response.HasField("chunk"):
                        yield self._received(response.chunk)
                    elif response.HasField("end"):
                        self.turn.end(response.end)
                if self.turn.finish_reason is None:  # the gateway is draining
                    await backoff.wait()
            except grpc.aio.AioRpcError as failure:
                await _wait_or_raise(decode(failure), backoff)
            finally:
                call.cancel()

    def _received(self, chunk: pb.TokenChunk) -> pb.TokenChunk:
        if self._observe is not None:
            self._observe(chunk)
        self.turn.extend(chunk)
        return chunk


async def _wait_or_raise(error: SeamflowError, backoff: Backoff) -> None:
    if not may_resume(error):
        raise error
    await backoff.wait(error.retry_after)
