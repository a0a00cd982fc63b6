"""dm-reverb as one would use it for this: a TrajectoryWriter each, one item per trajectory.

What it does less than the others: `append` returns when the data is in the client's buffer; the
server confirms whole trajectories, when they are complete, and keeps them in memory only. So its
latencies, but for the last of each trajectory, are those of a local buffer. Steps of a writer must
have one shape: trajectories are cut anew, into segments of 128 tokens, the last one padded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np
import reverb  # type: ignore[import-not-found]

from bench.baselines.store.child import Child
from bench.baselines.store.workload import (
    MAX_TOKENS,
    Options,
    Reads,
    Result,
    Segment,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
)

_TABLE = "trajectories"
_SEGMENT_TOKENS = 128
_MAX_STEPS = MAX_TOKENS // _SEGMENT_TOKENS


def main() -> None:
    """Serve in one process, write in this one, read in a third."""
    options = Options.of(make_parser(__doc__).parse_args())
    work = [recut(trajectory) for trajectory in make_trajectories(options)]
    with Child(serve, options) as server:
        address = server.receive()
        with Child(read, address, options) as reader:
            reader.receive()
            writes = write(work, address, options)
            reads = reader.receive()
    Result.of("reverb", work, writes, reads).print()


def recut(trajectory: Trajectory) -> Trajectory:
    """The same tokens in segments of equal length; zeros fill the last."""
    parts = trajectory.segments
    token_ids = _cut([part.token_ids for part in parts])
    logprobs = _cut([part.logprobs for part in parts])
    versions = _cut([part.weight_versions for part in parts])
    segments = (
        Segment(token_ids=t, logprobs=p, weight_versions=v)
        for t, p, v in zip(token_ids, logprobs, versions, strict=True)
    )
    return Trajectory(index=trajectory.index, segments=tuple(segments))


def _cut(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[num_segments, 128]."""
    column = np.concatenate(parts)
    padding = -column.size % _SEGMENT_TOKENS
    return np.pad(column, (0, padding)).reshape(-1, _SEGMENT_TOKENS)


def serve(report: Connection, options: Options) -> None:
    """Until killed: a queue from which each trajectory is taken once."""
    table = reverb.Table.queue(_TABLE, max_size=options.trajectories)
    server = reverb.Server([table])
    report.send(f"127.0.0.1:{server.port}")
    server.wait()


def write(work: Sequence[Trajectory], address: str, options: Options) -> Writes:
    """A thread for each writer."""
    client = reverb.Client(address)
    writers = [client.trajectory_writer(_MAX_STEPS) for _ in range(options.writers)]
    untaken = iter(work)

    def run(writer: reverb.TrajectoryWriter) -> list[float]:
        return [seconds for trajectory in untaken for seconds in _append(writer, trajectory)]

    started = time.monotonic()
    with ThreadPoolExecutor(options.writers) as threads:
        latencies = [seconds for done in threads.map(run, writers) for seconds in done]
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def _append(writer: reverb.TrajectoryWriter, trajectory: Trajectory) -> Iterator[float]:
    """Seconds of each append; the last waits until the server has confirmed the trajectory."""
    num_steps = len(trajectory.segments)
    for step, segment in enumerate(trajectory.segments, start=1):
        sent = time.monotonic()
        writer.append([segment.token_ids, segment.logprobs, segment.weight_versions])
        if step == num_steps:
            columns = [column[-num_steps:] for column in writer.history]
            writer.create_item(_TABLE, 1.0, columns)
            writer.end_episode()
        yield time.monotonic() - sent


def read(report: Connection, address: str, options: Options) -> None:
    """Take trajectories as the client streams them."""
    client = reverb.Client(address)
    client.server_info()
    report.send("ready")
    trajectories = num_bytes = 0
    for sample in client.sample(_TABLE, options.trajectories, emit_timesteps=False):
        num_bytes += sum(column.nbytes for column in sample.data)
        trajectories += 1
    report.send(Reads(ended=time.monotonic(), trajectories=trajectories, bytes=num_bytes))


if __name__ == "__main__":
    main()
