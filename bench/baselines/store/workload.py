"""What every store is given, and the one form of what it did: numpy and the standard library only.

Each driver of this folder is a program, `python -m bench.baselines.store.<name>`, that moves the
workload through one store and ends with one JSON line, a `Result`. Clock readings of a driver's
processes are compared: `time.monotonic` is one clock for all processes of a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

MEDIAN_TOKENS = 3500
SIGMA = 0.45
MIN_TOKENS = 2048
MAX_TOKENS = 8192
MIN_SEGMENTS = 10
MAX_SEGMENTS = 50
VOCABULARY = 150_000
# A long rollout sees new weights a few times.
WEIGHT_UPDATE_PROBABILITY = 0.05
BYTES_PER_TOKEN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much work, and where.

    Example: Options(seed=0, trajectories=512, writers=64, batch=256)
    """

    seed: int
    """Of the workload."""
    trajectories: int
    """How many."""
    writers: int
    """Appending at the same time, each one segment at a time."""
    batch: int
    """Trajectories that a reader takes at once, at most."""
    redis: str = ""
    """Address of the Redis server, for the stores that stand on one."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """From what either parser read; a program's own arguments are left to it."""
        given = vars(arguments)
        return cls(
            **{field.name: given[field.name] for field in fields(cls) if field.name in given}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens that one append adds."""

    token_ids: npt.NDArray[np.int32]
    """[num_tokens]."""
    logprobs: npt.NDArray[np.float32]
    """[num_tokens]."""
    weight_versions: npt.NDArray[np.int32]
    """[num_tokens]; the same everywhere in a segment, for stores that keep one per token."""

    @property
    def weight_version(self) -> int:
        """The weights that sampled the segment, for stores that keep one per segment."""
        return int(self.weight_versions[0])

    def pack(self) -> bytes:
        """The three columns one after the other, 12 bytes a token."""
        columns = (self.token_ids, self.logprobs, self.weight_versions)
        return b"".join(column.tobytes() for column in columns)

    @staticmethod
    def unpack(data: bytes) -> npt.NDArray[np.int32]:
        """[3, num_tokens]: the columns of `pack`, log-probabilities by their bits."""
        return np.frombuffer(data, np.int32).reshape(3, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What one rollout appends, in order."""

    index: int
    """Its place in the workload, from 0; its name in a store is made of it."""
    segments: tuple[Segment, ...]
    """10 to 50."""

    @property
    def num_bytes(self) -> int:
        """At 12 bytes a token."""
        return BYTES_PER_TOKEN * sum(segment.token_ids.size for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """What the writers saw."""

    started: float
    """`time.monotonic()` before the first append."""
    ended: float
    """After the last acknowledgement."""
    latencies: Sequence[float]
    """Seconds of each append, until its acknowledgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the readers got."""

    ended: float
    """`time.monotonic()` when they had everything."""
    trajectories: int
    """How many they got."""
    bytes: int
    """Of all columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One store under the workload, as a JSON line."""

    peer: str
    """The store, as named in the figures."""
    appends: int
    """Acknowledged (of whole trajectories or batches, where a store takes those only)."""
    trajectories: int
    """Written, and read back."""
    bytes: int
    """Read back."""
    write_seconds: float
    """From the first append until the last acknowledgement."""
    total_seconds: float
    """From the first append until the readers had everything."""
    appends_per_second: float
    """Over `write_seconds`."""
    trajectories_per_second: float
    """Over `total_seconds`."""
    p50_ms: float
    """Median milliseconds of an append."""
    p99_ms: float
    """99th percentile of the same."""

    @classmethod
    def of(cls, peer: str, work: Sequence[Trajectory], writes: Writes, reads: Reads) -> Result:
        """Put both sides together.

        Raises:
            RuntimeError: the readers did not get what was written.
        """
        expected = len(work), sum(trajectory.num_bytes for trajectory in work)
        if (reads.trajectories, reads.bytes) != expected:
            got = (reads.trajectories, reads.bytes)
            raise RuntimeError(f"{peer}: wrote {expected} trajectories and bytes, read {got}")
        write_seconds = writes.ended - writes.started
        total_seconds = reads.ended - writes.started
        p50, p99 = np.percentile(writes.latencies, [50, 99]) * 1000
        return cls(
            peer=peer,
            appends=len(writes.latencies),
            trajectories=reads.trajectories,
            bytes=reads.bytes,
            write_seconds=write_seconds,
            total_seconds=total_seconds,
            appends_per_second=len(writes.latencies) / write_seconds,
            trajectories_per_second=reads.trajectories / total_seconds,
            p50_ms=float(p50),
            p99_ms=float(p99),
        )

    def print(self) -> None:
        """As the last line of a driver."""
        print(json.dumps(asdict(self)), flush=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that all drivers share."""
    parser = make_workload_parser(description)
    parser.add_argument("--redis", default="", metavar="URL")
    return parser


def make_workload_parser(description: str | None) -> argparse.ArgumentParser:
    """The workload alone, for the program that starts the drivers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    return parser


def make_trajectories(options: Options) -> list[Trajectory]:
    """Trajectories of 2k to 8k tokens in 10 to 50 segments, the same for the same seed."""
    random = np.random.default_rng(options.seed)
    return [_make_trajectory(index, random) for index in range(options.trajectories)]


async def write_segments(
    work: Sequence[Trajectory],
    num_writers: int,
    append: Callable[[Trajectory, int], Awaitable[object]],
) -> Writes:
    """Append every segment of every trajectory, each writer waiting for its own acknowledgement.

    `append(trajectory, i)` stores segment `i` and returns when the store has acknowledged it.
    """
    untaken = iter(work)
    latencies: list[float] = []

    async def write() -> None:
        for trajectory in untaken:
            for index in range(len(trajectory.segments)):
                sent = time.monotonic()
                await append(trajectory, index)
                latencies.append(time.monotonic() - sent)

    started = time.monotonic()
    async with asyncio.TaskGroup() as writers:
        for _ in range(num_writers):
            writers.create_task(write())
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def _make_trajectory(index: int, random: np.random.Generator) -> Trajectory:
    drawn = random.lognormal(np.log(MEDIAN_TOKENS), SIGMA)
    num_tokens = int(np.clip(drawn, MIN_TOKENS, MAX_TOKENS))
    num_segments = int(random.integers(MIN_SEGMENTS, MAX_SEGMENTS + 1))
    token_ids = random.integers(0, VOCABULARY, num_tokens, dtype=np.int32)
    logprobs = -random.exponential(size=num_tokens).astype(np.float32)
    versions = np.cumsum(random.random(num_segments) < WEIGHT_UPDATE_PROBABILITY)
    bounds = np.linspace(0, num_tokens, num_segments + 1).astype(int)
    segments = (
        Segment(
            token_ids=token_ids[start:end],
            logprobs=logprobs[start:end],
            weight_versions=np.full(end - start, version, np.int32),
        )
        for start, end, version in zip(bounds, bounds[1:], versions, strict=False)
    )
    return Trajectory(index=index, segments=tuple(segments))
