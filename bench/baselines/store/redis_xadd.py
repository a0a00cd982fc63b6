"""redis-py as one would use it for this: a stream per trajectory, XADD for each segment.

The last XADD travels with the RPUSH that tells the reader. Segments are one packed field, which
is the form that costs redis-py least.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import redis
import redis.asyncio
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

_READY = b"ready"
_FIELD = b"segment"


def main() -> None:
    """Write in this process, read in another."""
    options = Options.of(make_parser(__doc__).parse_args())
    work = make_trajectories(options)
    with Child(read, options) as reader:
        reader.receive()
        writes = uvloop.run(write(work, options))
        reads = reader.receive()
    Result.of("redis_xadd", work, writes, reads).print()


async def write(work: Sequence[Trajectory], options: Options) -> Writes:
    """With one connection for each writer."""
    client = redis.asyncio.Redis.from_url(options.redis, max_connections=options.writers)
    await asyncio.gather(*[client.ping() for _ in range(options.writers)])

    async def append(trajectory: Trajectory, index: int) -> None:
        key, segment = b"t:%d" % trajectory.index, trajectory.segments[index]
        if index + 1 < len(trajectory.segments):
            await client.xadd(key, {_FIELD: segment.pack()})
            return
        end = client.pipeline(transaction=False)
        end.xadd(key, {_FIELD: segment.pack()})
        end.rpush(_READY, b"%d" % trajectory.index)
        await end.execute()

    try:
        return await write_segments(work, options.writers, append)
    finally:
        await client.aclose()


def read(report: Connection, options: Options) -> None:
    """Take what is ready, a batch at a time, and delete it."""
    client = redis.Redis.from_url(options.redis)
    client.ping()
    report.send("ready")
    trajectories = num_bytes = 0
    while trajectories < options.trajectories:
        keys = _take_ready(client, options.batch)
        fetch = client.pipeline(transaction=False)
        for key in keys:
            fetch.xrange(key)
        num_bytes += sum(_join(entries).nbytes for entries in fetch.execute())
        client.unlink(*keys)
        trajectories += len(keys)
    report.send(Reads(ended=time.monotonic(), trajectories=trajectories, bytes=num_bytes))


def _take_ready(client: Any, batch: int) -> list[bytes]:
    _, first = client.blpop(_READY, timeout=60)
    rest = client.lpop(_READY, batch - 1) if batch > 1 else None
    return [b"t:" + index for index in (first, *(rest or ()))]


def _join(entries: list[tuple[bytes, dict[bytes, bytes]]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[3, num_tokens] of the whole trajectory."""
    return np.concatenate([Segment.unpack(entry[_FIELD]) for _, entry in entries], axis=1)


if __name__ == "__main__":
    main()
