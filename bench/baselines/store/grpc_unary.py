"""grpc.aio as one would use it for this: a unary call for each segment, kept in a dictionary.

Messages are raw bytes without protobuf and nothing is stored, which costs gRPC least.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import grpc
import numpy as np
import uvloop

from bench.baselines.store.child import Child
from bench.baselines.store.workload import (
    Options,
    Reads,
    Result,
    Segment,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
    write_segments,
)

_SERVICE = "bench.SegmentStore"
_APPEND = f"/{_SERVICE}/Append"
_TAKE = f"/{_SERVICE}/Take"
# Append: trajectory index, whether it is the last segment, then the packed segment.
_HEADER = struct.Struct("<I?")
# Take: how many at most; the answer is, per trajectory, the number of bytes and its segments, each
# preceded by its number of bytes.
_COUNT = struct.Struct("<I")
_NO_LIMITS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def main() -> None:
    """Serve in one process, write in this one, read in a third."""
    options = Options.of(make_parser(__doc__).parse_args())
    work = make_trajectories(options)
    with Child(serve) as server:
        address = server.receive()
        with Child(read, address, options) as reader:
            reader.receive()
            writes = uvloop.run(write(work, address, options))
            reads = reader.receive()
    Result.of("grpc_unary", work, writes, reads).print()


class SegmentStore:
    """The server's memory: trajectories by index, and which of them are complete."""

    def __init__(self) -> None:
        """Start empty."""
        self._segments: dict[int, list[bytes]] = {}
        self._ready: asyncio.Queue[int] = asyncio.Queue()

    async def append(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        """Keep a segment; the empty answer acknowledges it."""
        index, last = _HEADER.unpack_from(request)
        self._segments.setdefault(index, []).append(request[_HEADER.size :])
        if last:
            self._ready.put_nowait(index)
        return b""

    async def take(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """Give complete trajectories away; waits for the first."""
        (limit,) = _COUNT.unpack(request)
        taken = [await self._ready.get()]
        while len(taken) < limit and not self._ready.empty():
            taken.append(self._ready.get_nowait())
        return _frame(_frame(self._segments.pop(index)) for index in taken)


def serve(report: Connection) -> None:
    """Until killed."""
    uvloop.run(_serve(report))


async def _serve(report: Connection) -> None:
    store, server = SegmentStore(), grpc.aio.server(options=_NO_LIMITS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Append": grpc.unary_unary_rpc_method_handler(store.append),
        "Take": grpc.unary_unary_rpc_method_handler(store.take),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report.send(f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def write(work: Sequence[Trajectory], address: str, options: Options) -> Writes:
    """All writers on one channel."""
    async with grpc.aio.insecure_channel(address, options=_NO_LIMITS) as channel:
        await channel.channel_ready()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_APPEND)

        async def append(trajectory: Trajectory, index: int) -> None:
            last = index + 1 == len(trajectory.segments)
            header = _HEADER.pack(trajectory.index, last)
            await call(header + trajectory.segments[index].pack())

        return await write_segments(work, options.writers, append)


def read(report: Connection, address: str, options: Options) -> None:
    """Take what is ready, a batch at a time."""
    with grpc.insecure_channel(address, options=_NO_LIMITS) as channel:
        grpc.channel_ready_future(channel).result()
        take: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_TAKE)
        report.send("ready")
        trajectories = num_bytes = 0
        while trajectories < options.trajectories:
            for frame in _unframe(take(_COUNT.pack(options.batch))):
                segments = [Segment.unpack(segment) for segment in _unframe(frame)]
                num_bytes += np.concatenate(segments, axis=1).nbytes
                trajectories += 1
    report.send(Reads(ended=time.monotonic(), trajectories=trajectories, bytes=num_bytes))


def _frame(parts: Iterator[bytes] | list[bytes]) -> bytes:
    return b"".join(_COUNT.pack(len(part)) + part for part in parts)


def _unframe(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        (size,) = _COUNT.unpack_from(data, position)
        position += _COUNT.size
        yield data[position : position + size]
        position += size


if __name__ == "__main__":
    main()
