"""Ray as one would use it for this: an actor that keeps the segments, one call for each append."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray  # type: ignore[import-not-found]

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

_EMPTY_SECONDS = 0.005


def main() -> None:
    """Write in this process; the store and the reader are actors, each a process."""
    options = Options.of(make_parser(__doc__).parse_args())
    work = make_trajectories(options)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves the machine
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    # They ask for no core: both must run on a machine of two.
    store = ray.remote(num_cpus=0)(SegmentStore).remote()
    reader = ray.remote(num_cpus=0)(Reader).remote(store, options)
    ray.get([store.take.remote(0), reader.ready.remote()])
    read = reader.read.remote()
    writes = asyncio.run(write(work, store, options))
    Result.of("ray_actor", work, writes, ray.get(read)).print()
    ray.shutdown()


class SegmentStore:
    """The actor's memory: trajectories by index, and which of them are complete."""

    def __init__(self) -> None:
        """Start empty."""
        self._segments: dict[int, list[bytes]] = {}
        self._ready: list[int] = []

    def append(self, index: int, last: bool, segment: bytes) -> None:
        """Keep a segment; the call's return acknowledges it."""
        self._segments.setdefault(index, []).append(segment)
        if last:
            self._ready.append(index)

    def take(self, limit: int) -> list[list[bytes]]:
        """Give complete trajectories away, as many as there are up to `limit`."""
        taken = self._ready[:limit]
        del self._ready[:limit]
        return [self._segments.pop(index) for index in taken]


class Reader:
    """Takes what is ready, a batch at a time."""

    def __init__(self, store: Any, options: Options) -> None:
        """It reads from `store` until it has all trajectories."""
        self._store = store
        self._options = options

    def ready(self) -> bool:
        """Returns once its process is there."""
        return True

    def read(self) -> Reads:
        """Everything."""
        trajectories = num_bytes = 0
        while trajectories < self._options.trajectories:
            batch = ray.get(self._store.take.remote(self._options.batch))
            for segments in batch:
                columns = [Segment.unpack(segment) for segment in segments]
                num_bytes += np.concatenate(columns, axis=1).nbytes
            trajectories += len(batch)
            if not batch:
                time.sleep(_EMPTY_SECONDS)
        return Reads(ended=time.monotonic(), trajectories=trajectories, bytes=num_bytes)


async def write(work: Sequence[Trajectory], store: Any, options: Options) -> Writes:
    """Each writer awaits the actor's answer."""

    async def append(trajectory: Trajectory, index: int) -> None:
        last = index + 1 == len(trajectory.segments)
        await store.append.remote(trajectory.index, last, trajectory.segments[index].pack())

    return await write_segments(work, options.writers, append)


if __name__ == "__main__":
    main()
